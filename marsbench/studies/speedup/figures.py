"""The figures of the speed page: accuracy against speed, speed-up by batch size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from marsbench.findings.sweep import ALLOWED_LOSS, SweepCells, speed_of, speed_up
from marsbench.rendering.figures import COLOURS, MARKERS, by_batch_figure, drawn_alike, error_bars, new_figure, save
from marsbench.rows.kinds import Row, SweepRow
from marsbench.statistics.intervals import Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Beside the page, less the extension.
PARETO_SPEED = "figures/speedup_accuracy_by_speed"
BY_BATCH = "figures/speedup_by_batch_size"

_JOINED = ("mars",)  # methods whose settings a line joins
_NAMED = (None, 0.95, 0.7, 0.5)  # thresholds that are written beside their points, far enough apart


def draw(rows: Sequence[Row], reports_dir: Path) -> list[Path]:
    sweep = SweepCells.of(rows)
    with drawn_alike():
        written = save(_pareto_by_speed(sweep.eager), reports_dir / PARETO_SPEED)
    series: dict[str, dict[int, Estimate]] = {}
    for size in sweep.batch_sizes:
        for name, row in _best_of_each_method(sweep, size).items():
            if ratio := sweep.over_faster_ar(row):
                series.setdefault(name, {})[size] = ratio
    what = "tokens per second over ar, each in its faster form"
    return [*written, *by_batch_figure(series, what, reports_dir / BY_BATCH)]


def _methods(sweep: SweepCells) -> dict[str, tuple[str, str]]:
    """Method -> its colour and marker, the same in all figures."""
    names = list(dict.fromkeys(row.method for row in sweep.rows))
    markers = [MARKERS[(place + place // len(COLOURS)) % len(MARKERS)] for place in range(len(names))]
    return {name: (COLOURS[place % len(COLOURS)], markers[place]) for place, name in enumerate(names)}


def _pareto_by_speed(sweep: SweepCells) -> Figure:
    sizes = sweep.batch_sizes
    columns = min(len(sizes), 2)
    figure = new_figure(9.5, 3.4 * -(-len(sizes) // columns) + 0.6)
    panels = figure.subplots(-(-len(sizes) // columns), columns, squeeze=False, sharex=True, sharey=True).flatten()
    for axes, size in zip(panels, sizes, strict=False):
        _scatter(sweep, axes, size)
        axes.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
        axes.set(title=f"batch size {size}", xlabel="tokens per second, relative to ar", ylabel="accuracy in %")
    handles, labels = panels[0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside right upper", frameon=False)
    return figure


def _scatter(sweep: SweepCells, axes: Axes, batch_size: int) -> None:
    for method, (colour, marker) in _methods(sweep).items():
        rows = sweep.at(batch_size, lambda row, method=method: row.method == method)  # type: ignore[misc]
        points = [(found.value, row.accuracy, row) for row in rows if (found := speed_up(row))]
        if not points:
            continue
        axes.errorbar(
            [value for value, _, _ in points],
            [100 * found.value for _, found, _ in points],
            yerr=error_bars([found for _, found, _ in points], 100.0),
            fmt=marker, color=colour, linestyle="-" if method in _JOINED else "none", linewidth=1.0, elinewidth=0.5,
            markersize=5, label=f"{method} (numbers: tau)" if method in _JOINED else method,
        )  # fmt: skip
        joined = points if method in _JOINED else ()
        for value, found, row in (point for point in joined if point[2].options.get("threshold") in _NAMED):
            axes.annotate(
                str(row.options.get("threshold", "one")), (value, 100 * found.value), xytext=(0, -4),
                textcoords="offset points", fontsize=6, ha="right", va="top", rotation=60,
            )  # fmt: skip
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="0.9", linewidth=0.6)


def _best_of_each_method(sweep: SweepCells, batch_size: int) -> dict[str, SweepRow]:
    """Of each method but `ar`, the contender that is fastest at a batch size and loses little accuracy.

    What promises the tokens of its own model loses none, whichever checkpoint that is.
    """
    best: dict[str, SweepRow] = {}
    for row in sweep.at(batch_size, lambda row: row.method != "ar"):
        cost, name = sweep.cost(row), f"{row.method}, adapter" if row.is_adapted else row.method
        if row.is_lossless or (cost is not None and cost.value <= ALLOWED_LOSS):
            best[name] = max(best.get(name, row), row, key=speed_of)
    return best
