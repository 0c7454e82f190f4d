"""How sections become a page, and the page on lines that answer benchmarks, whose sections most tables share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from marsbench.findings.cells import Cells, latest_cells
from marsbench.findings.claims import Claim
from marsbench.findings.seeds import BySeed
from marsbench.rendering.deviations import deviations_section
from marsbench.rendering.markdown import paragraphs
from marsbench.rendering.measured import (
    HOW_TO_READ_THE_CELLS,
    accuracy_table,
    cut_answers,
    cut_prompts,
    other_scores,
    reasons,
    seeds_table,
)
from marsbench.rendering.published import published_section
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
        yield opening_section(self.plan, scale, self.opening, seeds)
        yield self._measured(latest_cells(rows), seeds)
        yield claims_section(seeds, self.plan, self.claims, scale)
        yield self.published(self.plan)
        yield training_section(rows, self.plan)
        yield how_section(rows, self.plan, scale)
        yield deviations_section(rows, scale, self.deviations)

    def figures(self, rows: Sequence[Row], reports_dir: Path) -> list[Path]:
        """Write the figure that it shows, as PNG and SVG."""
        stem = reports_dir / self._figure_stem
        return self.drawing(latest_cells(rows), self.plan, stem) if self.drawing else []

    @property
    def _figure_stem(self) -> str:
        """The figure beside the page, less its extension."""
        return f"figures/{self.plan.key}_{self.figure}"

    def _measured(self, cells: Cells, seeds: BySeed) -> str:
        parts = [
            "## Measured",
            self.reading,
            *[make(cells, self.plan) for make in self.tables],
            seeds_table(seeds, self.plan),
            reasons(cells, self.plan),
            other_scores(cells, self.plan),
            cut_answers(cells, self.plan),
            cut_prompts(cells, self.plan),
        ]
        if self.drawing:
            picture = f"![{self.caption}]({self._figure_stem}.png)"
            parts += [f"## {self.figure_title}", f"{self.caption}.", picture]
        return paragraphs(*parts)
