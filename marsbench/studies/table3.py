"""Table 3: what the SFT loss does, at block sizes 4, 8 and 16 and one token per forward pass.

The authors' ablation also weighs every sequence by 1/t, so that its gap mixes two changes; ours changes nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from marsbench.findings.between_lines import as_accurate, gains_more, more_accurate
from marsbench.findings.cells import Cells
from marsbench.findings.claims import OURS, Claim, Section
from marsbench.rendering.figures import Panel, average_title, exactly, line_on, panels_figure, shared_benchmarks
from marsbench.rendering.measured import HOW_TO_READ_ACCURACY
from marsbench.rendering.page import TablePage
from marsbench.rendering.sections import BOTH_ABLATIONS_DEVIATION
from marsbench.running.plans import TablePlan
from marsbench.studies.lines import ABLATIONS, AR_SFT, BLOCK_SIZES, MARS_STAGES, mars, mars_name
from marsbench.studies.study import table_study

PLAN = TablePlan(
    "3",
    "What the SFT loss does, by block size, at one token per forward pass",
    (AR_SFT, *[mars(stage, size) for size in BLOCK_SIZES for stage in MARS_STAGES]),
)


def _claims() -> Iterator[Claim]:
    smallest, *larger = BLOCK_SIZES
    for size in BLOCK_SIZES:
        for ablation in ABLATIONS:
            pair, text = (mars_name("mars", size), mars_name(ablation, size)), f"The SFT loss helps at B = {size}"
            again = (size, ablation) == (4, "mars_no_sft")  # Table 2's
            yield more_accurate(PLAN, *pair, "a", text, f"helps-b{size}", again=again)
    for size in larger:
        for ablation in ABLATIONS:
            gain, least = ((mars_name("mars", b), mars_name(ablation, b)) for b in (size, smallest))
            text = f"It helps more at B = {size} than at B = {smallest}"
            yield gains_more(PLAN, gain, least, "b", text, f"helps-more-b{size}")
    for size in BLOCK_SIZES:
        text = f"With it, MARS stays level with AR SFT at B = {size}"
        yield as_accurate(PLAN, mars_name("mars", size), "ar_sft", "c", text, f"level-b{size}", again=size == 4)
    for size in BLOCK_SIZES:
        pair = mars_name("mars_no_sft", size), mars_name("mars_no_sft_released", size)
        text = f"the released ablation's weights cost accuracy too at B = {size}"
        yield more_accurate(PLAN, *pair, "d", text, f"weights-cost-b{size}", whose=OURS)


def _draw(cells: Cells, plan: TablePlan, path_stem: Path) -> list[Path]:
    benchmarks = shared_benchmarks(cells, plan)
    curves = {}
    for stage, label in reversed(MARS_STAGES.items()):  # MARS first, as in the other figures
        found = {size: line_on(cells, mars_name(stage, size), benchmarks) for size in BLOCK_SIZES}
        curves[label] = [(exactly(size), point[1]) for size, point in found.items() if point]
    _, reference = line_on(cells, "ar_sft", benchmarks) or (None, None)
    panel = Panel(average_title(benchmarks), curves, reference)
    return panels_figure([panel], path_stem, across=1, x_label="block size B")


PAGE = TablePage(
    plan=PLAN,
    opening=(
        "MARS with and without the SFT loss, as in the MARS paper's Table 3 (arXiv 2604.07023), trained at three block "
        "sizes, decoded greedily with one token per forward pass and scored by one program."
    ),
    claims=tuple(_claims()),
    answers=("c", "helps-b4"),
    figure="block_sizes",
    caption="Average accuracy by block size, with and without the SFT loss, with 95 % intervals",
    drawing=_draw,
    reading=f"{HOW_TO_READ_ACCURACY} Every line accepts exactly one token per forward pass.",
    deviations=(BOTH_ABLATIONS_DEVIATION,),
)

STUDY = table_study(
    PAGE, asks="what does the SFT loss do, at larger and larger blocks?", section=Section("Table 3", (4, 3))
)
