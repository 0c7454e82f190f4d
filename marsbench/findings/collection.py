"""Which rows a page takes from a store, and the rows of all pages of a scale, by training seed."""

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path, PurePath
from typing import Any

from marsbench.findings.seeds import BySeed, SeedRows
from marsbench.line import Line, TrainedStage
from marsbench.presets import Preset, preset, scales_shown_with
from marsbench.rows.kinds import EvaluationRow, Row, StepTimeRow, SweepRow, TrainingRow, any_measured
from marsbench.rows.workspace import Workspace
from marsbench.running.plans import TablePlan, parents_first

RACED = (SweepRow, StepTimeRow)  # the kinds of rows of a race
Asks = AbstractSet[tuple[str, str]]  # plan, benchmark


@dataclass(frozen=True)
class Query:
    """Which rows a page takes. It finds lines by their content, whichever page measured them."""

    page: str
    plans: tuple[TablePlan, ...]  # whose lines answer benchmarks
    stages: Callable[[Preset], Iterable[TrainedStage]]  # whose trainings it shows, with their parents'
    kinds: tuple[type[Row], ...]  # of its other rows; of races, those of its own grid
    seeds: tuple[int, ...] = ()  # the training seeds of its rows, where no other page has them; none = any

    def of(self, rows: Sequence[Row], asks: Asks | None = None) -> list[Row]:
        """Its rows: trainings, rows of its kinds, then answers in the order of its lines; of several, the best.

        A line needs a row on every benchmark of `asks`, or else it is left out. Without `asks`: on every one that any
        line of its plan has here.
        """
        answers, trainings = [*self._answers(rows)], [row for row in rows if isinstance(row, TrainingRow)]
        own = [row for row in rows if type(row) in self.kinds and getattr(row, "grid", self.page) == self.page]
        rank = ranked(rows, [*own, *[row for *_, row in answers]])
        cells = defaultdict[tuple[str, str], dict[str, EvaluationRow]](dict)
        for plan, line, row in answers:
            chosen = max(cells[plan.key, line.name].get(row.benchmark, row), row, key=rank)
            cells[plan.key, line.name][row.benchmark] = replace(chosen, arm=line.name)
        wanted = self.asks(rows) if asks is None else asks
        shown = list[Row]()
        for plan in self.plans:
            names = {name for key, name in wanted if key == plan.key}
            by_line = [cells[plan.key, line.name] for line in plan.lines]
            shown += [row for of_line in by_line if names <= of_line.keys() for row in of_line.values()]
        best = {TrainedStage(row.stage, row.block_size): row for row in sorted(trainings, key=rank)}
        scale = preset(trainings[0].scale) if trainings else None
        stages = parents_first(self.stages(scale), scale) if scale else ()
        return [*[best[stage] for stage in stages if stage in best], *own, *shown]

    def asks(self, rows: Sequence[Row]) -> Asks:
        """The benchmarks that the lines of each plan have rows on."""
        return {(plan.key, row.benchmark) for plan, _, row in self._answers(rows)}

    def _answers(self, rows: Sequence[Row]) -> Iterator[tuple[TablePlan, Line, EvaluationRow]]:
        trained = {row.decoded: TrainedStage(row.stage, row.block_size) for row in rows if isinstance(row, TrainingRow)}
        lines = defaultdict[Hashable, list[tuple[TablePlan, Line]]](list)
        for plan in self.plans:
            for line in plan.lines:
                lines[_identity(line)].append((plan, line))
        for row in [row for row in rows if isinstance(row, EvaluationRow)]:
            for plan, line in lines[_identity(row)]:
                few = plan.questions is None or len(row.correct) <= plan.questions
                if few and plan.asks(row.benchmark) and trained.get(row.checkpoint, line.trained) == line.trained:
                    yield plan, line, row


def ranked(rows: Iterable[Row], wanted: Iterable[Row]) -> Callable[[Row], Any]:
    """What a row is chosen by among others of the same cell: the greatest.

    In this order: it is finished; its root, the first training of its lineage, has most of the `wanted` rows, so that a
    page shows one lineage where a recipe was trained twice; its root is newer; it has more questions; it is newer.
    """
    made = [row for row in rows if isinstance(row, TrainingRow) and row.checkpoint]
    trainings = {row.checkpoint: row for row in made} | {row.decoded: row for row in made}

    def root(row: Row) -> str:
        first = row.checkpoint
        while first in trainings and trainings[first].parent in trainings:
            first = trainings[first].parent
        return first

    counts = Counter(map(root, wanted))

    def rank(row: Row) -> Any:
        first = root(row)
        began = str(trainings[first].provenance.get("started", "")) if first in trainings else ""
        asked = len(row.correct) if isinstance(row, EvaluationRow) else 0
        return row.status == "done", counts[first], began, asked, str(row.provenance.get("started", ""))

    return rank


def _identity(line: Line | EvaluationRow) -> Hashable:
    """What identifies the rows of a line. Names of lines differ between pages; this does not."""
    return line.stage, line.method, tuple(sorted(line.options.items())), line.dtype


@dataclass(frozen=True)
class Collection:
    """The rows of one scale. Pages without rows are left out."""

    scale: str
    rows: Mapping[str, Mapping[int, Sequence[Row]]]  # page -> training seed -> its rows
    links: Mapping[str, str]  # page of seed 0 -> the way to it from the pages on the whole paper
    judged: Sequence[Any] = ()  # what all claims of the scale came to, where that is known

    def of(self, page: str) -> list[Sequence[Row]]:
        return list(self.rows.get(page, {}).values())

    @property
    def seeds_in_words(self) -> str:
        seeds = sorted({seed for by_seed in self.rows.values() for seed in by_seed})
        return f"Rows of training seeds {', '.join(map(str, seeds))}." if len(seeds) > 1 else "One training seed."

    def shown_with(self, page: str, seed: int) -> BySeed:
        """A page's rows at all training seeds, beginning with the one whose page they are for."""
        of_page = self.rows.get(page, {})
        rows = {number: of_page[number] for number in sorted(of_page, key=lambda number: number != seed)}
        return SeedRows(rows, self.judged)


Pages = Mapping[str, Query]  # page -> what it takes


def collect(root: Path, scale: str, pages: Pages) -> list[Collection]:
    """The rows of every scale that is shown with this one and has rows; if none has, one empty collection."""
    collections = [collection_of(Workspace(root, name), pages) for name in scales_shown_with(scale)]
    return [collection for collection in collections if collection.rows] or collections[:1]


def whole_paper_folder(root: Path, scale: str) -> Path:
    return Workspace(root, scales_shown_with(scale)[0]).reports


def collection_of(workspace: Workspace, pages: Pages) -> Collection:
    """The rows of one scale at all training seeds, whichever page measured them; `workspace` is seed 0's."""
    places = workspace.seeds()
    stored = cache(_of_scale)
    rows: dict[str, dict[int, Sequence[Row]]] = {}
    links, folder = {}, whole_paper_folder(workspace.root, workspace.scale)
    for page, query in pages.items():
        made = {seed: of_seed for seed, place in places.items() if (of_seed := _made_at(place, page)) is not None}
        if not made:
            continue
        own = {seed: replace(workspace, variant=f"seed{seed}") for seed in query.seeds}
        shown = own or {**places, **made}
        asks = {asked for place in shown.values() for asked in query.asks(stored(place))}
        found_at = {seed: query.of(stored(place), asks) for seed, place in shown.items()}
        rows[page] = {seed: of_seed for seed, of_seed in found_at.items() if seed in made or any_measured(of_seed)}
        if 0 in made:
            links[page] = PurePath(os.path.relpath(made[0].reports / f"{page}.md", folder)).as_posix()
    return Collection(workspace.scale, rows, links)


def alone(workspace: Workspace, pages: Pages) -> Collection:
    """The rows of one store, without those of other training seeds."""
    stored = _of_scale(workspace)
    rows = {page: {(*pages[page].seeds, 0)[0]: pages[page].of(stored)} for page in workspace.pages if page in pages}
    return Collection(workspace.scale, rows, {})


def _made_at(place: Workspace, page: str) -> Workspace | None:
    """Where a page was made at a training seed; a quick sweep counts if there is no full one."""
    quick = replace(place, variant="-".join(filter(None, ("quick", place.variant))))
    return next((each for each in (place, quick) if page in each.pages), None)


def _of_scale(place: Workspace) -> list[Row]:
    return [row for row in place.rows if row.scale == place.scale]
