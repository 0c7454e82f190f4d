"""README's picture: a dozen claims, the paper's number beside the one measured with its interval."""

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill

from marsbench.findings.cells import PUBLISHED_SCALES
from marsbench.findings.claims import POINTS, TIMES, TOKENS, Finding, Judged
from marsbench.findings.collection import Collection
from marsbench.rendering.claims import verdict
from marsbench.rendering.figures import drawn_alike, dress, error_bars, new_figure, save

STEM = "figures/claims"
CAPTION = "A dozen claims: the paper's number and ours with its 95 % interval"
_SHOWN = (  # page and name, by unit
    ("table2", "matches-ar-sft"), ("table4", "level"), ("table9", "level-with-jacobi"), ("gpu", "real-cost"),
    ("table4", "several-tokens"), ("gpu", "real-tokens"), ("table9", "jacobi-slow"), ("table4", "more-tokens"),
    ("speedup", "cache-faster"), ("speedup", "target-faster"), ("speedup", "best-verified"),
    ("table2", "step-costs-twice"),
)  # fmt: skip
_LETTERS, _ROW = 58, 0.42  # of a label in one line; inches
_STYLES = {"0.5b": ("#D55E00", "D"), "7b": ("#0072B2", "^")}  # hollow markers, told apart in black and white too
Row = tuple[str, Finding]  # the scale that measured


def draw(judged: Sequence[Judged], collections: Sequence[Collection], folder: Path) -> list[Path]:
    """Write the picture below the folder of the index; nothing without any of its claims."""
    by_key = {(entry.claim.page, entry.claim.name): entry for entry in judged}
    rows: list[Row] = []
    for key in _SHOWN:
        if entry := by_key.get(key):
            known = [(each.scale, entry.findings[each.scale]) for each in collections]
            rows += [(scale, found) for scale, found in known if found.estimate is not None][:1]
    panels = {unit: [row for row in rows if row[1].claim.unit == unit] for unit in (POINTS, TOKENS, TIMES)}
    drawn = {unit: some for unit, some in panels.items() if some}
    return _figure(drawn, folder / STEM) if drawn else []


def _figure(panels: dict[str, list[Row]], path_stem: Path) -> list[Path]:
    with drawn_alike():
        figure = new_figure(9.0, _ROW * sum(map(len, panels.values())) + 0.55 * len(panels) + 0.4)
        grid = figure.subplots(len(panels), 1, squeeze=False, height_ratios=[len(rows) for rows in panels.values()])
        for axes, (unit, rows) in zip(grid[:, 0], panels.items(), strict=True):
            estimates = [found.estimate for _, found in rows if found.estimate is not None]
            axes.errorbar(
                [estimate.value for estimate in estimates], range(len(rows)), xerr=error_bars(estimates, 1.0),
                fmt="o", color="black", markersize=5.0, elinewidth=1.3, capsize=2.0, label="measured, 95 % interval",
            )  # fmt: skip
            for scale, name in PUBLISHED_SCALES.items():
                colour, marker = _STYLES[scale]
                known = [(found.claim.published(scale), place) for place, (_, found) in enumerate(rows)]
                axes.plot(
                    [value for value, _ in known if value is not None],
                    [place + 0.2 for value, place in known if value is not None],
                    linestyle="none", marker=marker, color=colour, markerfacecolor="white", markersize=5.5,
                    label=f"the paper, {name}",
                )  # fmt: skip
            axes.axvline(0.0 if unit == POINTS else 1.0, color="0.4", linewidth=0.9, zorder=0)
            labels = [fill(f"{found.claim.text} ({verdict(found, scale)})", _LETTERS) for scale, found in rows]
            axes.set_yticks(range(len(rows)), labels, fontsize=8)
            axes.set_ylim(len(rows) - 0.5, -0.5)
            axes.set_xlabel({POINTS: "difference in points of accuracy", TIMES: "times"}.get(unit, unit))
            dress(axes)
        figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
        return save(figure, path_stem)
