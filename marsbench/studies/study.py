"""A study: everything that commands and pages need to know about one page of results."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marsbench.findings.cells import Cells, latest_cells
from marsbench.findings.claims import Claim, Section, finding
from marsbench.findings.collection import RACED, Query
from marsbench.findings.in_words import machines
from marsbench.findings.seeds import BySeed
from marsbench.line import TrainedStage
from marsbench.presets import Preset
from marsbench.rendering.claims_in_words import numbers_of, page_claims
from marsbench.rendering.figures import Drawing, Seeds
from marsbench.rendering.markdown import filled, folded, paragraphs
from marsbench.rendering.measured import HOW_TO_READ_ACCURACY, numbers_table, reasons
from marsbench.rendering.sections import command, common_slots, deviations, facts_section, title, words
from marsbench.rows.kinds import Row
from marsbench.running.plans import TablePlan

if TYPE_CHECKING:  # to read a study does not load what measures
    from marsbench.racing.grid import Grid
    from marsbench.running.run import Run

Slots = Callable[[Sequence[Row], str, BySeed], Mapping[str, str]]  # from one scale's rows, the scale, and all seeds'


@dataclass(frozen=True, kw_only=True)
class Item:
    """Something with a line in the index and a name for `reproduce`: a table, a figure, an appendix, our page."""

    key: str = ""  # its name in commands and files: "table2"; by default that of the plan
    name: str = ""  # its name for readers: "Table 2"; by default that of the plan
    asks: str  # the question that it answers
    section: Section | None = None  # of the paper, where its claims are made; None for pages of our own
    anchor: str = ""  # its place on its page
    order: int = 0  # its place among pages of our own
    plan: TablePlan | None = None  # its lines, if it has lines


@dataclass(frozen=True, kw_only=True)
class Study(Item):
    """A page, or a part of one: what it measures, what it claims, how it is rendered.

    It shows the rows of one training seed and scale; its verdicts are of all seeds.
    """

    on: str = ""  # the study whose page it is on, if it has no page of its own
    leads: bool = False  # whether it comes first there

    layout: str = ""  # its prose, below this folder; by default prose/KEY.md
    slots: Slots = lambda rows, scale, seeds: {}  # of the layout, beside those that any may have
    prose_claims: tuple[Claim, ...] = ()  # for its prose; those with a text are judged, too
    figures: Callable[[Seeds, Path], list[Path]] = lambda seeds, folder: []  # writes them below a folder
    measure: "Callable[[Run], list[Row]] | None" = None  # makes its rows other than answers and those of races
    kinds: tuple[type[Row], ...] = ()  # what those rows are
    also: tuple[TablePlan, ...] = ()  # further lines that answer benchmarks
    grid: "Callable[[Preset, bool], Grid] | None" = None  # its race at a scale, full or quick
    races: "Callable[[Preset], Iterable[Grid]] | None" = None  # races at a scale that are one piece of work together
    stages: tuple[TrainedStage, ...] = ()  # what it trains beside its plan and its grid
    in_world: bool = False  # whether its `measure` is for the world's models alone
    timed: bool = False  # whether its `measure` needs the machine alone, for its clock, as races do
    scored: bool = True  # whether the lines of its plan answer benchmarks
    trained_before: bool = False  # measures existing checkpoints alone: to train all takes hours
    holds: tuple[Item, ...] = ()  # further items on its page
    claims: tuple[Claim, ...] = ()  # shown on its page
    prepared: Callable[[Sequence[Row]], Sequence[Row]] = list  # what first derives rows from those of one seed
    in_paper: bool = False  # whether it is part of reproducing the whole paper, as all with a section of it are

    def __post_init__(self) -> None:
        if self.plan is not None:
            object.__setattr__(self, "key", self.key or self.plan.key)
            object.__setattr__(self, "name", self.name or self.plan.name)
        of_paper = any(item.section for item in (self, *self.holds))
        object.__setattr__(self, "in_paper", self.in_paper or of_paper)
        common: dict[str, Any] = {"page": self.key, "prepared": self.prepared}
        for name in ("claims", "prose_claims"):  # one without a section of the paper is ours
            sections = [(claim, None if claim.ours else claim.section or self.section) for claim in getattr(self, name)]
            placed = tuple(replace(claim, section=section, **common) for claim, section in sections)
            object.__setattr__(self, name, placed)

    @property
    def is_made(self) -> bool:
        """Whether a command makes its rows; those of `mars_on_gpu` were made by hand."""
        return any(made is not None for made in (self.plan, self.grid, self.races, self.measure))

    @property
    def page(self) -> str:
        return self.on or self.key

    def render(self, rows: Sequence[Row], scale: str, seeds: BySeed | None = None) -> str:
        """The page from one scale's rows; without `seeds`, verdicts use these rows alone."""
        rows = [row for row in rows if row.scale == scale]
        return paragraphs(*self.parts(rows, scale, seeds or {0: rows})) + "\n"

    def parts(self, rows: Sequence[Row], scale: str, seeds: BySeed) -> Iterable[str]:
        """Its layout; what stands after `---` there is folded."""
        first, *more = self.prose(rows, scale, seeds)
        yield first
        yield folded(*more)

    def prose(self, rows: Sequence[Row], scale: str, seeds: BySeed) -> list[str]:
        """The parts of its layout, filled."""
        slots = {
            **common_slots(rows, scale, seeds),
            **numbers_of(finding(claim, seeds) for claim in (*self.claims, *self.prose_claims)),
            "title": title(self.plan, scale) if self.plan else "",
            "claims": page_claims(self.claims, seeds, scale),
            "accuracy": HOW_TO_READ_ACCURACY,
            "facts": facts_section(rows, command(self.key, scale)),
            **self.slots(rows, scale, seeds),
        }
        return filled(__package__, self.layout or f"prose/{self.key}.md", slots)

    def draw(self, seeds: Seeds, reports_dir: Path) -> list[Path]:
        """Write the figures that its page shows, as PNG and SVG, below a folder, and return their paths."""
        return self.figures(seeds, reports_dir)

    @property
    def plans(self) -> tuple[TablePlan, ...]:
        return (*([self.plan] if self.plan and self.scored else []), *self.also)

    @property
    def query(self) -> Query:
        seeds, raced = self.plan.seeds if self.plan else (), RACED if self.grid or self.races else ()
        return Query(self.key, self.plans, self.shows, (*self.kinds, *raced), seeds)

    def shows(self, scale: Preset, quick: bool = False) -> list[TrainedStage]:
        """The checkpoints of its lines, each once; `quick` is for what races a grid."""
        of_plans = [stage for plan in filter(None, (self.plan, *self.also)) for stage in plan.stages]
        return list(dict.fromkeys([*of_plans, *(self.grid(scale, quick).checkpoints if self.grid else [])]))

    def trains(self, scale: Preset, quick: bool = False) -> list[TrainedStage]:
        return [] if self.trained_before else list(dict.fromkeys([*self.shows(scale, quick), *self.stages]))


@dataclass(frozen=True, kw_only=True)
class TablePage(Study):
    """A page about lines that answer benchmarks: a table or figure of the paper, or a page of our own."""

    plan: TablePlan
    table: TablePlan | None = None  # the lines that it shows, if some are calculated from rows
    opening: str = ""  # what was done, if no prose/KEY.md says that below its answer
    figure: str = ""  # name of its figure; empty for a page without one
    caption: str = ""  # of the figure
    drawing: Drawing | None = None  # what draws it
    lines: tuple[str, ...] = ()  # of its table; none = all
    figure_title: str = ""  # the paper's name of the figure, if it has one
    deviations: tuple[str, ...] = ()  # beside those of every page
    more: tuple[Callable[[Sequence[Row]], str], ...] = ()  # further paragraphs, from prepared rows

    def parts(self, rows: Sequence[Row], scale: str, seeds: BySeed) -> Iterator[str]:
        """Question, answer, claims, figure, table; folded: how it was made, and deviations from the paper."""
        ready = self.prepared(rows)
        cells = latest_cells(ready)
        plan = self._shown(cells)
        # A claim on a line that is left out is left out too.
        missing = {line.name for line in (self.table or self.plan).lines} - {line.name for line in plan.lines}
        yield title(plan, scale)
        # What follows `---` says how to read the table, and stands below it.
        *answer, how_to_read = [self.opening] if self.opening else self.prose(rows, scale, seeds)
        yield f"**Question:** {self.asks[0].upper()}{self.asks[1:]} {'' if self.on else words(scale)}".strip()
        yield paragraphs(*answer)
        yield page_claims([claim for claim in self.claims if not missing & {*claim.lines}], seeds, scale)
        yield f"## {self.figure_title}" if self.figure_title else ""
        if self.figure:
            drawn = [row for of in seeds.values() for row in latest_cells(of).values() if row.status == "done"]
            counts = " or ".join(map(str, sorted({len(row.correct) for row in drawn})))
            which = "All training seeds" if len(seeds) > 1 else f"Training seed {next(iter(seeds))}"
            source = f"{which}, {counts} questions per benchmark; {machines(drawn)}."
            yield f"![{self.name}: {self.figure.replace('_', ' ')}]({self._stem}.png)"
            yield f"*{self.caption}. {source}*"
        yield numbers_table(plan, {seed: self.prepared(of_seed) for seed, of_seed in seeds.items()}, self.lines)
        yield how_to_read
        yield paragraphs(reasons(cells, plan), *[section(ready) for section in self.more])
        made = facts_section(rows, command(self.key, scale))
        yield folded(made, deviations(rows, scale, self.deviations, common=not self.on))

    def draw(self, seeds: Seeds, reports_dir: Path) -> list[Path]:
        every = [self.prepared(of_seed) for of_seed in seeds]
        plan = self._shown(latest_cells(every[0]))
        return self.drawing(every, plan, reports_dir / self._stem) if self.drawing else []

    def _shown(self, cells: Cells) -> TablePlan:
        run, plan = {name for name, _ in cells}, self.table or self.plan
        return replace(plan, lines=tuple(line for line in plan.lines if not line.optional or line.name in run))

    @property
    def _stem(self) -> str:  # where its figure lies beside the page, less the extension
        return f"figures/{self.key}_{self.figure}"
