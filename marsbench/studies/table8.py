"""Table 8 and Figure 3: accuracy against tokens per forward pass by threshold, with and without the SFT loss.

The line of AR SFT is the one that the paper's figure draws across.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from marsbench.findings.between_lines import emits_more, lies_above, more_accurate
from marsbench.findings.cells import PUBLISHED_SCALES, Cells, columns, paper_label, published_values
from marsbench.findings.claims import Claim, Section
from marsbench.line import Line
from marsbench.rendering.figures import panels_figure, speed_panel
from marsbench.rendering.markdown import paragraphs, table
from marsbench.rendering.measured import accuracy_cell, question_counts, speed_cell
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
HOW_TO_READ_THE_GRIDS = (
    "For each block size, accuracy in % and tokens per forward pass (tok/fwd), ± half of the 95 % interval. Lines with "
    "tau accept tokens from the left while their confidence reaches tau, the others exactly one token per forward pass."
)


def _curve(stage: str, size: int) -> tuple[str, ...]:
    return tuple(mars_name(stage, size, tau) for tau in TAUS)


def _claims() -> Iterator[Claim]:
    for size in BLOCK_SIZES:
        for ablation in ABLATIONS:
            curves = {f"{MARS_STAGES[stage]} (B = {size})": _curve(stage, size) for stage in ("mars", ablation)}
            text = f"With the SFT loss, accuracy is higher at equal speed (B = {size})"
            yield lies_above(PLAN, curves, "a", text, f"higher-b{size}", item="figure3", section=FIGURE3)
    for size in BLOCK_SIZES:
        sure, unsure = mars_name("mars", size, SURE), mars_name("mars", size, UNSURE)
        said = {"name": f"low-tau-faster-b{size}", "in_abstract": size == BLOCK_SIZES[0], "check": True}
        text = f"A lower tau emits more tokens per forward pass (B = {size})"
        yield emits_more(PLAN, unsure, sure, "b", text, **said)
        text = f"A lower tau costs accuracy (B = {size})"
        yield more_accurate(PLAN, sure, unsure, "b", text, f"low-tau-costs-b{size}")


Numbers = Callable[[Line, str], tuple[str, str]]  # of a line on a benchmark: accuracy and tokens per forward pass


def _grid(numbers: Numbers, benchmark: str, plan: TablePlan) -> list[list[str]]:
    """Lines by stage and threshold, with the two numbers of each block size side by side."""
    known = {line.name: line for line in plan.lines}
    shown = [[AR_SFT.label, "", *numbers(AR_SFT, benchmark), *[""] * (2 * len(BLOCK_SIZES) - 2)]]
    for stage, label in (MARS_STAGES | HEADED_MARS).items():
        for tau in TAUS:
            of_sizes = [known.get(mars_name(stage, size, tau)) for size in BLOCK_SIZES]
            if any(of_sizes):
                found = [numbers(line, benchmark) if line else ("", "") for line in of_sizes]
                shown.append([label, "" if tau is None else f"{tau:g}", *sum(found, ())])
    return shown


def _head(*first: str) -> list[str]:
    return [*first, *[head for size in BLOCK_SIZES for head in (f"B = {size}", "tok/fwd")]]


def _measured_grids(cells: Cells, plan: TablePlan) -> str:
    def numbers(line: Line, benchmark: str) -> tuple[str, str]:
        row = cells.get((line.name, benchmark))
        return accuracy_cell(row), speed_cell(row)

    counts = question_counts(cells, plan)
    parts = []
    for benchmark, title in columns(plan).items():
        asked = f" ({counts[benchmark]} questions)" if counts[benchmark] else ""
        parts += [f"{title}{asked}:", table(_head("", "tau"), _grid(numbers, benchmark, plan))]
    return paragraphs(*parts)


def _published_grids(plan: TablePlan) -> str:
    lead = (
        f"**Published** by the authors (arXiv 2604.07023, {plan.name}), accuracy in % and tokens per forward pass; "
        "nothing in these tables was measured here."
    )
    parts = ["## The paper's numbers", lead]
    for benchmark, title in columns(plan).items():
        found = {model: _published_grid(scale, benchmark, plan) for scale, model in PUBLISHED_SCALES.items()}
        lines = [[model, paper_label(label), *rest] for model, grid in found.items() for label, *rest in grid]
        parts += [f"{title}:", table(_head("model", "", "tau"), lines, text=(0, 1))]
    return paragraphs(*parts)


def _published_grid(scale: str, benchmark: str, plan: TablePlan) -> list[list[str]]:
    """The paper's lines for a model on a benchmark; those that it does not have are left out."""

    def numbers(line: Line, benchmark: str) -> tuple[str, str]:
        accuracy, speed = (
            published_values(plan, line, scale, metric).get(benchmark) for metric in ("accuracy", "tokens_per_forward")
        )
        return "" if accuracy is None else f"{accuracy:.1f}", "" if speed is None else f"{speed:.2f}"

    return [line for line in _grid(numbers, benchmark, plan) if any(line[2:])]


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
        "greedily at several thresholds and scored by one program."
    ),
    claims=tuple(_claims()),
    answers=("higher-b4", "low-tau-faster-b4", "low-tau-costs-b4"),
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
    reading=HOW_TO_READ_THE_GRIDS,
    tables=(_measured_grids,),
    published=_published_grids,
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
