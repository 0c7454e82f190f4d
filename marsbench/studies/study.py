"""What a study is: everything that commands and pages need to know about one page of results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marsbench.findings.claims import PAPERS, Claim, Section
from marsbench.findings.query import RACED, Query
from marsbench.findings.seeds import BySeed
from marsbench.line import TrainedStage
from marsbench.presets import Preset
from marsbench.rendering.page import Sections, TablePage, page_text
from marsbench.rendering.sessions import session_of
from marsbench.rows.kinds import Row
from marsbench.running.plans import TablePlan

if TYPE_CHECKING:  # a study is read without loading what measures
    from marsbench.racing.grid import Grid
    from marsbench.running.run import Run


@dataclass(frozen=True, kw_only=True)
class Item:
    """Something with a line in the index and a name to reproduce it by: a table, a figure, an appendix, or our page."""

    key: str  # what commands and files call it: "table2"
    name: str  # what readers call it: "Table 2"
    asks: str  # the question that it answers
    section: Section | None = None  # of the paper, where its claims are made; None for pages of our own
    anchor: str = ""  # where it stands on its page
    place: int = 0  # among pages of our own
    plan: TablePlan | None = None  # its lines, where it is made of lines

    @property
    def session(self) -> str:
        """What stands behind `nox -s` to make it."""
        return session_of(self.key)


@dataclass(frozen=True, kw_only=True)
class Study(Item):
    """A page: what it measures, what it claims, how it is rendered.

    A page shows the rows of one training seed and scale; its verdicts are of all seeds. Several studies may stand on
    one page, each with its own rows.
    """

    on: str = ""  # the study whose page it stands on, where it has none of its own
    leads: bool = False  # whether it comes first there

    sections: Sections  # of its page
    figures: Callable[[Sequence[Row], Path], list[Path]] = lambda rows, folder: []  # writes them below a folder
    measure: Callable[[Run], list[Row]] | None = None  # makes its rows beside answers, and those of its grid
    kinds: tuple[type[Row], ...] = ()  # what those rows are
    also: tuple[TablePlan, ...] = ()  # further lines that answer benchmarks
    grid: Callable[[Preset, bool], Grid] | None = None  # what it races at a scale, in full or quickly
    stages: tuple[TrainedStage, ...] = ()  # what it trains that is neither its plan's nor its grid's
    in_world: bool = False  # whether its own `measure` is of the world's models alone
    timed: bool = False  # whether its own `measure` times something, so that nothing may run beside it
    scored: bool = True  # whether the lines of its plan answer benchmarks
    trained_before: bool = False  # measures the checkpoints of its plan that are there: training all takes hours
    holds: tuple[Item, ...] = ()  # what else stands on its page
    claims: tuple[Claim, ...] = ()  # those that its rows decide, in their place in the paper
    remark: Callable[[Sequence[Sequence[Row]]], str] = lambda seeds: ""  # for pages on the whole paper; rows by seed
    in_paper: bool = True  # whether it belongs to the reproduction of the whole paper

    @property
    def is_made(self) -> bool:
        """Whether a command makes its rows; those of `mars_on_gpu` were made by hand."""
        return self.plan is not None or self.grid is not None or self.measure is not None

    @property
    def page(self) -> str:
        """The key of the study whose page it stands on."""
        return self.on or self.key

    def render(self, rows: Sequence[Row], scale: str, seeds: BySeed | None = None) -> str:
        return page_text(self.sections, rows, scale, seeds)

    def draw(self, rows: Sequence[Row], scale: str, reports_dir: Path) -> list[Path]:
        """Write the figures that its page shows, as PNG and SVG, below a folder, and return their paths."""
        return self.figures([row for row in rows if row.scale == scale], reports_dir)

    @property
    def plans(self) -> tuple[TablePlan, ...]:
        """The lines that answer benchmarks."""
        return (*([self.plan] if self.plan and self.scored else []), *self.also)

    @property
    def query(self) -> Query:
        """What its page takes from a store."""
        seed = self.plan.seed if self.plan else None
        return Query(self.key, self.plans, self.shows, (*self.kinds, *(RACED if self.grid else ())), seed)

    def shows(self, scale: Preset, quick: bool = False) -> list[TrainedStage]:
        """The checkpoints of its lines, each once; `quick` is for what races a grid."""
        of_plans = [stage for plan in filter(None, (self.plan, *self.also)) for stage in plan.stages]
        of_grid = self.grid(scale, quick).checkpoints if self.grid else []
        return list(dict.fromkeys([*of_plans, *of_grid]))

    def trains(self, scale: Preset, quick: bool = False) -> list[TrainedStage]:
        """The checkpoints that are to be trained for its page."""
        return [] if self.trained_before else list(dict.fromkeys([*self.shows(scale, quick), *self.stages]))


def ours(page: str, claims: Iterable[Claim]) -> tuple[Claim, ...]:
    """Claims of a page of our own, as the pages on the whole paper list them."""
    return tuple(replace(claim, page=page, item=page, whose="ours") for claim in claims)


def measured_by(module: str, function: str) -> Callable[[Run], list[Row]]:
    """What makes a study's rows, by its place: only who measures imports it."""
    return lambda run: getattr(import_module(module), function)(run)


def table_study(page: TablePage, *, more_claims: tuple[Claim, ...] = (), **said: Any) -> Study:
    """The study of a page whose lines answer benchmarks: one of the paper's tables or figures, or a page of our own.

    The paper's claims are made in `section`, and belong to the page, unless they say otherwise. `more_claims` are those
    that its rows decide besides, which the page does not show; what is `said` are further fields of the study.
    """
    key, section = page.plan.key, said.get("section")
    claims = [
        replace(
            claim, page=key, item=claim.item or key, section=claim.section or section if claim.whose == PAPERS else None
        )
        for claim in (*more_claims, *page.claims)
    ]
    fields: dict[str, Any] = {
        **{"key": key, "name": page.plan.name, "plan": page.plan, "sections": page.sections, "figures": page.figures},
        **{"claims": ours(key, claims) if page.plan.own else tuple(claims), **said},
    }
    return Study(**fields)
