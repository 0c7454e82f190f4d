"""Table 3: what the SFT loss does, at block sizes 4, 8 and 16 and one token per forward pass.

The authors' ablation also weighs every sequence by 1/t, so that its gap mixes two changes; ours changes nothing else.
"""

from collections.abc import Iterator
from pathlib import Path

from marsbench.findings.between_lines import as_accurate, gains_more, more_accurate
from marsbench.findings.cells import Cells
from marsbench.findings.claims import Claim, Section
from marsbench.rendering.figures import Panel, average_title, exactly, line_on, panels_figure, shared_benchmarks
from marsbench.rendering.sections import BOTH_ABLATIONS_DEVIATION
from marsbench.running.plans import TablePlan
from marsbench.studies.lines import ABLATIONS, AR_SFT, BLOCK_SIZES, MARS_STAGES, mars, mars_name
from marsbench.studies.study import TablePage
from marsbench.studies.table2 import NOTHING_TO_TEACH

PLAN = TablePlan(
    "3",
    "What the SFT loss does, by block size, at one token per forward pass",
    (AR_SFT, *[mars(stage, size) for size in BLOCK_SIZES for stage in MARS_STAGES]),
)


NO_AR_TERM = (
    "As released, the mask loss holds no AR term at any block size (D1), so the paper's reason for a growing gap "
    "cannot act; that needs `ar_weight = 0` in the paper's alignment, which no line here trains."
)


def _claims() -> Iterator[Claim]:
    released, clean = ABLATIONS
    smallest, middle, largest = BLOCK_SIZES

    def helps(size: int, ablation: str) -> Claim:
        return more_accurate(PLAN, mars_name("mars", size), mars_name(ablation, size))

    others = tuple((f"at B = {size}", helps(size, released)) for size in (middle, largest))
    yield more_accurate(
        PLAN, mars_name("mars", smallest), mars_name(released, smallest), "The SFT loss helps (B = 4)", "helps",
        beside=(*others, ("without the 1/t weights, at B = 4", helps(smallest, clean))),
    )  # fmt: skip
    gain, least = ((mars_name("mars", size), mars_name(released, size)) for size in (largest, smallest))
    text = f"It helps more at B = {largest} than at B = {smallest}"
    yield gains_more(PLAN, gain, least, text, "helps-more", untestable=NO_AR_TERM)
    yield as_accurate(
        PLAN, mars_name("mars", largest), "ar_sft", f"With it, MARS stays level with AR SFT at B = {largest}", "level",
        untestable=NOTHING_TO_TEACH,
        beside=((f"at B = {middle}", more_accurate(PLAN, mars_name("mars", middle), "ar_sft")),),
    )  # fmt: skip


def _draw(cells: Cells, plan: TablePlan, path_stem: Path) -> list[Path]:
    benchmarks = shared_benchmarks(cells, plan)
    curves = {}
    for stage, label in reversed(MARS_STAGES.items()):  # MARS first, as in the other figures
        found = {size: line_on(cells, mars_name(stage, size), benchmarks) for size in BLOCK_SIZES}
        curves[label] = [(exactly(size), point[1]) for size, point in found.items() if point]
    _, reference = line_on(cells, "ar_sft", benchmarks) or (None, None)
    panel = Panel(average_title(benchmarks), curves, reference)
    return panels_figure([panel], path_stem, across=1, x_label="block size B")


STUDY = TablePage(
    asks="what does the SFT loss do, at larger and larger blocks?",
    section=Section("Table 3", (4, 3)),
    plan=PLAN,
    opening=(
        "MARS with and without the SFT loss, as in the MARS paper's Table 3 (arXiv 2604.07023), trained at three block "
        "sizes, decoded greedily with one token per forward pass and scored by one program. The gain is far larger "
        "than the paper's, probably because the released mask loss holds no AR term (D1 of the page of discrepancies): "
        "without the SFT loss, nothing trains AR decoding."
    ),
    claims=tuple(_claims()),
    figure="block_sizes",
    caption="Average accuracy by block size, with and without the SFT loss, with 95 % intervals",
    drawing=_draw,
    deviations=(BOTH_ABLATIONS_DEVIATION,),
)
