"""How sections become a page, and the page on lines that answer benchmarks, whose sections most tables share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from marsbench.findings.cells import Cells, columns, latest_cells
from marsbench.findings.claims import Claim
from marsbench.findings.published import PUBLISHED_SCALES, paper_label, published_values
from marsbench.findings.seeds import BySeed
from marsbench.paper import published
from marsbench.rendering.deviations import deviations_section
from marsbench.rendering.markdown import paragraphs, table
from marsbench.rendering.measured import (
    HOW_TO_READ_THE_CELLS,
    accuracy_table,
    other_scores,
    reasons,
    seeds_table,
    what_was_cut,
)
from marsbench.rendering.sections import how_section, opening_section, training_section
from marsbench.rendering.verdicts import claims_section
from marsbench.rows.kinds import Row
from marsbench.running.plans import TablePlan

Draw = Callable[[Cells, TablePlan, Path], list[Path]]  # writes a figure; the path lacks the extension
# What stands on a page: of one scale's rows, the scale, and the rows of all training seeds, which verdicts are of.
Sections = Callable[[Sequence[Row], str, BySeed], Iterable[str]]


def page_text(sections: Sections, rows: Sequence[Row], scale: str, seeds: BySeed | None = None) -> str:
    """A page as Markdown, a pure function of the rows of one scale; sections that are empty are left out.

    Args:
        sections: what stands on it.
        rows: those of other scales are left out.
        scale: that it is about.
        seeds: the rows of all training seeds; None = these alone.
    """
    rows = [row for row in rows if row.scale == scale]
    return "\n\n".join(filter(None, sections(rows, scale, seeds or {0: rows}))) + "\n"


def published_section(plan: TablePlan) -> str:
    """The paper's table: accuracy, and tokens per forward pass where it has them; nothing for a page of our own."""
    if plan.own:
        return ""
    lead = (
        f"**Published** by the authors (arXiv 2604.07023, {plan.name}), accuracy in %; nothing in this table was "
        "measured here."
    )
    parts = ["## The paper's numbers", lead, _published_table(plan, "accuracy", 1)]
    if published(plan.number, metric="tokens_per_forward"):
        parts += ["**Published** too: tokens per forward pass.", _published_table(plan, "tokens_per_forward", 2)]
    return paragraphs(*parts)


def _published_table(plan: TablePlan, metric: str, digits: int) -> str:
    heads = {**columns(plan), "average": "Average"}
    lines = []
    for scale, model in PUBLISHED_SCALES.items():
        for arm in (*plan.arms, *plan.elsewhere):
            found = published_values(plan, arm, scale, metric)
            if found:
                numbers = [f"{found[name]:.{digits}f}" if name in found else "" for name in heads]
                lines.append([model, paper_label(arm.label), *numbers])
    return table(["model", "", *heads.values()], lines, text=(0, 1))


@dataclass(frozen=True)
class TablePage:
    """What a page on lines that answer benchmarks has of its own."""

    plan: TablePlan
    opening: str  # what was done, in a sentence
    claims: tuple[Claim, ...]
    figure: str = ""  # name of its figure; empty for a page without one
    caption: str = ""  # of the figure
    drawing: Draw | None = None
    figure_title: str = "Figure"  # the paper's number of it, where it has one
    reading: str = HOW_TO_READ_THE_CELLS
    tables: tuple[Callable[[Cells, TablePlan], str], ...] = (accuracy_table,)  # of what was measured
    published: Callable[[TablePlan], str] = published_section
    deviations: tuple[str, ...] = ()  # beside those of every page

    def sections(self, rows: Sequence[Row], scale: str, seeds: BySeed) -> Iterator[str]:
        """What stands on it: tables of `rows`, verdicts of all training seeds."""
        cells = latest_cells(rows)
        plan = self._shown(cells)
        yield opening_section(plan, scale, self.opening, seeds)
        yield self._measured(cells, plan, seeds)
        left_out = {arm.name for arm in self.plan.arms} - {arm.name for arm in plan.arms}
        claims = [claim for claim in self.claims if not left_out & {*claim.lines}]
        yield claims_section(seeds, plan, claims, scale)
        yield self.published(plan)
        yield training_section(rows, plan)
        yield how_section(rows, plan, scale)
        yield deviations_section(rows, scale, self.deviations)

    def figures(self, rows: Sequence[Row], reports_dir: Path) -> list[Path]:
        """Write the figure that it shows, as PNG and SVG."""
        cells, stem = latest_cells(rows), reports_dir / self._figure_stem
        return self.drawing(cells, self._shown(cells), stem) if self.drawing else []

    def _shown(self, cells: Cells) -> TablePlan:
        """The plan without those of its optional lines that have no rows."""
        run = {name for name, _ in cells}
        return replace(self.plan, arms=tuple(arm for arm in self.plan.arms if not arm.optional or arm.name in run))

    @property
    def _figure_stem(self) -> str:
        """The figure beside the page, less its extension."""
        return f"figures/{self.plan.key}_{self.figure}"

    def _measured(self, cells: Cells, plan: TablePlan, seeds: BySeed) -> str:
        parts = [
            "## Measured",
            self.reading,
            *[make(cells, plan) for make in self.tables],
            seeds_table(seeds, plan),
            reasons(cells, plan),
            other_scores(cells, plan),
            what_was_cut(cells, plan),
        ]
        if self.drawing:
            picture = f"![{self.caption}]({self._figure_stem}.png)"
            parts += [f"## {self.figure_title}", f"{self.caption}.", picture]
        return paragraphs(*parts)
