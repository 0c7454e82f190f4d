"""How sections become a page, and the page on lines that answer benchmarks, whose sections most tables share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from marsbench.findings.cells import Cells, latest_cells
from marsbench.findings.claims import Claim
from marsbench.findings.in_words import machines
from marsbench.findings.seeds import BySeed
from marsbench.findings.sweep import races_in_words
from marsbench.neighbours import BUSY_CORES
from marsbench.rendering.claims import page_claims
from marsbench.rendering.figures import average_figure
from marsbench.rendering.markdown import filled, folded, paragraphs
from marsbench.rendering.measured import HOW_TO_READ_ACCURACY, numbers_table, reasons
from marsbench.rendering.sections import about, command, deviations, facts_section, racing, seeds_in_words, title
from marsbench.rendering.sessions import session_of
from marsbench.rows.kinds import Row, SweepRow
from marsbench.running.plans import TablePlan

Draw = Callable[[Cells, TablePlan, Path], list[Path]]  # writes a figure; the path lacks the extension
# What stands on a page: of one scale's rows, the scale, and the rows of all training seeds, which verdicts are of.
Sections = Callable[[Sequence[Row], str, BySeed], Iterable[str]]
Slots = Callable[[Sequence[Row], str, BySeed], Mapping[str, str]]  # of the same: what stands in a layout's slots


def laid_out(package: str, slots: Slots, plan: TablePlan | None = None) -> Sections:
    """The sections of a page whose layout is `page.md` of a package; those behind a line `---` are folded.

    `slots` are those of this page alone; what its lines are, if it has any, says the `plan`.
    """
    session = session_of(package.rpartition(".")[2].replace("_", "-"))

    def sections(rows: Sequence[Row], scale: str, seeds: BySeed) -> list[str]:
        common = {
            **{"scale": scale, "racing": racing(scale), "seeds": seeds_in_words(seeds), "about": about(scale, seeds)},
            "raced": races_in_words(row for row in rows if isinstance(row, SweepRow)),
            "company": busy_remark(rows),
            "facts": facts_section(rows, command(session, scale)),
            **({"title": title(plan, scale)} if plan else {}),
        }
        first, *more = filled(package, "page.md", {**common, **slots(rows, scale, seeds)})
        return [first, folded(*more)]

    return sections


def busy_remark(rows: Iterable[Row]) -> str:
    """A remark where other processes used the machine while rows were timed; empty where none did."""
    # Rows of earlier versions tell it lap by lap; of these the median counts, as a speed-up is a median over laps.
    laps = [getattr(row, "others_cores", []) or [row.provenance.get("others_cores") or 0.0] for row in rows]
    used = max(map(median, laps), default=0.0)
    if used <= BUSY_CORES:
        return ""
    return f"**Timed on a machine that was not idle:** other processes used up to {used:.2f} cores."


def page_text(sections: Sections, rows: Sequence[Row], scale: str, seeds: BySeed | None = None) -> str:
    """A page as Markdown, a pure function of the rows of one scale; sections that are empty are left out.

    Without `seeds`, verdicts are of these rows alone.
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
    curves: Mapping[str, Sequence[str]] = field(default_factory=dict)  # of it, by label; or it is drawn by
    drawing: Draw | None = None
    lines: tuple[str, ...] = ()  # of its table; none = all
    figure_title: str = ""  # the paper's number of it, where it has one
    deviations: tuple[str, ...] = ()  # beside those of every page
    prepared: Callable[[Sequence[Row]], Sequence[Row]] = list  # what is worked out of one seed's rows first
    more: tuple[Callable[[Sequence[Row]], str], ...] = ()  # paragraphs of its own, made of rows so prepared

    def sections(self, rows: Sequence[Row], scale: str, seeds: BySeed) -> Iterator[str]:
        """What stands on it: claims, a figure, a table; folded, how it was made and what the paper does otherwise."""
        ready = self.prepared(rows)
        cells = latest_cells(ready)
        plan = self._shown(cells)
        yield title(plan, scale)
        yield page_claims(self._claims_on(plan), seeds, scale)
        yield f"## {self.figure_title}" if self.figure_title else ""
        yield f"![{self.caption}]({self._figure_stem}.png)" if self.figure else ""
        yield f"*{self.caption}. {self._drawn_from(seeds)}*" if self.figure else ""
        yield numbers_table(plan, {seed: self.prepared(of_seed) for seed, of_seed in seeds.items()}, self.lines)
        yield f"{self.opening} {HOW_TO_READ_ACCURACY} {about(scale, seeds)}"
        yield paragraphs(reasons(cells, plan), *[section(ready) for section in self.more])
        yield folded(
            facts_section(rows, command(session_of(self.plan.key), scale)), deviations(rows, scale, self.deviations)
        )

    def figures(self, rows: Sequence[Row], reports_dir: Path) -> list[Path]:
        cells, stem = latest_cells(self.prepared(rows)), reports_dir / self._figure_stem
        if self.curves:
            return average_figure(cells, self._shown(cells), self.curves, stem)
        return self.drawing(cells, self._shown(cells), stem) if self.drawing else []

    def _drawn_from(self, seeds: BySeed) -> str:
        """Whose answers the figure shows, how many to a benchmark, and who computed them."""
        shown = next(iter(seeds))
        rows = [row for row in latest_cells(seeds[shown]).values() if row.status == "done"]
        counts = sorted({len(row.correct) for row in rows})
        return f"Training seed {shown}, {' or '.join(map(str, counts))} questions a benchmark; {machines(rows)}."

    def _claims_on(self, plan: TablePlan) -> list[Claim]:
        """The claims, less those on lines that a page with the lines of `plan` leaves out."""
        left_out = {line.name for line in self.plan.lines} - {line.name for line in plan.lines}
        return [claim for claim in self.claims if not left_out & {*claim.lines}]

    def _shown(self, cells: Cells) -> TablePlan:
        """The plan without those of its optional lines that have no rows."""
        run = {name for name, _ in cells}
        return replace(
            self.plan, lines=tuple(line for line in self.plan.lines if not line.optional or line.name in run)
        )

    @property
    def _figure_stem(self) -> str:
        return f"figures/{self.plan.key}_{self.figure}"
