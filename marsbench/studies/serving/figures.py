"""The figures of the page of serving: latency, goodput and accuracy by load, and a step in load over time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from marsbench.rendering.curve_figures import exactly
from marsbench.rendering.figures import COLOURS, MARKERS, drawn_alike, error_bars, new_figure, save
from marsbench.rows.kinds import ServingRow
from marsbench.statistics.intervals import Estimate
from marsbench.studies.serving.findings import (
    Cells,
    accuracy,
    end_to_end,
    first_token,
    goodput,
    over_repeats,
    quantiles,
)
from marsbench.studies.serving.policies import POLICIES, STEPPED

if TYPE_CHECKING:  # a study is read without drawing anything
    from matplotlib.axes import Axes

LATENCY, GOODPUT, ACCURACY, STEP = (f"figures/serving_{name}" for name in ("latency", "goodput", "accuracy", "step"))


def draw_all(cells: Cells, reports: Path) -> list[Path]:
    """Write every figure that there are rows for."""
    with drawn_alike():
        written = []
        if any(shape == "steady" for _, shape, _ in cells):
            written += _latency(cells, reports / LATENCY)
            written += _by_load(cells, reports / GOODPUT, "good answers per second", _goodput)
            written += _by_load(cells, reports / ACCURACY, "accuracy of the answers in %", _accuracy)
        if any(shape == "step" for _, shape, _ in cells):
            written += _step(cells, reports / STEP)
        return written


def _goodput(rows: Sequence[ServingRow]) -> Estimate:
    return over_repeats(rows, goodput)


def _accuracy(rows: Sequence[ServingRow]) -> Estimate:
    return exactly(100 * accuracy(rows))


def _lines(axes: Axes, cells: Cells, value: Callable[[Sequence[ServingRow]], Estimate | None]) -> None:
    """A line for each policy over the loads of its steady cells."""
    for place, policy in enumerate(POLICIES):
        found = {
            load: value(rows)
            for (name, shape, load), rows in sorted(cells.items())
            if (name, shape) == (policy.name, "steady")
        }
        known = {load: one for load, one in found.items() if one is not None}
        axes.errorbar(
            list(known), [one.value for one in known.values()], yerr=error_bars([*known.values()], 1.0), capsize=2,
            label=policy.name, color=COLOURS[place], marker=MARKERS[place], linestyle="-" if policy.adapts else "--",
        )  # fmt: skip
    axes.set_xlabel("load, in what ar carries")


def _latency(cells: Cells, stem: Path) -> list[Path]:
    """First token and end to end, the 50th and the 99th percentile."""
    figure = new_figure(9.5, 6.4)
    grid = figure.subplots(2, 2)
    for row, (measure, words) in enumerate(((first_token, "first token"), (end_to_end, "end to end"))):
        for column, (place, percentile) in enumerate(((0, "p50"), (2, "p99"))):
            axes = grid[row][column]

            def value(rows: Sequence[ServingRow], measure=measure, place=place) -> Estimate | None:  # type: ignore[no-untyped-def]
                found = quantiles(rows, measure)
                return None if found is None else exactly(found[place])

            _lines(axes, cells, value)
            axes.set(ylabel=f"{words}, {percentile}, s", yscale="log")
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside right upper", frameon=False)
    return save(figure, stem)


def _by_load(cells: Cells, stem: Path, label: str, value: Callable[[Sequence[ServingRow]], Estimate]) -> list[Path]:
    figure = new_figure(7.5, 4.2)
    axes = figure.subplots()
    _lines(axes, cells, value)
    axes.set_ylabel(label)
    axes.set_ylim(bottom=0.0)
    figure.legend(loc="outside right upper", frameon=False)
    return save(figure, stem)


def _step(cells: Cells, stem: Path) -> list[Path]:
    """Requests in the server, tau and window over time, while the load goes up and comes down."""
    figure = new_figure(9.5, 7.0)
    grid = figure.subplots(4, 1, sharex=True)
    names = (("running", "running"), ("waiting", "waiting"), ("tau", "tau"), ("window", "window"))
    for axes, (name, label) in zip(grid, names, strict=True):
        for place, policy in enumerate(POLICIES):
            for (known, shape, _), rows in cells.items():
                if (known, shape) == (policy.name, "step") and policy in STEPPED:
                    line = rows[-1].timeline
                    axes.plot(line["at"], line[name], label=policy.name, color=COLOURS[place])
                    for third in (1, 2):
                        axes.axvline(rows[-1].seconds * third / 3, color="#bbbbbb", linewidth=0.8)
        axes.set_ylabel(label)
    grid[-1].set_xlabel("seconds")
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside right upper", frameon=False)
    return save(figure, stem)
