"""The figures of reports. The same rows give the same bytes: no date, no random names, no global state."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import ceil, isfinite
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, NamedTuple

from marsbench.files import write_atomically
from marsbench.findings.between_lines import line_numbers, more_accurate
from marsbench.findings.cells import columns, done_cells, latest_cells
from marsbench.rows.kinds import Row
from marsbench.running.plans import TablePlan
from marsbench.statistics.intervals import Estimate, Interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's palette, safe for colour-blind readers, with grey in place of its yellow, which fades on white, and
# Tol's wine, indigo and sand after them.
COLOURS = (
    "#999999", "#000000", "#56B4E9", "#E69F00", "#CC79A7", "#0072B2", "#D55E00", "#009E73", "#882255", "#332288",
    "#DDCC77", "#44AA99",
)  # fmt: skip
Seeds = Sequence[Sequence[Row]]  # the rows of a page, of each training seed
MARKERS = ("o", "s", "D", "^", "v", "P", "X", "*", "d", "<", ">", "p")  # told apart in black and white too
FORMATS = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}  # metadata that could vary
GROUP_WIDTH = 0.8  # of the room for one benchmark, or one line
Drawing = Callable[[Seeds, TablePlan, Path], list[Path]]  # writes a figure of a page; the path lacks the extension
_LETTERS, _LETTERS_BELOW = 60, 100  # of a name in one line, and below all panels of a figure


@contextmanager
def drawn_alike(width: float, height: float) -> Iterator[Figure]:
    """A figure that looks the same on every machine, down to the bytes, if it is saved in the `with` block too."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "marsbench", "font.size": 9.0}):
        yield Figure(figsize=(width, height), layout="constrained")


def look(place: int) -> dict[str, Any]:
    return {"color": COLOURS[place % len(COLOURS)], "marker": MARKERS[place % len(MARKERS)]}


class Labelled(NamedTuple):
    """Estimates on one axis, a line per name, and the value at which nothing is gained."""

    x_label: str
    series: Mapping[str, Mapping[str, Estimate]]  # what the legend calls it, if anything -> name -> estimate
    level: float = 1.0


def labelled_figure(panels: Sequence[Labelled], path_stem: Path) -> list[Path]:
    """Draw estimates beside their names, a line each, with a marker per series."""
    names = list(dict.fromkeys(name for panel in panels for estimates in panel.series.values() for name in estimates))
    with drawn_alike(9.5, 0.9 + 0.15 * (len(panels) > 1) + 0.34 * len(names)) as figure:
        grid = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
        for axes, panel in zip(grid, panels, strict=True):
            for position, (label, estimates) in enumerate(panel.series.items()):
                shift = GROUP_WIDTH * ((position + 0.5) / len(panel.series) - 0.5)
                axes.errorbar(
                    [estimate.value for estimate in estimates.values()],
                    [names.index(name) + shift for name in estimates],
                    xerr=error_bars([*estimates.values()]),
                    linestyle="none", markersize=4.5, elinewidth=1.0, label=label, **look(position),
                )  # fmt: skip
            axes.axvline(panel.level, color="0.4", linewidth=0.9, linestyle=":")
            values = [estimate.value for estimates in panel.series.values() for estimate in estimates.values()]
            if panel.level and min(values, default=0.0) >= 0:  # ratios and the like, whose axis begins with nothing
                axes.set_xlim(left=0.0)
            axes.spines[["top", "right", "left"]].set_visible(False)
            axes.tick_params(axis="y", length=0)
            axes.grid(axis="x", color="0.88", linewidth=0.6)
            axes.set_axisbelow(True)
            axes.set_xlabel(fill(f"{panel.x_label} (bars: 95 % interval)", _LETTERS_BELOW // len(panels)))
        grid[0].set_yticks(range(len(names)), [fill(name, _LETTERS) for name in names], fontsize=8)
        grid[0].set_ylim(len(names) - 0.5, -0.5)
        known = {label: bar for axes in grid for bar, label in zip(*axes.get_legend_handles_labels(), strict=True)}
        if known:
            figure.legend(known.values(), known.keys(), loc="outside lower center", ncols=4, frameon=False)
        return save(figure, path_stem)


def differences_figure(reference: str, *names: str) -> Drawing:
    """What draws paired differences of lines to one of them, in points: a panel per line, benchmark by benchmark."""

    def draw(seeds: Seeds, plan: TablePlan, path_stem: Path) -> list[Path]:
        panels = []
        parts = {head: (name,) for name, head in columns(plan).items()} | {"Average": (*columns(plan),)}
        for line in [line for line in plan.lines if line.name in names]:
            claims = {words: more_accurate(plan, line.name, reference, only=of) for words, of in parts.items()}
            effects = {words: gain for words, claim in claims.items() if (gain := claim.over(seeds).estimate)}
            if effects:
                panels.append(Labelled(f"{line.label}, points", {"": effects}, level=0.0))
        return labelled_figure(panels, path_stem) if panels else []

    return draw


def error_bars(estimates: Sequence[Estimate]) -> list[list[float]]:
    """The lengths of error bars downwards and upwards; a single value that shows no spread gets none."""
    finite = [e if isfinite(e.interval.half_width) else exactly(e.value) for e in estimates]
    return [[max(e.value - e.interval.low, 0.0) for e in finite], [max(e.interval.high - e.value, 0.0) for e in finite]]


def save(figure: Figure, path_stem: Path) -> list[Path]:
    """Write a figure as PNG and SVG; `path_stem` lacks the extension."""
    paths = []
    for extension, metadata in FORMATS.items():
        drawing = io.BytesIO()
        figure.savefig(drawing, format=extension, dpi=150, metadata=metadata)
        paths.append(write_atomically(path_stem.with_name(f"{path_stem.name}.{extension}"), drawing.getvalue()))
    return paths


SPEED_AXIS = "tokens per forward pass"
# Of Okabe and Ito's palette, safe for colour-blind readers; markers and lines tell curves apart without colour too.
_STYLES = (("#0072B2", "o", "-"), ("#D55E00", "s", "--"), ("#009E73", "^", "-."), ("#000000", "D", ":"))
_REFERENCE_COLOUR = "0.35"
_PANEL_WIDTH, _PANEL_HEIGHT, _LEGEND_LINE = 3.6, 3.0, 0.22  # inches


class Panel(NamedTuple):
    """Curves on one pair of axes; `reference` is the accuracy of AR SFT, drawn across."""

    title: str
    curves: Mapping[str, Sequence[tuple[Estimate, Estimate]]]  # label -> points (x, accuracy in %)
    reference: Estimate | None = None


def panels_figure(panels: Sequence[Panel], path_stem: Path, *, across: int, x_label: str = SPEED_AXIS) -> list[Path]:
    """Draw panels, so many across, with one legend for all; curves with the same place in a panel look the same."""
    down, entries = ceil(len(panels) / across), 2 * across - 1  # rows of panels, and what a line of the legend holds
    legend = _LEGEND_LINE * ceil((1 + max(len(panel.curves) for panel in panels)) / entries)
    with drawn_alike(_PANEL_WIDTH * across, _PANEL_HEIGHT * down + legend) as figure:
        grid = figure.subplots(down, across, squeeze=False, sharex="row", sharey="row")
        for axes, panel in zip(grid.flat, panels, strict=True):
            axes.set_title(panel.title, fontsize=9)
            if panel.reference is not None:
                limits = panel.reference.interval
                axes.axhspan(limits.low, limits.high, color=_REFERENCE_COLOUR, alpha=0.12, linewidth=0)
                axes.axhline(panel.reference.value, color=_REFERENCE_COLOUR, linestyle=":", label="AR SFT")
            for (label, points), (colour, marker, line) in zip(panel.curves.items(), _STYLES, strict=False):
                x, height = ([point[axis] for point in points] for axis in (0, 1))
                axes.errorbar(
                    [estimate.value for estimate in x], [estimate.value for estimate in height],
                    xerr=error_bars(x), yerr=error_bars(height), label=label, color=colour, marker=marker,
                    linestyle=line, markersize=4.5, linewidth=1.2, elinewidth=0.8,
                )  # fmt: skip
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(color="0.9", linewidth=0.6)
            axes.set_axisbelow(True)
        for axes in grid[-1]:
            axes.set_xlabel(x_label)
            if x_label == SPEED_AXIS:
                axes.margins(x=0.08)  # no marker stands on the frame
                axes.set_xlim(left=0.95)  # AR decoding emits 1
        for axes in grid[:, 0]:
            axes.set_ylabel("accuracy in %")
        known = grid[0, 0].get_legend_handles_labels()
        figure.legend(*known, loc="outside lower center", ncols=entries, frameon=False)
        return save(figure, path_stem)


def speed_panel(
    seeds: Seeds, plan: TablePlan, title: str, lines: Mapping[str, Sequence[str]], benchmarks: Sequence[str],
    at: Sequence[float] = (),
) -> Panel:  # fmt: skip
    """Per label, a curve through its lines with all benchmarks: accuracy by tokens per forward pass, or by `at`."""
    curves = {
        label: [
            (exactly(at[place]) if at else point[0], point[1])
            for place, name in enumerate(names)
            if (point := line_on(seeds, plan, name, benchmarks))
        ]
        for label, names in lines.items()
    }
    _, reference = line_on(seeds, plan, "ar_sft", benchmarks) or (None, None)
    return Panel(title, curves, reference)


def accuracy_figure(lines: Mapping[str, Sequence[str]], at: Sequence[float] = (), x_label: str = SPEED_AXIS) -> Drawing:
    """What draws one such panel, over the benchmarks that the whole plan was measured on."""

    def draw(seeds: Seeds, plan: TablePlan, path_stem: Path) -> list[Path]:
        benchmarks = shared_benchmarks(seeds, plan)
        title = f"average of {len(benchmarks)} benchmark{'' if len(benchmarks) == 1 else 's'}"
        panel = speed_panel(seeds, plan, title, lines, benchmarks, at)
        return panels_figure([panel], path_stem, across=1, x_label=x_label)

    return draw


def exactly(value: float) -> Estimate:
    return Estimate(value, Interval(value, value), 0)


def line_on(seeds: Seeds, plan: TablePlan, line: str, benchmarks: Sequence[str]) -> tuple[Estimate, Estimate] | None:
    """Tokens per forward pass and accuracy in % of a line, as in its page's table; None without all benchmarks."""
    if line not in {each.name for each in plan.lines}:
        return None
    accuracy, tokens = (claim.over(seeds) for claim in line_numbers(plan, line, only=benchmarks))
    if accuracy.estimate is None or tokens.estimate is None or len(accuracy.measured.benchmarks) < len(benchmarks):
        return None
    return tokens.estimate, accuracy.estimate


def shared_benchmarks(seeds: Seeds, plan: TablePlan) -> list[str]:
    """The benchmarks that every line was measured on, lines without any left aside."""
    cells = latest_cells(seeds[0])
    measured = [done for line in plan.lines if (done := done_cells(cells, line.name))]
    return [name for name in columns(plan) if measured and all(name in done for done in measured)]
