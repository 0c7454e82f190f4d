"""A page on one of the paper's tables: what it says of its own, and the sections that all such pages share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from marsbench.findings.cells import Cells, latest_cells
from marsbench.findings.claims import Claim
from marsbench.findings.seeds import BySeed
from marsbench.rendering.deviations import deviations_section
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


@dataclass(frozen=True)
class Page:
    """What is a page's own. `render` and `draw` are pure functions of the rows of one scale."""

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

    def render(self, rows: Sequence[Row], scale: str, seeds: BySeed | None = None) -> str:
        """The page as Markdown: tables of `rows`, verdicts of all training seeds where others are given."""
        rows = [row for row in rows if row.scale == scale]
        seeds = seeds or {0: rows}
        sections = [
            opening_section(self.plan, scale, self.opening, seeds),
            self._measured(latest_cells(rows), seeds),
            claims_section(seeds, self.plan, self.claims, scale),
            self.published(self.plan),
            training_section(rows, self.plan),
            how_section(rows, self.plan, scale),
            deviations_section(rows, scale, self.deviations),
        ]
        return "\n\n".join(section for section in sections if section) + "\n"

    def draw(self, rows: Sequence[Row], scale: str, reports_dir: Path) -> list[Path]:
        """Write the figure that the page shows, as PNG and SVG."""
        cells = latest_cells(row for row in rows if row.scale == scale)
        return self.drawing(cells, self.plan, reports_dir / self._figure_stem) if self.drawing else []

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
        return "\n\n".join(part for part in parts if part)
