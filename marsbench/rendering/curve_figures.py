"""Figures of accuracy over something else: curves through measured points, with 95 % intervals in both directions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

from marsbench.findings.cells import Cells, columns, done_cells, mean_accuracy, mean_speed
from marsbench.rendering.figures import drawn_alike, error_bars, new_figure, save
from marsbench.rows.kinds import EvaluationRow
from marsbench.running.plans import TablePlan
from marsbench.statistics.intervals import Estimate, Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SPEED_AXIS = "tokens per forward pass"
# Of Okabe and Ito's palette, safe for colour-blind readers; markers and lines tell curves apart without colour too.
_STYLES = (("#0072B2", "o", "-"), ("#D55E00", "s", "--"), ("#009E73", "^", "-."), ("#000000", "D", ":"))
_REFERENCE_COLOUR = "0.35"
_PANEL_WIDTH, _PANEL_HEIGHT, _LEGEND_LINE = 3.6, 3.0, 0.22  # inches


@dataclass(frozen=True)
class Curve:
    """A line through points (x, accuracy as a fraction)."""

    label: str
    points: tuple[tuple[Estimate, Estimate], ...]


@dataclass(frozen=True)
class Panel:
    """Curves on one pair of axes; `reference` is the accuracy of AR SFT, drawn across."""

    title: str
    curves: Sequence[Curve]
    reference: Estimate | None = None


def panels_figure(panels: Sequence[Panel], path_stem: Path, *, across: int, x_label: str = SPEED_AXIS) -> list[Path]:
    """Draw panels, so many across, with one legend for all; curves with the same place in a panel look the same."""
    down, entries = ceil(len(panels) / across), 2 * across - 1  # rows of panels, and what a line of the legend holds
    legend = _LEGEND_LINE * ceil((1 + max(len(panel.curves) for panel in panels)) / entries)
    with drawn_alike():
        figure = new_figure(_PANEL_WIDTH * across, _PANEL_HEIGHT * down + legend)
        grid = figure.subplots(down, across, squeeze=False, sharex="row", sharey="row")
        for axes, panel in zip(grid.flat, panels, strict=True):
            _draw_panel(axes, panel)
        for axes in grid[-1]:
            axes.set_xlabel(x_label)
            if x_label == SPEED_AXIS:
                axes.set_xlim(left=0.95)  # AR decoding emits 1
        for axes in grid[:, 0]:
            axes.set_ylabel("accuracy in %")
        known = grid[0, 0].get_legend_handles_labels()
        figure.legend(*known, loc="outside lower center", ncols=entries, frameon=False)
        return save(figure, path_stem)


def _draw_panel(axes: Axes, panel: Panel) -> None:
    axes.set_title(panel.title, fontsize=9)
    if panel.reference is not None:
        limits = panel.reference.interval
        axes.axhspan(100 * limits.low, 100 * limits.high, color=_REFERENCE_COLOUR, alpha=0.12, linewidth=0)
        axes.axhline(100 * panel.reference.value, color=_REFERENCE_COLOUR, linestyle=":", label="AR SFT")
    for place, curve in enumerate(panel.curves):
        colour, marker, line = _STYLES[place % len(_STYLES)]
        x, height = [point[0] for point in curve.points], [point[1] for point in curve.points]
        axes.errorbar(
            [estimate.value for estimate in x],
            [100 * estimate.value for estimate in height],
            xerr=error_bars(x, 1.0),
            yerr=error_bars(height, 100.0),
            label=curve.label, color=colour, marker=marker, linestyle=line, markersize=4.5, linewidth=1.2,
            elinewidth=0.8,
        )  # fmt: skip
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)


def speed_panel(cells: Cells, title: str, lines: Mapping[str, Sequence[str]], benchmarks: Sequence[str]) -> Panel:
    """Accuracy against tokens per forward pass, benchmarks weighing the same: per label, a curve through its arms.

    Arms that were not measured on them all are left out.
    """
    curves = []
    for label, arms in lines.items():
        found = [rows for arm in arms if (rows := _rows(cells, arm, benchmarks))]
        curves.append(Curve(label, tuple((mean_speed(rows), mean_accuracy(rows)) for rows in found)))
    return Panel(title, curves, accuracy_on(cells, "ar_sft", benchmarks))


def average_figure(cells: Cells, plan: TablePlan, lines: Mapping[str, Sequence[str]], path_stem: Path) -> list[Path]:
    """One such panel, over the benchmarks that the whole plan was measured on."""
    benchmarks = shared_benchmarks(cells, plan)
    return panels_figure([speed_panel(cells, average_title(benchmarks), lines, benchmarks)], path_stem, across=1)


def exactly(value: float) -> Estimate:
    """A number that nobody has to measure."""
    return Estimate(value, Interval(value, value), 0)


def accuracy_on(cells: Cells, arm: str, benchmarks: Sequence[str]) -> Estimate | None:
    """The accuracy of an arm, benchmarks weighing the same; None unless it was measured on them all."""
    return mean_accuracy(rows) if (rows := _rows(cells, arm, benchmarks)) else None


def speed_on(cells: Cells, arm: str, benchmarks: Sequence[str]) -> Estimate | None:
    """The tokens per forward pass of an arm, alike."""
    return mean_speed(rows) if (rows := _rows(cells, arm, benchmarks)) else None


def _rows(cells: Cells, arm: str, benchmarks: Sequence[str]) -> list[EvaluationRow]:
    """The rows of an arm on some benchmarks; none unless it was measured on them all."""
    done = done_cells(cells, arm)
    return [done[name] for name in benchmarks] if all(name in done for name in benchmarks) else []


def shared_benchmarks(cells: Cells, plan: TablePlan) -> list[str]:
    """The benchmarks that every line was measured on, lines without any left aside."""
    measured = [done for arm in plan.arms if (done := done_cells(cells, arm.name))]
    return [name for name in columns(plan) if measured and all(name in done for done in measured)]


def average_title(benchmarks: Sequence[str]) -> str:
    """What an average is over, in words."""
    return f"average of {len(benchmarks)} benchmark{'' if len(benchmarks) == 1 else 's'}"
