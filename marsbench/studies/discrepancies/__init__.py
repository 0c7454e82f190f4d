"""The page of discrepancies: where the paper and its released code differ, and what each difference changes here."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from marsbench.findings.between_lines import emits_more, more_accurate
from marsbench.findings.cells import latest_cells
from marsbench.findings.claims import TIMES, Claim, Finding
from marsbench.findings.in_words import p_value
from marsbench.findings.seeds import BySeed
from marsbench.findings.sweep import SweepCells, on_sweep, printed_ratio, speed_up
from marsbench.line import Line
from marsbench.presets import Preset
from marsbench.racing.grid import Grid
from marsbench.rendering.claims_in_words import counted
from marsbench.rendering.markdown import table
from marsbench.rendering.measured import reasons
from marsbench.rows.kinds import Row
from marsbench.running.plans import TablePlan
from marsbench.statistics.decisions import Bound
from marsbench.statistics.intervals import Estimate
from marsbench.studies.lines import ABLATIONS, AR_SFT, MARS_VARIANTS, mars, mars_name
from marsbench.studies.study import Study

PLAN = TablePlan(
    "discrepancies",
    "Do the differences between paper and released code matter?",
    (
        Line("base", "Base", "base", "ar", {}),
        AR_SFT,
        *[mars(stage, 4, tau) for stage in (*MARS_VARIANTS, *ABLATIONS) for tau in (None, 0.95)],
        mars("mars", 4, 1.0),
    ),
    own="Discrepancies",
)
WINDOW, BLOCKS, NO_CACHE = "mars", "mars-block-cache", "mars-no-cache"
ALL_MASKS = f"{NO_CACHE}, all masks"


def _races(scale: Preset) -> Iterator[Grid]:
    """Two races against AR, of five laps over 48 prompts; smaller at a scale with few questions.

    MARS as load grows, with its sliding window and with block-level caches whose blocks are windows too; and without a
    cache, with B - 1 masks in every forward and with as many as tokens may be generated.
    """

    def entry(method: str, name: str = "", **options: Any) -> Line:
        return Line.named(name or method, "mars", method, **{"block_size": 4, **options, "threshold": 0.95})

    caches = [entry(BLOCKS, f"{BLOCKS}, B_cache = {size}", cache_block=size) for size in (4, 16, 64)]
    masks = [entry(NO_CACHE), entry(NO_CACHE, ALL_MASKS, appended_masks=scale.max_new_tokens)]
    prompts, repeats, most = (6, 2, 15) if scale.in_seconds else (48, 5, 48)
    for entries, sizes in (([entry(WINDOW), *caches], (1, 4, 16, 48)), (masks, (1, 16))):
        lines, batches = (Line.named("ar", "mars", "ar"), *entries), tuple(size for size in sizes if size <= most)
        yield Grid(lines, batches, prompts, repeats, positions=0, page="discrepancies")


DIFFERS, SAME, NOT_RUN = "differs", "no difference seen", "not run"


def _trained(stage: str, other: str = "mars") -> tuple[tuple[str, str], ...]:
    """Two ways of training, compared at one token per forward pass and with a threshold."""
    return tuple((mars_name(stage, 4, tau), mars_name(other, 4, tau)) for tau in (None, 0.95))


# The pairs of lines that show the effect of a discrepancy.
PAIRS = {
    "d1": _trained("mars_paper_alignment"),
    "d2": (
        *_trained("mars_no_sft", "mars_no_sft_released"),
        *[(mars_name("mars", 4), mars_name(name, 4)) for name in ABLATIONS],
    ),
    "d3": _trained("mars_response_blocks"),
}


def slots(rows: Sequence[Row], scale: str, seeds: BySeed) -> dict[str, str]:
    shown = SweepCells.of(next(iter(seeds.values()), ()))  # numbers without a verdict use the first seed alone
    load, knee = _load(shown, seeds)
    return {
        "tally": tally(seeds),
        **{number: _effects_table(seeds, pairs) for number, pairs in PAIRS.items()},
        "d5": _cache_blocks(shown) or NOT_RUN,
        "d10": _masks(shown, seeds) or NOT_RUN,
        "d14": load or NOT_RUN,
        "knee": knee,
        "reasons": reasons(latest_cells(rows), PLAN),
    }


def effect(seeds: BySeed, first: str, second: str) -> tuple[Finding, Finding] | None:
    """Line `first` minus line `second`: accuracy and tokens per forward pass; None if no benchmark has both."""
    accuracy, tokens = (kind(PLAN, first, second).over(seeds.values()) for kind in (more_accurate, emits_more))
    return None if accuracy.estimate is None or tokens.estimate is None else (accuracy, tokens)


def tally(seeds: BySeed) -> str:
    """How many comparisons of lines differ, and how many have one training seed."""
    effects = [measured for pairs in PAIRS.values() for pair in pairs if (measured := effect(seeds, *pair))]
    differ = sum(_verdict(*pair) != SAME for pair in effects)
    alone = sum(accuracy.seeds == 1 for accuracy, _ in effects)
    return f"{differ} of {len(effects)} comparisons of lines differ ({alone} with one training seed)"


def _verdict(*findings: Finding) -> str:
    both = zip(("accuracy", "tokens/forward"), findings, strict=True)
    names = [name for name, finding in both if finding.side != "open"]
    return f"{' and '.join(names)} {DIFFERS if len(names) == 1 else 'differ'}" if names else SAME


def _effects_table(seeds: BySeed, pairs: Sequence[tuple[str, str]]) -> str:
    lines = []
    for first, second in pairs:
        numbers = ["", "", "", "", NOT_RUN]
        if both := effect(seeds, first, second):
            accuracy, tokens = both
            numbers = [accuracy.found, p_value(accuracy.p), tokens.number, counted(accuracy), _verdict(*both)]
        lines.append([f"{PLAN.line(first).label} minus {PLAN.line(second).label}", *numbers])
    return table(["", "accuracy", "p", "tokens/forward", "n", "verdict"], lines, text=(0, 4, 5))


def _cache_blocks(sweep: SweepCells) -> str:
    raced = SweepCells([row for row in sweep.rows if row.method in (WINDOW, BLOCKS)])
    lines = []
    for name in raced.names:
        rows = raced.by_batch(name)
        lines += [
            [f"{name}: speed over `ar`", *[printed_ratio(speed_up(row), NOT_RUN) for row in rows]],
            ["positions/forward", *[f"{row.positions_per_forward:.0f}" if row else "" for row in rows]],
            ["tokens/forward", *[f"{row.tokens_per_forward:.2f}" if row else "" for row in rows]],
        ]
    return table(["", *raced.heads], lines)


def _times(seeds: BySeed, measure: Callable[[SweepCells], Estimate | None]) -> Finding:
    """A ratio of speeds over all training seeds, compared with 1."""
    return Claim(measure=on_sweep(measure), bound=Bound(low=1.0), unit=TIMES).over(seeds.values())


def _masks(sweep: SweepCells, seeds: BySeed) -> str:
    lines = []
    for size in sweep.batch_sizes:
        rows = [row for name in (NO_CACHE, ALL_MASKS) if (row := sweep.done.get((name, size)))]
        if len(rows) == 2:
            ratio = _times(seeds, partial(SweepCells.ratio, batch_size=size, name=ALL_MASKS, baseline=NO_CACHE))
            positions = [f"{row.positions_per_forward:.0f}" for row in rows]
            lines.append([str(size), *positions, ratio.number, SAME if ratio.side == "open" else DIFFERS])
    head = ["batch", "positions/forward, B - 1 masks", "all masks", "speed of all masks over B - 1", "verdict"]
    return table(head, lines, text=(0, 4))


def _load(sweep: SweepCells, seeds: BySeed) -> tuple[str, str]:
    lines, slow = [], list[int]()
    for row in filter(None, sweep.by_batch(WINDOW)):
        ratio = _times(seeds, partial(SweepCells.speed_up, name=WINDOW, batch_size=row.batch_size))
        lines.append([str(row.batch_size), f"{row.positions_per_forward:.0f}", ratio.number])
        slow += [row.batch_size] if ratio.side != "holds" else []
    most = max(sweep.batch_sizes, default=0)
    said = f"MARS (tau = .95) is faster than `ar` at every batch size measured, up to {most}."
    if slow:
        said = f"From batch size {slow[0]} on, MARS (tau = .95) is not shown to be faster than `ar`."
    return table(["batch", "positions/forward", "speed over `ar`"], lines), said if lines else ""


STUDY = Study(
    asks="does it matter where paper and code differ?",
    order=1,
    in_paper=True,
    plan=PLAN,
    races=_races,
    layout="discrepancies/page.md",
    slots=slots,
)
