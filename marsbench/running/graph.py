"""The work of a run as tasks: checkpoints to train, cells to answer; what each comes after, what it costs and does.

Which there are is arithmetic over presets and plans: what is there already, somebody else says (`Known`). What does
the work is imported where it is done, so that a plan of it needs no model.
"""

from __future__ import annotations

import math
import sys
import traceback
from abc import abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from marsbench.errors import UserError
from marsbench.evaluation.benchmarks import benchmark as benchmark_of
from marsbench.evaluation.local_data import Unavailable
from marsbench.executors.tasks import Task
from marsbench.line import TrainedStage
from marsbench.presets import Preset
from marsbench.progress import Reporter, quieten_libraries
from marsbench.rows.kinds import EvaluationRow, Row
from marsbench.rows.workspace import full_disk_explained
from marsbench.running.estimates import decoding_s, questions_of, training_s
from marsbench.running.plans import Asked, TablePlan, is_ours, parents_first

if TYPE_CHECKING:
    from marsbench.running.run import Run

_LEAST_S = 60.0  # of answering; less is not worth a task of its own
_SCORING_S = 5.0  # of putting the parts of a cell together
_PER_WORKER = 4  # tasks of answering for each worker, so that none has to wait long for the last one
_OF_EACH = ("reporter", "failures")  # what every process has of its own, of a run


# ---- the kinds of tasks ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Made:
    answers: Mapping[str, EvaluationRow] = field(default_factory=dict)  # place of a cell -> its row
    failures: Mapping[str, str] = field(default_factory=dict)  # what it could not make -> why (`Run.failures`)
    missing: Mapping[str, str] = field(default_factory=dict)  # place of a cell that cannot be measured here -> why
    page: tuple[Row, ...] = ()  # what a page has beside answers, or the rows of one of its races
    trained: TrainedStage | None = None  # the checkpoint that is there now


def settings_of(run: Run) -> dict[str, Any]:
    """What another process needs to know of a run, wherever it works."""
    settings = {field.name: getattr(run, field.name) for field in fields(run) if field.name not in _OF_EACH}
    data_dir = run.data_dir.resolve() if run.data_dir else None
    return {**settings, "workspace": replace(run.workspace, root=run.workspace.root.resolve()), "data_dir": data_dir}


@dataclass(frozen=True, kw_only=True)
class RunTask(Task):
    """A task of a run; its classes are the kinds of work."""

    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)  # of the run; none where it is only planned

    @property
    def listed(self) -> str:
        """What a plan lists it under, together with others."""
        return f"{self.title} (alone)" if self.alone else self.title

    @property
    def makes(self) -> frozenset[str]:
        """The places of the checkpoints and answers that it makes (`TrainedStage.place`, `Asked.place`)."""
        return frozenset()

    def run(self, made: Sequence[Made | None], reporter: Reporter) -> Made:
        """Do it with a run of this process's own, which knows what the tasks before have made."""
        from marsbench.running.checkpoints import Checkpoints
        from marsbench.running.run import Run

        quieten_libraries()
        earlier = [result for result in made if result is not None]
        failures = {place: why for result in earlier for place, why in result.failures.items()}
        run = Run(**self.settings, reporter=reporter, failures=failures)
        with full_disk_explained(run.workspace.runs):
            Checkpoints(run).await_visible([result.trained for result in earlier if result.trained])
            return self.do(run)

    @abstractmethod
    def do(self, run: Run) -> Made:
        """Do it; its rows lie in the run's store when this returns."""

    def failed(self, error: UserError) -> Made:
        """What others hear of it where it has failed: nothing that needs what it makes can be measured."""
        return Made(failures=dict.fromkeys(self.makes, f"{self.title} failed: {error.reason}"))


@dataclass(frozen=True, kw_only=True)
class TrainTask(RunTask):
    trained: TrainedStage

    @property
    def makes(self) -> frozenset[str]:
        return frozenset([self.trained.place])

    def do(self, run: Run) -> Made:
        """Train it now, unless the one that it starts from is missing."""
        from marsbench.running.checkpoints import Checkpoints

        if run.failures:
            raise UserError("; ".join(dict.fromkeys(run.failures.values())), fix="mend that first")
        Checkpoints(run).path(self.trained)
        return Made(trained=self.trained)


@dataclass(frozen=True, kw_only=True)
class AnswerTask(RunTask):
    """Answers cells of one checkpoint, in one type of numbers, or one part of the questions of some."""

    cells: tuple[Asked, ...]
    numbers: tuple[int, ...]  # of the cells, among those to answer
    of: int  # how many those are
    shard: tuple[int, int] = (1, 1)

    @property
    def listed(self) -> str:
        return f"answering with {self.cells[0].line.trained.title}"

    @property
    def makes(self) -> frozenset[str]:
        return frozenset(cell.place for cell in self.cells)

    def do(self, run: Run) -> Made:
        """Answer cell by cell; one that fails does not keep the others from being answered."""
        from marsbench.running.cells import Cells
        from marsbench.running.checkpoints import Checkpoints

        try:
            loaded = Checkpoints(run).of_line(self.cells[0].line)
        except Unavailable as error:
            return Made(missing={asked.place: error.reason for asked in self.cells})
        cells, failures, missing = Cells(replace(run, shard=self.shard)), dict[str, str](), dict[str, str]()
        answers: dict[str, EvaluationRow] = {}
        for number, asked in zip(self.numbers, self.cells, strict=True):
            if asked.place in run.failures:
                continue
            try:
                answers[asked.place] = cells.cell(asked, *loaded, said=f" (cell {number} of {self.of})")
            except Unavailable as error:
                missing[asked.place] = error.reason
            except UserError as error:
                run.reporter.say(str(error))
                failures[asked.place] = error.reason
            except Exception as error:
                traceback.print_exc(file=sys.stderr)
                failures[asked.place] = f"{type(error).__name__}: {str(error).strip()}"
        return Made(answers if self.shard == (1, 1) else {}, failures, missing)


# ---- which there are ------------------------------------------------------------------------------------------------


class Known:
    """What is there already, and what can be had: here nothing is, so that all of a scale's work is to be done."""

    def __init__(self, scale: Preset) -> None:
        self._scale = scale

    def is_trained(self, trained: TrainedStage) -> bool:
        return False

    def is_there(self, trained: TrainedStage) -> bool:
        return self._scale.ready_checkpoint(*trained) is not None or self.is_trained(trained)

    def asked(self, plan: TablePlan) -> list[str]:
        return plan.of(self._scale.benchmarks)

    def computes_in(self, dtype: str) -> bool:
        return True

    def questions_left(self, asked: Asked) -> int:
        """How many questions of a cell have no answers yet; none where there will be no checkpoint."""
        if all(is_ours(trained, self._scale) or self._scale.ready_checkpoint(*trained) for trained in asked.line.needs):
            return questions_of(asked.benchmark, self._scale, asked.questions)
        return 0


def trainings(wanted: Iterable[TrainedStage], scale: Preset, known: Known) -> list[TrainTask]:
    """What is to be trained for some checkpoints, parents first, each after the one that it starts from."""
    tasks: dict[TrainedStage, TrainTask] = {}
    for trained, parent in parents_first([stage for stage in wanted if is_ours(stage, scale)], scale).items():
        if not known.is_trained(trained):
            tasks[trained] = TrainTask(
                name=f"training-{trained.slug}", title=f"training {trained.title}",
                after=after([parent], tasks.values()) if parent else (),
                seconds=training_s(trained, scale), trained=trained,
            )  # fmt: skip
    return list(tasks.values())


def after(wanted: Iterable[TrainedStage | Asked], tasks: Iterable[RunTask]) -> tuple[str, ...]:
    """The names of those tasks that make some checkpoints and answers."""
    places = {task.place for task in wanted}
    return tuple(task.name for task in tasks if places & task.makes)


def cells_of(plans: Iterable[TablePlan], known: Known, *, trained_before: bool = False) -> list[Asked]:
    """The cells of some tables that this machine computes; on checkpoints `trained_before`, if only those are asked."""
    return [
        asked
        for plan in plans
        for asked in plan.cells(known.asked(plan))
        if known.computes_in(asked.line.dtype)
        and (not trained_before or all(known.is_there(stage) for stage in asked.line.needs))
    ]


def answers(
    wanted: Iterable[Asked], trained: Sequence[TrainTask], scale: Preset, known: Known, *, workers: int
) -> list[AnswerTask]:
    """What is to be answered: tasks of about the same size, each of one checkpoint, after what trains that.

    Several small cells make a task; a cell that is larger than a task should be is answered in parts, unless this
    process works alone (0 workers).
    """
    seconds, groups = dict[str, float](), defaultdict[Any, list[Asked]](list)
    for asked in wanted:
        if questions := known.questions_left(asked):
            tokens = questions * benchmark_of(asked.benchmark).answer_limit(scale.max_new_tokens)
            seconds[asked.place] = decoding_s(tokens, scale)
            groups[asked.line.trained, asked.line.draft, asked.line.dtype].append(asked)
    size = max(_LEAST_S, sum(seconds.values()) / (_PER_WORKER * workers)) if workers else math.inf
    numbers, tasks = Counter[TrainedStage](), list[AnswerTask]()
    for some, parts in (piece for group in groups.values() for piece in _in_pieces(group, seconds, size)):
        line, whole = some[0].line, sum(seconds[asked.place] for asked in some)
        before, shards = after(line.needs, trained), [(number, parts) for number in range(1, parts + 1)]
        for part in [*shards, *([(1, 1)] if parts > 1 else [])]:  # what is answered in parts is scored as a whole
            numbers[line.trained] += 1
            scores = part not in shards
            tasks.append(AnswerTask(
                name=f"answering-{line.trained.slug}-{numbers[line.trained]}",
                title=f"answering with {line.trained.title}, piece {numbers[line.trained]}",
                after=(*before, *[task.name for task in tasks[-parts:]]) if scores else before,
                seconds=_SCORING_S if scores else whole / parts, cells=tuple(some), of=len(seconds), shard=part,
                numbers=tuple([*seconds].index(asked.place) + 1 for asked in some),
            ))  # fmt: skip
    return tasks


def _in_pieces(group: Sequence[Asked], seconds: Mapping[str, float], size: float) -> list[tuple[list[Asked], int]]:
    """Cells that share their checkpoints, in pieces of about a size -> in how many parts each is answered."""
    pieces, filling, filled = list[tuple[list[Asked], int]](), list[Asked](), 0.0
    for asked in group:
        if seconds[asked.place] >= 2 * size:
            pieces.append(([asked], math.ceil(seconds[asked.place] / size)))
            continue
        filling.append(asked)
        filled += seconds[asked.place]
        if filled >= size:
            pieces.append((filling, 1))
            filling, filled = [], 0.0
    return [*pieces, *([(filling, 1)] if filling else [])]
