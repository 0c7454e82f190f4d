"""The work of a run as tasks, planned without a model: checkpoints to train, cells to answer, and what these cost."""

from __future__ import annotations

import math
import os
import sys
import traceback
from abc import abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Any

from marsbench.errors import UserError
from marsbench.evaluation.benchmarks import benchmark as benchmark_of
from marsbench.evaluation.local_data import Unavailable
from marsbench.executors.tasks import Task, launch
from marsbench.line import TrainedStage
from marsbench.presets import Preset
from marsbench.progress import Reporter, quieten_libraries
from marsbench.rows.kinds import EvaluationRow, Row
from marsbench.rows.workspace import full_disk_explained
from marsbench.running.plans import PlannedCell, TablePlan, decoding_s, is_ours, parents_first, questions_of, training_s

if TYPE_CHECKING:
    from marsbench.running.run import Run

_LEAST_S = 60.0  # of answering; less is not worth a task of its own
_PER_WORKER = 4  # tasks of answering for each worker, so that none has to wait long for the last one
_OF_EACH = ("reporter", "failures")  # what every process has of its own, of a run


# ---- the kinds of tasks ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Made:
    """What a task hands back to the run that asked for it."""

    answers: Mapping[str, EvaluationRow] = field(default_factory=dict)  # id of a cell -> its row
    failures: Mapping[str, str] = field(default_factory=dict)  # what it could not make -> why (`Run.failures`)
    missing: Mapping[str, str] = field(default_factory=dict)  # id of a cell that cannot be measured here -> why
    rows: tuple[Row, ...] = ()  # what a page has beside answers, or the rows of one of its races
    trained: TrainedStage | None = None  # the checkpoint that is there now


def settings_of(run: Run) -> dict[str, Any]:
    settings = {field.name: getattr(run, field.name) for field in fields(run) if field.name not in _OF_EACH}
    data_dir = run.data_dir.resolve() if run.data_dir else None
    return {**settings, "workspace": replace(run.workspace, root=run.workspace.root.resolve()), "data_dir": data_dir}


@dataclass(frozen=True, kw_only=True)
class RunTask(Task):
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)  # of the run; none where it is only planned

    @property
    def listed(self) -> str:
        return f"{self.title} (alone)" if self.alone else self.title

    @property
    def makes(self) -> frozenset[str]:
        """The ids of the checkpoints and answers that it makes (`TrainedStage.id`, `PlannedCell.id`)."""
        return frozenset()

    def run(self, made: Sequence[Made | None], reporter: Reporter) -> Made:
        from marsbench.running.checkpoints import Checkpoints
        from marsbench.running.run import Run

        quieten_libraries()
        earlier = [result for result in made if result is not None]
        failures = {id_: why for result in earlier for id_, why in result.failures.items()}
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
        return frozenset([self.trained.id])

    def do(self, run: Run) -> Made:
        from marsbench.running.checkpoints import Checkpoints

        if run.failures:
            raise UserError("; ".join(dict.fromkeys(run.failures.values())), fix="correct that first")
        if run.gpus_per_training > 1 and "LOCAL_RANK" not in os.environ:
            launch(self, run.gpus_per_training)
        else:
            Checkpoints(run).path(self.trained)  # trains it where it is not there
        return Made(trained=self.trained)


@dataclass(frozen=True, kw_only=True)
class AnswerTask(RunTask):
    cells: tuple[PlannedCell, ...]
    numbers: tuple[int, ...]  # of these cells, counted among all that are to be answered
    of: int  # how many those are

    @property
    def listed(self) -> str:
        return f"answering with {self.cells[0].line.trained.title}"

    @property
    def makes(self) -> frozenset[str]:
        return frozenset(cell.id for cell in self.cells)

    def do(self, run: Run) -> Made:
        """Answer cell by cell; one that fails does not keep the others from being answered."""
        from marsbench.running.cells import CellRunner
        from marsbench.running.checkpoints import Checkpoints

        try:
            loaded = Checkpoints(run).of_line(self.cells[0].line)
        except Unavailable as error:
            return Made(missing={cell.id: error.reason for cell in self.cells})
        runner, failures, missing = CellRunner(run), dict[str, str](), dict[str, str]()
        answers: dict[str, EvaluationRow] = {}
        for number, cell in zip(self.numbers, self.cells, strict=True):
            if cell.id in run.failures:
                continue
            try:
                answers[cell.id] = runner.row(cell, *loaded, said=f" (cell {number} of {self.of})")
            except Unavailable as error:
                missing[cell.id] = error.reason
            except UserError as error:
                run.reporter.say(str(error))
                failures[cell.id] = error.reason
            except Exception as error:
                traceback.print_exc(file=sys.stderr)
                failures[cell.id] = f"{type(error).__name__}: {str(error).strip()}"
        return Made(answers, failures, missing)


class Known:
    """What is there already, and what can be had; this base class knows of nothing: a plan from zero."""

    gpus_per_training = 1

    def __init__(self, scale: Preset) -> None:
        self._scale = scale

    def is_trained(self, trained: TrainedStage) -> bool:
        return False

    def is_there(self, trained: TrainedStage) -> bool:
        return self._scale.ready_checkpoint(*trained) is not None or self.is_trained(trained)

    def benchmarks_of(self, plan: TablePlan) -> list[str]:
        return plan.of(self._scale.benchmarks)

    def computes_in(self, dtype: str) -> bool:
        return True

    def questions_left(self, cell: PlannedCell) -> int:
        """How many questions of a cell have no answers yet; none where there will be no checkpoint."""
        if all(is_ours(trained, self._scale) or self._scale.ready_checkpoint(*trained) for trained in cell.line.needs):
            return questions_of(cell.benchmark, self._scale, cell.questions)
        return 0


def trainings(wanted: Iterable[TrainedStage], scale: Preset, known: Known) -> list[TrainTask]:
    """What is to be trained for some checkpoints, parents first, each after the one that it starts from."""
    tasks: dict[TrainedStage, TrainTask] = {}
    for trained, parent in parents_first([stage for stage in wanted if is_ours(stage, scale)], scale).items():
        if not known.is_trained(trained):
            tasks[trained] = TrainTask(
                name=f"training-{trained.slug}", title=f"training {trained.title}",
                after=after([parent], tasks.values()) if parent else (),
                seconds=training_s(trained, scale), gpus=known.gpus_per_training, trained=trained,
            )  # fmt: skip
    return list(tasks.values())


def after(wanted: Iterable[TrainedStage | PlannedCell], tasks: Iterable[RunTask]) -> tuple[str, ...]:
    """The names of those tasks that make some checkpoints and answers."""
    ids = {task.id for task in wanted}
    return tuple(task.name for task in tasks if ids & task.makes)


def cells_of(plans: Iterable[TablePlan], known: Known, *, trained_before: bool = False) -> list[PlannedCell]:
    """The cells of some tables that this machine computes; on checkpoints `trained_before`, if only those are asked."""
    return [
        cell
        for plan in plans
        for cell in plan.cells(known.benchmarks_of(plan))
        if known.computes_in(cell.line.dtype)
        and (not trained_before or all(known.is_there(stage) for stage in cell.line.needs))
    ]


def answers(
    wanted: Iterable[PlannedCell], trained: Sequence[TrainTask], scale: Preset, known: Known, *, workers: int
) -> list[AnswerTask]:
    """What is to be answered: tasks of one checkpoint each, some for each worker, or all in one (0 workers)."""
    seconds, groups = dict[str, float](), defaultdict[Any, list[PlannedCell]](list)
    for cell in wanted:
        if questions := known.questions_left(cell):
            tokens = questions * benchmark_of(cell.benchmark).answer_limit(scale.max_new_tokens)
            seconds[cell.id] = decoding_s(tokens, scale)
            groups[cell.line.trained, cell.line.draft, cell.line.dtype].append(cell)
    size = max(_LEAST_S, sum(seconds.values()) / (_PER_WORKER * workers)) if workers else math.inf
    numbers, tasks = Counter[TrainedStage](), list[AnswerTask]()
    for group in groups.values():
        begins = accumulate((seconds[cell.id] for cell in group), initial=0.0)
        pieces = groupby(zip(begins, group, strict=False), lambda begun: begun[0] // size)
        for some in (tuple(cell for _, cell in piece) for _, piece in pieces):
            stage = some[0].line.trained
            numbers[stage] += 1
            tasks.append(AnswerTask(
                name=f"answering-{stage.slug}-{numbers[stage]}",
                title=f"answering with {stage.title}, piece {numbers[stage]}",
                after=after(some[0].line.needs, trained), seconds=sum(seconds[cell.id] for cell in some),
                cells=some, of=len(seconds), numbers=tuple([*seconds].index(cell.id) + 1 for cell in some),
            ))  # fmt: skip
    return tasks
