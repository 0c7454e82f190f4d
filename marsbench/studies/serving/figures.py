"""The figures of the page of serving: goodput by load, and a step in load over time."""

from __future__ import annotations

from pathlib import Path

from marsbench.rendering.figures import COLOURS, MARKERS, drawn_alike, error_bars, new_figure, save
from marsbench.studies.serving.findings import Cells, goodput, over_repeats
from marsbench.studies.serving.policies import POLICIES

GOODPUT, STEP = "figures/serving_goodput", "figures/serving_step"


def draw_all(cells: Cells, reports: Path) -> list[Path]:
    with drawn_alike():
        written = []
        if any(shape == "steady" for _, shape, _ in cells):
            written += _by_load(cells, reports / GOODPUT)
        if any(shape == "step" for _, shape, _ in cells):
            written += _step(cells, reports / STEP)
        return written


def _by_load(cells: Cells, stem: Path) -> list[Path]:
    figure = new_figure(7.5, 4.2)
    axes = figure.subplots()
    for place, policy in enumerate(POLICIES):
        found = {
            load: over_repeats(rows, goodput)
            for (name, shape, load), rows in sorted(cells.items())
            if (name, shape) == (policy.name, "steady")
        }
        if found:
            axes.errorbar(
                list(found), [one.value for one in found.values()], yerr=error_bars([*found.values()], 1.0), capsize=2,
                label=policy.name, color=COLOURS[place], marker=MARKERS[place],
                linestyle="-" if policy.adapts else "--",
            )  # fmt: skip
    axes.set(xlabel="load, in what ar carries", ylabel="good answers per second", yscale="log")
    figure.legend(loc="outside right upper", frameon=False)
    return save(figure, stem)


def _step(cells: Cells, stem: Path) -> list[Path]:
    figure = new_figure(9.5, 7.0)
    grid = figure.subplots(4, 1, sharex=True)
    names = (("running", "running"), ("waiting", "waiting"), ("tau", "tau"), ("window", "window"))
    for axes, (name, label) in zip(grid, names, strict=True):
        for place, policy in enumerate(POLICIES):
            for (known, shape, _), rows in cells.items():
                if (known, shape) == (policy.name, "step"):
                    line = rows[-1].timeline
                    axes.plot(line["at"], line[name], label=policy.name, color=COLOURS[place])
                    for third in (1, 2):
                        axes.axvline(rows[-1].seconds * third / 3, color="#bbbbbb", linewidth=0.8)
        axes.set_ylabel(label)
    grid[-1].set_xlabel("seconds")
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside right upper", frameon=False)
    return save(figure, stem)
