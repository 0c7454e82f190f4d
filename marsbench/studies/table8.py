"""Table 8 and Figure 3: accuracy against tokens per forward pass by threshold, with and without the SFT loss.

The line of AR SFT is the one that the paper's figure draws across.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from marsbench.findings.between_lines import emits_more, lies_above, more_accurate
from marsbench.findings.cells import Cells, columns
from marsbench.findings.claims import Claim, Section
from marsbench.rendering.figures import panels_figure, speed_panel
from marsbench.rendering.page import TablePage
from marsbench.rendering.sections import BOTH_ABLATIONS_DEVIATION
from marsbench.running.plans import TablePlan
from marsbench.studies.lines import ABLATIONS, AR_SFT, BLOCK_SIZES, HEADED_MARS, MARS_STAGES, TAUS, mars, mars_name
from marsbench.studies.study import Item, table_study

SIZE_WITH_HEAD = BLOCK_SIZES[0]  # of MARS with a draft head, which the paper has not
PLAN = TablePlan(
    "8",
    "Accuracy against tokens per forward pass, by threshold and block size, with and without the SFT loss",
    (
        AR_SFT,
        *[mars(stage, size, tau) for stage in MARS_STAGES for size in BLOCK_SIZES for tau in TAUS],
        *[mars("mars_network", SIZE_WITH_HEAD, tau) for tau in TAUS],
    ),
    benchmarks=("gsm8k", "humaneval"),
)
FIGURE3 = Section("Figure 3", (4, 3))
SURE, UNSURE = TAUS[1], TAUS[-1]


def _curve(stage: str, size: int) -> tuple[str, ...]:
    return tuple(mars_name(stage, size, tau) for tau in TAUS)


def _claims() -> Iterator[Claim]:
    smallest, *larger = BLOCK_SIZES

    def higher(size: int, *said: str, **more: Any) -> Claim:
        curves = {f"{MARS_STAGES[stage]} (B = {size})": _curve(stage, size) for stage in ("mars", ABLATIONS[0])}
        return lies_above(PLAN, curves, *said, item="figure3", section=FIGURE3, **more)

    others = tuple((f"B = {size}", higher(size)) for size in larger)
    yield higher(
        smallest, f"With the SFT loss, accuracy is higher at equal speed (B = {smallest})", "higher", beside=others
    )
    sure, unsure = mars_name("mars", smallest, SURE), mars_name("mars", smallest, UNSURE)
    yield more_accurate(
        PLAN, sure, unsure, f"tau = .5 costs accuracy against tau = .95 (B = {smallest})", "low-tau-costs",
        beside=(("and gives tokens/forward", emits_more(PLAN, unsure, sure)),),
    )  # fmt: skip


def _draw(cells: Cells, plan: TablePlan, path_stem: Path) -> list[Path]:
    panels, known = [], {line.name for line in plan.lines}
    for benchmark, title in columns(plan).items():
        for size in BLOCK_SIZES:
            # Colours go by place, so what one panel alone has comes last.
            shown = (*reversed(MARS_STAGES.items()), *HEADED_MARS.items())
            curves = {label: _curve(stage, size) for stage, label in shown if _curve(stage, size)[0] in known}
            panels.append(speed_panel(cells, f"{title}, B = {size}", curves, [benchmark]))
    return panels_figure(panels, path_stem, across=len(BLOCK_SIZES))


PAGE = TablePage(
    plan=PLAN,
    opening=(
        "MARS with and without the SFT loss, as in the MARS paper's Table 8 and Figure 3 (arXiv 2604.07023), decoded "
        "greedily at several thresholds and scored by one program. **The average is of GSM8K and HumanEval alone**, as "
        "in that table. No tau between .95 and 1 was measured here."
    ),
    claims=tuple(_claims()),
    lines=(
        AR_SFT.name,
        *[mars_name("mars", size, threshold) for size in BLOCK_SIZES for threshold in (None, SURE, UNSURE)],
        mars_name("mars_no_sft", 4),
        mars_name("mars_no_sft_released", 4),
    ),
    figure="pareto",
    figure_title="Figure 3",
    caption=(
        "Accuracy against tokens per forward pass, from one token at the left to the lowest tau at the right, with "
        "95 % intervals; across, AR SFT with its interval as a band"
    ),
    drawing=_draw,
    deviations=(BOTH_ABLATIONS_DEVIATION,),
)

STUDY = table_study(
    PAGE,
    asks="accuracy against tokens per forward pass, threshold by threshold",
    section=Section("Table 8", appendix="B"),
    holds=(
        Item(
            key="figure3",
            name="Figure 3",
            asks="is MARS with the SFT loss more accurate at equal speed?",
            anchor="#figure-3",
            section=FIGURE3,
        ),
    ),
)
