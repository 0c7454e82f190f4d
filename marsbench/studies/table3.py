"""Table 3: what the SFT loss does, at block sizes 4, 8 and 16 and one token per forward pass."""

from collections.abc import Iterator

from marsbench.findings.between_lines import as_accurate, emits_more, gains_more, more_accurate
from marsbench.findings.claims import Claim, Section
from marsbench.rendering.figures import accuracy_figure
from marsbench.rendering.sections import ABLATIONS_DEVIATION
from marsbench.running.plans import TablePlan
from marsbench.studies.lines import ABLATIONS, ALIGNED, AR_SFT, BLOCK_SIZES, MARS_STAGES, mars, mars_name
from marsbench.studies.study import TablePage
from marsbench.studies.table2 import NOTHING_TO_TEACH

SECTION = Section("Table 3", (4, 3))
_SMALLEST, _MIDDLE, _LARGEST = BLOCK_SIZES
_RELEASED, _CLEAN = ABLATIONS
PLAN = TablePlan(
    "3",
    "What the SFT loss does, by block size, at one token per forward pass",
    (AR_SFT, *[mars(stage, size) for size in BLOCK_SIZES for stage in MARS_STAGES]),
)
# A seed that no other table has, so that all its lines start from one training of AR SFT.
PLAN_ALIGNED = TablePlan(
    "alignment",
    "What the SFT loss does in the paper's alignment",
    (AR_SFT, *[mars(stage, size) for size in (_SMALLEST, _LARGEST) for stage in ALIGNED]),
    questions=200,
    own="Alignment",
    seeds=(6,),
)


def _pair(size: int, without: str, full: str = "mars") -> tuple[str, str]:
    """MARS with the SFT loss and without it, at one block size."""
    return mars_name(full, size), mars_name(without, size)


CLAIMS = (
    more_accurate(
        PLAN, *_pair(_SMALLEST, _RELEASED), "The SFT loss helps (B = 4)", "helps",
        beside=(
            *[(f"at B = {size}", more_accurate(PLAN, *_pair(size, _RELEASED))) for size in (_MIDDLE, _LARGEST)],
            ("without the 1/t weights, at B = 4", more_accurate(PLAN, *_pair(_SMALLEST, _CLEAN))),
        ),
    ),
    as_accurate(
        PLAN, mars_name("mars", _LARGEST), "ar_sft", f"With the SFT loss, MARS matches AR SFT at B = {_LARGEST}",
        "level", untestable=NOTHING_TO_TEACH,
        beside=((f"at B = {_MIDDLE}", more_accurate(PLAN, mars_name("mars", _MIDDLE), "ar_sft")),),
    ),
)  # fmt: skip


TABLE3 = TablePage(
    asks="what does the SFT loss do, by block size?",
    section=SECTION,
    plan=PLAN,
    claims=CLAIMS,
    figure="block_sizes",
    caption="Average accuracy by block size, with and without the SFT loss, with 95 % intervals",
    drawing=accuracy_figure(
        {  # MARS first, as in the other figures
            label: [mars_name(stage, size) for size in BLOCK_SIZES] for stage, label in reversed(MARS_STAGES.items())
        },
        BLOCK_SIZES,
        "block size B",
    ),
    deviations=(ABLATIONS_DEVIATION,),
)


_AT_LARGEST, _AT_SMALLEST = (_pair(size, *ALIGNED) for size in (_LARGEST, _SMALLEST))
_HELPS_MORE = gains_more(
    PLAN_ALIGNED, _AT_LARGEST, _AT_SMALLEST,
    f"In the paper's alignment, the SFT loss helps more at B = {_LARGEST} than at B = {_SMALLEST}",
    "helps-more", section=SECTION,
    published=gains_more(PLAN, _pair(_LARGEST, _RELEASED), _pair(_SMALLEST, _RELEASED)).published,
    beside=(
        (f"gain at B = {_SMALLEST}", more_accurate(PLAN_ALIGNED, *_AT_SMALLEST)),
        (f"gain at B = {_LARGEST}", more_accurate(PLAN_ALIGNED, *_AT_LARGEST)),
    ),
)  # fmt: skip
IN_PAPERS_ALIGNMENT = TablePage(
    asks="in the paper's own alignment, does the SFT loss help more at larger blocks?",
    order=3,
    on="table3",
    plan=PLAN_ALIGNED,
    claims=(_HELPS_MORE,),
)


# ---- trained four times as long: are 800 steps too few for larger blocks? ----

_ENDING = "_4x_data"
_LONG = [("mars", size) for size in BLOCK_SIZES] + [("mars_no_sft", size) for size in (_SMALLEST, _LARGEST)]
_LINES_LONG = AR_SFT, *[mars(stage, size, tau) for tau in (None, 0.95) for stage, size in _LONG]
PLAN_LONG = TablePlan(
    "blocks",
    "Block sizes, trained four times as long",
    tuple(line.of_another_stage(_ENDING, "4 times as long") for line in _LINES_LONG),
    questions=200,
    own="Blocks",
    seeds=(6,),
)


def _long(size: int, tau: float | None = None, stage: str = "mars") -> str:
    return mars_name(stage, size, tau) + _ENDING


def _larger(size: int) -> Iterator[Claim]:
    """What a larger block does, at one token and with a threshold."""
    sure = _long(size, 0.95), _long(_SMALLEST, 0.95)
    yield more_accurate(PLAN_LONG, _long(size), _long(_SMALLEST), "", f"one-{size}")
    yield more_accurate(PLAN_LONG, *sure, "", f"sure-{size}")
    yield emits_more(PLAN_LONG, *sure, "", f"tokens-{size}")


def _helps(size: int) -> Iterator[Claim]:
    for tau, ending in ((None, ""), (0.95, "-95")):
        without = _long(size, tau, stage="mars_no_sft")
        yield more_accurate(PLAN_LONG, _long(size, tau), without, "", f"helps-{size}{ending}")


BLOCKS_LONG = TablePage(
    asks="with more training, do larger blocks and the SFT loss pay?",
    order=3,
    on="table3",
    plan=PLAN_LONG,
    trained_before=True,
    prose_claims=(*_larger(8), *_larger(16), *_helps(4), *_helps(16)),
)
