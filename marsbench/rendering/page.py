"""How sections become a page, and the page on lines that answer benchmarks, whose sections most tables share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from marsbench.findings.between_lines import line_numbers
from marsbench.findings.cells import PUBLISHED_SCALES, Cells, columns, latest_cells, paper_label, published_values
from marsbench.findings.claims import DIGITS, Claim, Finding
from marsbench.findings.in_words import plus_minus
from marsbench.findings.seeds import BySeed
from marsbench.findings.sweep import races_in_words
from marsbench.neighbours import BUSY_CORES
from marsbench.rendering.claims import answers, claims_section, tally
from marsbench.rendering.figures import average_figure
from marsbench.rendering.markdown import filled, folded, merged, paragraphs, table
from marsbench.rendering.measured import HOW_TO_READ_ACCURACY, HOW_TO_READ_THE_CELLS, accuracy_table, measured_section
from marsbench.rendering.sections import about, behind, command, facts_section, racing, seeds_in_words, title
from marsbench.rendering.sessions import session_of
from marsbench.rows.kinds import EvaluationRow, Row, SweepRow
from marsbench.running.plans import TablePlan
from marsbench.world import modelled_on

Draw = Callable[[Cells, TablePlan, Path], list[Path]]  # writes a figure; the path lacks the extension
# What stands on a page: of one scale's rows, the scale, and the rows of all training seeds, which verdicts are of.
Sections = Callable[[Sequence[Row], str, BySeed], Iterable[str]]
Slots = Callable[[Sequence[Row], str, BySeed], Mapping[str, str]]  # of the same: what stands in a layout's slots


def laid_out(package: str, slots: Slots, plan: TablePlan | None = None, deviations: Sequence[str] = ()) -> Sections:
    """The sections of a page whose layout is `page.md` of a package; those behind the first are folded.

    `slots` are those of this page alone; what its lines are, if it has any, says the `plan`.
    """
    session = session_of(package.rpartition(".")[2].replace("_", "-"))

    def sections(rows: Sequence[Row], scale: str, seeds: BySeed) -> list[str]:
        common = {
            **{"scale": scale, "racing": racing(scale), "seeds": seeds_in_words(seeds), "about": about(scale, seeds)},
            "raced": races_in_words(row for row in rows if isinstance(row, SweepRow)),
            "company": busy_remark(rows),
            "facts": facts_section(rows, command(session, scale)),
            **({"title": title(plan, scale), **behind(rows, plan, scale, deviations)} if plan else {}),
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


def published_section(plan: TablePlan) -> str:
    """The paper's table: accuracy, and tokens per forward pass where it has them; nothing for a page of our own."""
    if plan.own or plan.figure:
        return ""
    by = f"**Published** by the authors (arXiv 2604.07023, {plan.name}), accuracy in %"
    metrics = (
        (f"{by}; nothing in this table was measured here.", "accuracy", 1),
        ("**Published** too: tokens per forward pass.", "tokens_per_forward", 2),
    )
    heads, parts = {**columns(plan), "average": "Average"}, ["## The paper's numbers"]
    for lead, metric, digits in metrics:
        lines = [
            [model, paper_label(line.label), *[f"{found[name]:.{digits}f}" if name in found else "" for name in heads]]
            for scale, model in PUBLISHED_SCALES.items()
            for line in (*plan.lines, *plan.elsewhere)
            if (found := published_values(plan, line, scale, metric))
        ]
        parts += [lead, table(["model", "", *heads.values()], lines, text=(0, 1))] if lines else []
    return paragraphs(*parts)


def numbers_table(plan: TablePlan, seeds: BySeed, names: Sequence[str] = ()) -> str:
    """Lines with their average accuracy and tokens per forward pass, of all training seeds; those alike as one.

    Without `names`, all lines of the plan.
    """
    lines = [
        [line.label, *[_plus_minus(claim.over(seeds.values())) for claim in line_numbers(plan, line.name)]]
        for line in plan.lines
        if not names or line.name in names
    ]
    return table(["", "accuracy, %", "tokens/forward"], merged(lines))


def by_benchmark(plan: TablePlan, claims: Sequence[Claim], seeds: BySeed) -> str:
    """The effects of some claims on every benchmark by itself, of all training seeds."""
    heads = columns(plan)
    cells = [[row for row in rows if isinstance(row, EvaluationRow)] for rows in seeds.values()]
    of = {name: [[row for row in rows if modelled_on(row.benchmark) == name] for rows in cells] for name in heads}
    lines = [[claim.compared, *[claim.over(of[name]).number for name in heads]] for claim in claims]
    text = "Where a mean comes from: points on every benchmark by itself, all training seeds together."
    shown = table(["", *heads.values()], lines)
    return paragraphs("## By benchmark", f"{text} Nothing is tested.", shown) if lines else ""


def _plus_minus(found: Finding) -> str:
    """A number with half its interval; where not of all benchmarks, it says so."""
    if found.estimate is None:
        return "not run"
    judged, asked = len(found.measured.benchmarks), found.measured.asked
    return plus_minus(found.estimate, DIGITS[found.claim.unit]) + ("" if judged == asked else f" ({judged} of {asked})")


@dataclass(frozen=True)
class TablePage:
    """What a page on lines that answer benchmarks has of its own."""

    plan: TablePlan
    opening: str  # what was done, in a sentence
    claims: tuple[Claim, ...]
    answers: tuple[str, ...] = ()  # names or letters of the claims whose findings it begins with; none = all
    figure: str = ""  # name of its figure; empty for a page without one
    caption: str = ""  # of the figure
    curves: Mapping[str, Sequence[str]] = field(default_factory=dict)  # of it, by label; or it is drawn by
    drawing: Draw | None = None
    lines: tuple[str, ...] = ()  # of the table that it begins with; none = all
    figure_title: str = ""  # the paper's number of it, where it has one
    reading: str = HOW_TO_READ_THE_CELLS
    tables: tuple[Callable[[Cells, TablePlan], str], ...] = (accuracy_table,)  # of what was measured
    published: Callable[[TablePlan], str] = published_section
    deviations: tuple[str, ...] = ()  # beside those of every page
    prepared: Callable[[Sequence[Row]], Sequence[Row]] = list  # what is worked out of one seed's rows first
    split: tuple[str, ...] = ()  # names of claims whose effects it shows on every benchmark by itself
    more: tuple[Callable[[Sequence[Row]], str], ...] = ()  # folded sections of its own, made of rows so prepared

    def sections(self, rows: Sequence[Row], scale: str, seeds: BySeed) -> Iterator[str]:
        """What stands on it: the answer, a figure and a table; folded, tables of `rows`, verdicts of all seeds."""
        ready = self.prepared(rows)
        cells = latest_cells(ready)
        plan = self._shown(cells)
        claims = self._claims_on(plan)
        yield title(plan, scale)
        first = [claim for claim in claims if not self.answers or {claim.name, claim.letter} & {*self.answers}]
        yield answers(first, seeds)
        yield f"## {self.figure_title}" if self.figure_title else ""
        yield f"![{self.caption}]({self._figure_stem}.png)" if self.figure else ""
        yield numbers_table(plan, {seed: self.prepared(of_seed) for seed, of_seed in seeds.items()}, self.lines)
        yield f"{HOW_TO_READ_ACCURACY} {self.opening} {about(scale, seeds)}"
        yield folded(
            claims_section(seeds, plan, claims, scale),
            by_benchmark(plan, [claim for claim in claims if claim.name in self.split], seeds),
            measured_section(cells, plan, seeds, self.reading, *[make(cells, plan) for make in self.tables]),
            self.published(plan),
            *[section(ready) for section in self.more],
            *behind(rows, plan, scale, self.deviations).values(),
        )

    def figures(self, rows: Sequence[Row], reports_dir: Path) -> list[Path]:
        cells, stem = latest_cells(self.prepared(rows)), reports_dir / self._figure_stem
        if self.curves:
            return average_figure(cells, self._shown(cells), self.curves, stem)
        return self.drawing(cells, self._shown(cells), stem) if self.drawing else []

    def tally(self, seeds: BySeed) -> str:
        rows = [row for of_seed in seeds.values() for row in of_seed]
        return tally([claim.over(seeds.values()) for claim in self._claims_on(self._shown(latest_cells(rows)))])

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
