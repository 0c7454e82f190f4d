"""Figure 6: three metrics of confidence, each at several thresholds (paper appendix D).

The paper draws it without numbers; here the metrics are compared on the two benchmarks of its Figure 3.
"""

from __future__ import annotations

from pathlib import Path

from marsbench.findings.between_lines import lies_above
from marsbench.findings.cells import Cells, columns
from marsbench.findings.claims import Section
from marsbench.line import Line
from marsbench.rendering.figures import panels_figure, speed_panel
from marsbench.rendering.page import TablePage
from marsbench.running.plans import TablePlan
from marsbench.studies.lines import AR_SFT, THRESHOLDS, mars, mars_name, short
from marsbench.studies.study import table_study

METRIC_THRESHOLDS: dict[str, tuple[float, ...]] = {  # surest first; entropy in nats
    "probability": THRESHOLDS,
    "entropy": (0.05, 0.2, 0.4, 0.7, 1.0, 1.5),
    "margin": (0.9, 0.8, 0.7, 0.5, 0.3),
}
ONE_TOKEN = mars_name("mars", 4)


def _by_metric(metric: str, threshold: float) -> Line:
    """MARS (B = 4) that accepts tokens by one of the paper's three metrics; probability is its default."""
    options = {"block_size": 4, "threshold": threshold} | ({} if metric == "probability" else {"metric": metric})
    sign = "<=" if metric == "entropy" else ">="
    return Line(f"{metric}_{threshold:g}", f"MARS, {metric} {sign} {short(threshold)}", "mars", "mars", options)


PLAN = TablePlan(
    "6",
    "Three ways to tell when a token is sure enough, each at several thresholds",
    (
        AR_SFT,
        mars("mars", 4),
        *[_by_metric(metric, threshold) for metric, found in METRIC_THRESHOLDS.items() for threshold in found],
    ),
    benchmarks=("gsm8k", "humaneval"),
    figure=True,
)


def _curve(metric: str) -> tuple[str, ...]:
    return (ONE_TOKEN, *[f"{metric}_{threshold:g}" for threshold in METRIC_THRESHOLDS[metric]])


def _draw(cells: Cells, plan: TablePlan, path_stem: Path) -> list[Path]:
    lines = {metric: _curve(metric) for metric in METRIC_THRESHOLDS}
    panels = [speed_panel(cells, title, lines, [benchmark]) for benchmark, title in columns(plan).items()]
    return panels_figure(panels, path_stem, across=len(panels))


PAGE = TablePage(
    plan=PLAN,
    opening=(
        "MARS (B = 4) that accepts tokens by each of the MARS paper's three metrics of confidence (arXiv 2604.07023, "
        "Appendix D). A token is accepted while its probability, or its lead over the second (the margin), reaches the "
        "threshold, or while the entropy, in nats, does not exceed it. The average is of GSM8K and HumanEval alone."
    ),
    claims=tuple(
        lies_above(
            PLAN, {name: _curve(name) for name in ("probability", metric)},
            f"Probability, the paper's default, is no worse than {metric}", f"no-worse-than-{metric}", margin=1.0,
        )
        for metric in ("entropy", "margin")
    ),
    lines=(
        AR_SFT.name,
        ONE_TOKEN,
        *[f"{metric}_{found[place]:g}" for metric, found in METRIC_THRESHOLDS.items() for place in (0, 2, -1)],
    ),
    figure="metrics",
    figure_title="Figure 6",
    caption=(
        "Accuracy against tokens per forward pass by metric of confidence, a point per threshold, with 95 % intervals; "
        "across, AR SFT with its interval as a band"
    ),
    drawing=_draw,
)  # fmt: skip

STUDY = table_study(
    PAGE, asks="which metric of confidence is best?", section=Section("Figure 6", appendix="D"), on="table8"
)
