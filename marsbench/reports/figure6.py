"""Figure 6: three metrics of confidence, each at several thresholds (paper appendix D).

The paper draws it without numbers; here the metrics are compared on the two benchmarks of its Figure 3.
"""

from __future__ import annotations

from pathlib import Path

from marsbench.reports.cells import Cells, columns
from marsbench.reports.claims import CurveClaim
from marsbench.reports.curve_figures import panels_figure, speed_panel
from marsbench.reports.measured import HOW_TO_READ_ACCURACY, accuracy_table, speed_table
from marsbench.reports.page import Page
from marsbench.sweeps.plans import METRIC_THRESHOLDS, TABLES, TablePlan, mars_name

ONE_TOKEN = mars_name("mars", 4)
HOW_TO_READ_THE_METRICS = (
    "Lines with a metric accept tokens from the left while the top token's probability, or its lead over the second "
    "(the margin), reaches the threshold, or while the entropy, in nats, does not exceed it; the others accept exactly "
    "one token per forward pass."
)


def _curve(metric: str) -> tuple[str, ...]:
    """The lines of a metric, from one token per forward pass on."""
    return (ONE_TOKEN, *[f"{metric}_{threshold:g}" for threshold in METRIC_THRESHOLDS[metric]])


def _no_worse_than(metric: str) -> CurveClaim:
    text = f"Probability, the paper's default, is no worse than {metric}"
    return CurveClaim("a", text, _curve("probability"), _curve(metric), ("probability", metric), margin=2.0)


def _draw(cells: Cells, plan: TablePlan, path_stem: Path) -> list[Path]:
    """A panel per benchmark, a curve per metric."""
    lines = {metric: _curve(metric) for metric in METRIC_THRESHOLDS}
    panels = [speed_panel(cells, title, lines, [benchmark]) for benchmark, title in columns(plan).items()]
    return panels_figure(panels, path_stem, across=len(panels))


PAGE = Page(
    plan=TABLES["figure6"],
    opening=(
        "MARS (B = 4) that accepts tokens by each of the MARS paper's three metrics of confidence (arXiv 2604.07023, "
        "Appendix D), decoded greedily and scored by one program."
    ),
    claims=tuple(_no_worse_than(metric) for metric in METRIC_THRESHOLDS if metric != "probability"),
    figure="metrics",
    figure_title="Figure 6",
    caption=(
        "Accuracy against tokens per forward pass by metric of confidence, a point per threshold, with 95 % intervals; "
        "across, AR SFT with its interval as a band"
    ),
    drawing=_draw,
    reading=f"{HOW_TO_READ_ACCURACY} {HOW_TO_READ_THE_METRICS}",
    tables=(accuracy_table, speed_table),
    published=lambda _: "",
)
