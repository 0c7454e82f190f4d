"""What was measured beside what was published, claim by claim: where sign and size agree, and the figure of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

from marsbench.findings.cells import PUBLISHED_SCALES
from marsbench.findings.claims import DIGITS, POINTS, TIMES, TOKENS, Claim, Judged
from marsbench.findings.collection import Collection
from marsbench.rendering.claims import heading, sentence
from marsbench.rendering.figures import drawn_alike, dress, error_bars, new_figure, save
from marsbench.statistics.intervals import Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

UNITS = (POINTS, TOKENS, TIMES)  # from the top of the figure
_LINEAR_UP_TO = 5.0  # points
_POINT_TICKS = (-50, -20, -10, -5, -2, 0, 2, 5, 10, 20, 50, 100)
_WIDTH, _ROW, _FRAME, _LEGEND = 9.5, 0.26, 0.5, 0.4  # inches: of all; of a row; around the rows of a panel; of the key
_LETTERS = 68  # of a label in one line
_MEASURED_COLOUR = "#000000"
_STYLES = {"0.5b": ("#D55E00", "D"), "7b": ("#0072B2", "^")}  # hollow markers, told apart in black and white too
_SHIFTS = {"0.5b": 0.05, "7b": 0.26}  # below the middle of a row, in rows; what is measured stands above it
_MEASURED_SHIFT = -0.22
_STEM = "figures/claims_"  # what its name begins with


@dataclass(frozen=True)
class Comparison:
    """A claim that the paper has a number for: what one scale measured of it, and what was published."""

    number: int  # of the claim on its page
    claim: Claim
    scale: str  # that measured
    measured: Estimate | None
    published: Mapping[str, float]  # scale of the paper -> its value, the smallest model first; never empty

    @property
    def nearest(self) -> float:
        """The published value of the same model, or of the smallest that has one."""
        return self.published.get(self.scale, next(iter(self.published.values())))

    @property
    def same_sign(self) -> bool:
        """Whether the measured effect lies on the published one's side of no effect."""
        return self.measured is not None and self._side(self.measured.value) == self._side(self.nearest)

    @property
    def surely_opposed(self) -> bool:
        """Whether the whole measured interval lies on the other side."""
        if self.measured is None:
            return False
        limits = self.measured.interval
        return self._side(limits.low) == self._side(limits.high) == -self._side(self.nearest) != 0

    @property
    def holds_published(self) -> bool:
        """Whether the measured interval holds the published value; one without limits says nothing."""
        if self.measured is None or not isfinite(self.measured.interval.half_width):
            return False
        return self.measured.interval.low <= self.nearest <= self.measured.interval.high

    def _side(self, value: float) -> int:
        no_effect = 0.0 if self.claim.signed else 1.0  # no difference, a ratio of one, one token per forward pass
        return (value > no_effect) - (value < no_effect)


def comparisons(judged: Sequence[Judged], scale: str) -> list[Comparison]:
    """Every claim with a published number, once, in the order of the page; `scale` is the one that measured."""
    found = []
    for number, entry in enumerate(judged, 1):
        said = {name: value for name in PUBLISHED_SCALES if (value := entry.claim.published(name)) is not None}
        if said:
            digits = DIGITS[entry.claim.unit]  # that readers see
            values = {name: round(value, digits) + 0.0 for name, value in said.items()}
            found.append(Comparison(number, entry.claim, scale, entry.findings[scale].estimate, values))
    return found


def agreement(compared: Sequence[Comparison], scale: str) -> str:
    """In how many claims sign and size agree at a scale, in a sentence."""
    measured = [pair for pair in compared if pair.measured is not None]
    same, opposed = sum(pair.same_sign for pair in measured), sum(pair.surely_opposed for pair in measured)
    held = sum(pair.holds_published for pair in measured)
    count = "all" if len(measured) == len(compared) else str(len(measured))
    return (
        f"Scale {scale}: of {len(compared)} claims with a published number, {count} were measured; in {same} of "
        f"them the sign agrees, in {opposed} the whole interval has the other sign, and in {held} the interval "
        "holds the published value."
    )


# ---- the figure ----

Panel = list[str | Comparison]  # headings, and the claims below each
Panels = dict[tuple[str, bool], Panel]  # (unit, whether differences) -> what is drawn there


def sections(judged: Sequence[Judged], collections: Sequence[Collection]) -> Iterator[str]:
    """What the page of claims says of published numbers: a sentence and the figure for each scale with rows."""
    for scale, compared in _compared(judged, collections).items():
        caption = f"Effects measured at scale {scale} with 95 % intervals beside the published ones, claim by claim"
        yield f"{agreement(compared, scale)}\n\n![{caption}]({_STEM}{scale}.png)"


def draw(judged: Sequence[Judged], collections: Sequence[Collection], folder: Path) -> list[Path]:
    """Write those figures, as PNG and SVG, and return their paths; `folder` is the page's."""
    shown = _compared(judged, collections)
    return [path for scale, some in shown.items() for path in _figure(some, scale, folder / f"{_STEM}{scale}")]


def panels(compared: Sequence[Comparison]) -> Panels:
    """What is drawn: a panel per unit, differences apart, in each the sections of the paper in its order."""
    found: Panels = {}
    for pair in sorted(compared, key=lambda pair: (UNITS.index(pair.claim.unit), pair.claim.signed)):
        panel = found.setdefault((pair.claim.unit, pair.claim.signed), [])
        if heading(pair.claim.section) not in panel:
            panel.append(heading(pair.claim.section))
        panel.append(pair)
    return found


def _compared(judged: Sequence[Judged], collections: Sequence[Collection]) -> dict[str, list[Comparison]]:
    """Scale -> its claims with a published number, where any of them was measured."""
    by_scale = {each.scale: comparisons(judged, each.scale) for each in collections}
    return {scale: found for scale, found in by_scale.items() if any(pair.measured for pair in found)}


def _figure(compared: Sequence[Comparison], scale: str, path_stem: Path) -> list[Path]:
    drawn = panels(compared)
    rows = [len(panel) for panel in drawn.values()]
    with drawn_alike():
        figure = new_figure(_WIDTH, _ROW * sum(rows) + _FRAME * len(rows) + _LEGEND)
        grid = figure.subplots(len(drawn), 1, squeeze=False, height_ratios=rows)
        for axes, ((unit, signed), panel) in zip(grid[:, 0], drawn.items(), strict=True):
            _draw_panel(axes, panel, scale)
            _dress(axes, panel, unit, signed=signed)
        known = {
            name: mark for axes in grid[:, 0] for mark, name in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        names = sorted(known)  # what was measured comes first
        handles = [known[name] for name in names]
        figure.legend(handles, names, loc="outside upper center", ncols=len(names), frameon=False)
        return save(figure, path_stem)


def _draw_panel(axes: Axes, panel: Panel, scale: str) -> None:
    rows = [(row, item) for row, item in enumerate(panel) if isinstance(item, Comparison)]
    measured = [(row, pair.measured) for row, pair in rows if pair.measured is not None]
    axes.errorbar(
        [estimate.value for _, estimate in measured],
        [row + _MEASURED_SHIFT for row, _ in measured],
        xerr=error_bars([estimate for _, estimate in measured], 1.0),
        fmt="o", color=_MEASURED_COLOUR, markersize=4.5, elinewidth=1.2, capsize=2.0,
        label=f"measured at scale {scale}, 95 % interval",
    )  # fmt: skip
    for model, name in PUBLISHED_SCALES.items():
        colour, marker = _STYLES[model]
        places = [(pair.published[model], row + _SHIFTS[model]) for row, pair in rows if model in pair.published]
        if places:
            axes.plot(
                *zip(*places, strict=True),
                linestyle="none", marker=marker, color=colour, markerfacecolor="white", markersize=5.0,
                label=f"published, {name}",
            )  # fmt: skip


def _dress(axes: Axes, panel: Panel, unit: str, *, signed: bool) -> None:
    labels = [
        item if isinstance(item, str) else fill(f"{item.number}  {sentence(item.claim)}", _LETTERS) for item in panel
    ]
    axes.set_ylim(len(panel) - 0.5, -0.5)
    axes.set_yticks(range(len(panel)), labels, fontsize=7.5, linespacing=1.0)
    for row, (item, label) in enumerate(zip(panel, axes.get_yticklabels(), strict=True)):
        if isinstance(item, str):
            axes.axhspan(row - 0.5, row + 0.5, color="0.93", linewidth=0, zorder=0)
            label.set_fontweight("bold")
    axes.axvline(0.0 if signed else 1.0, color="0.4", linewidth=0.9, zorder=1)
    if unit == POINTS:
        axes.set_xscale("symlog", linthresh=_LINEAR_UP_TO)
        low, high = axes.get_xlim()
        axes.set_xticks([tick for tick in _POINT_TICKS if low <= tick <= high], minor=False)
        axes.set_xticks([], minor=True)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}".replace("-", "\N{MINUS SIGN}"))
    beyond = f" (logarithmic beyond {_LINEAR_UP_TO:g})" if unit == POINTS else ""
    axes.set_xlabel(f"{'difference in ' if signed else ''}{unit}{beyond}")
    dress(axes, "x")
