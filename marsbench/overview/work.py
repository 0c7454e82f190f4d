"""The work behind some studies as one list of tasks, for a plan and every executor, and the rows that come of it."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marsbench.errors import UserError
from marsbench.executors.tasks import Ended, Executor, Here, Local, Task, log_of
from marsbench.overview import PRELOAD
from marsbench.presets import Preset
from marsbench.progress import roughly
from marsbench.rows.kinds import EvaluationRow, Row, Status
from marsbench.running.graph import Known, Made, RunTask, after, answers, cells_of, settings_of, trainings
from marsbench.studies import study_of
from marsbench.studies.study import Study

if TYPE_CHECKING:
    from marsbench.line import TrainedStage
    from marsbench.running.plans import PlannedCell, TablePlan
    from marsbench.running.run import Run

_MOST = 4  # processes by default: each holds about a gibibyte


@dataclass(frozen=True, kw_only=True)
class PageTask(RunTask):
    """Makes what a page has beside answers: one of its races, or whatever it measures itself."""

    study: str
    batch_size: int | None = None  # of its race; None = all that a page without a grid measures
    quick: bool = False

    def do(self, run: Run) -> Made:
        from marsbench.racing.sweep import Sweep

        study = study_of(self.study)
        grids = [grid for grid in study.races(run.scale) if run.computes_in(grid.dtype)] if study.races else []
        if study.grid is not None and self.batch_size is not None:
            grids = [study.grid(run.scale, self.quick).part(*run.shard).at(self.batch_size)]
        raced = [row for grid in grids for row in Sweep(run, grid).rows()]
        return Made(rows=(*raced, *(study.measure(run) if study.measure else ())))


def tasks_of(
    wanted: Sequence[Study], scale: Preset, known: Known, *, workers: int, quick: bool = False
) -> list[RunTask]:
    """All that some studies lack, each task behind those that it comes after."""
    to_train = trainings([stage for study in wanted for stage in study.trains(scale, quick)], scale, known)
    cells = {cell.id: cell for study in wanted for cell in _cells(study, known)}
    tasks: list[RunTask] = [*to_train, *answers(cells.values(), to_train, scale, known, workers=workers)]
    return [*tasks, *[task for study in wanted for task in _tasks_of_page(study, scale, known, tasks, quick)]]


def _cells(study: Study, known: Known) -> list[PlannedCell]:
    return cells_of(study.plans, known, trained_before=study.trained_before)


def _tasks_of_page(study: Study, scale: Preset, known: Known, before: Sequence[RunTask], quick: bool) -> list[PageTask]:
    """What measures what a page has beside answers: one race per batch size, or all in one."""
    first = after([*study.trains(scale, quick), *_cells(study, known)], before)
    common: dict[str, Any] = {"after": first, "study": study.key}
    if study.grid is None:
        timed = study.timed or study.races is not None
        title = f"{'timing' if timed else 'measuring'} {study.name}"
        task = PageTask(name=study.key, title=title, seconds=5.0, alone=timed, **common)
        return [task] if (study.measure or study.races) and (scale.world or not study.in_world) else []
    grid = study.grid(scale, quick)
    return [
        PageTask(
            name=f"{study.key}-batch{size}", title=f"racing {study.name}, {size} at once", alone=True,
            seconds=grid.at(size).seconds(scale), batch_size=size, quick=quick, **common,
        )
        for size in grid.batch_sizes
    ]  # fmt: skip


class RunState(Known):
    """What a run has, what its tasks have made, and the rows of pages that come of both."""

    def __init__(self, run: Run) -> None:
        from marsbench.running.cells import CellRunner
        from marsbench.running.checkpoints import Checkpoints

        super().__init__(run.scale)
        # Id of a cell -> its row; of what could not be made, or measured here -> why. `run` has the same `_failures`.
        self._answers, self._failures, self._missing = dict[str, EvaluationRow](), dict[str, str](), dict[str, str]()
        self.run, self.gpus_per_training = replace(run, failures=self._failures), run.gpus_per_training
        self._cells, self._checkpoints = CellRunner(self.run), Checkpoints(self.run)

    def is_trained(self, trained: TrainedStage) -> bool:
        return self._checkpoints.record(trained) is not None

    def benchmarks_of(self, plan: TablePlan) -> list[str]:
        return self.run.benchmarks_of(plan)

    def computes_in(self, dtype: str) -> bool:
        return self.run.computes_in(dtype)

    def questions_left(self, cell: PlannedCell) -> int:
        """See `Known`; none where it cannot be asked, as its page will say."""
        if self._checkpoints.missing(cell.line.trained) or self.run.cannot_ask(cell.benchmark, cell.questions):
            return 0
        if (row := self._cells.known(cell)) is None:
            return len(self.run.exam(cell.benchmark, cell.questions).question_numbers())
        self._answers[cell.id] = row
        return 0

    def hear(self, made: Made) -> None:
        self._answers |= made.answers
        self._failures |= made.failures
        self._missing |= made.missing

    def rows_of(self, study: Study, parts: Sequence[Ended]) -> list[Row] | UserError:
        """The rows of a page: trainings, what it measures itself, answers; or the first reason why there are none."""
        if error := next((part.error for part in parts if part.error is not None), None):
            return error
        rows: list[Row] = [row for part in parts for row in part.value.rows]
        if study.plans:
            trained = self._checkpoints.rows(study.shows(self.run.scale))
            rows = [*trained, *rows, *map(self._answer, _cells(study, self))]
        return list({row.key: row for row in rows}.values())  # races name the trainings that all of them need

    def _answer(self, cell: PlannedCell) -> Row:
        """A cell, as its page's line, or a row that says why there is none."""
        if (row := self._answers.get(cell.id)) is not None:
            return replace(row, arm=cell.line.name)
        line, ids = cell.line, [*[stage.id for stage in cell.line.needs], cell.id]
        failure = next(filter(None, map(self._failures.get, ids)), "")
        reason = failure or self._missing.get(cell.id) or self.run.cannot_ask(cell.benchmark, cell.questions)
        reason = reason or next(filter(None, map(self._checkpoints.missing, line.needs)), "it was not answered")
        status: Status = "failed" if failure else "skipped"
        self.run.reporter.say(f"{line.label}, {cell.benchmark}: {status} ({reason})")
        return self._cells.without(cell, reason, status)


def carry_out(
    wanted: Sequence[Study], run: Run, executor: Executor, *, quick: bool = False
) -> dict[str, list[Row] | UserError]:
    """Do all that some studies lack: key of each -> all rows of its page, or why there are none."""
    known = RunState(run)
    refused = {study.key: said for study in wanted if (said := _refusal(study, known.run, quick)) is not None}
    wanted = [study for study in wanted if study.key not in refused]
    if not wanted:
        return refused
    in_process = isinstance(executor, Here)  # this one, which reports its own progress
    how: dict[str, Any] = {"workers": 0 if in_process else executor.workers, "quick": quick}
    planned, settings = tasks_of(wanted, run.scale, known, **how), settings_of(run)
    if not run.is_whole:  # what a page measures besides its races needs whole answers
        planned = [task for task in planned if not isinstance(task, PageTask) or task.batch_size]
    tasks = [replace(task, settings=settings) for task in planned]
    of_pages = {task.name: task for task in tasks if isinstance(task, PageTask)}
    made = dict[str, Ended]()
    with closing(executor.run(tasks) if in_process else shown(executor, tasks, run)) as running:
        for ended in running:
            made[ended.name] = ended
            known.hear(ended.value)
            if in_process and ended.error is not None and ended.name not in of_pages:
                run.reporter.say(str(ended.error))
    parts = {study.key: [made[name] for name, task in of_pages.items() if task.study == study.key] for study in wanted}
    return refused | {study.key: known.rows_of(study, parts[study.key]) for study in wanted}


def shown(executor: Executor, tasks: Sequence[RunTask], run: Run) -> Generator[Ended, None, None]:
    """The ends of tasks as they come: how far all of it is, what runs and how far that is, and which have failed."""
    known, seconds, whole = {task.name: task for task in tasks}, 0.0, sum(task.seconds for task in tasks)
    done, logs = 0, run.workspace.logs

    def look(running: Sequence[Task]) -> None:
        said = [f"{done} pieces done", *[_last_said(task, logs) for task in running[:1]]]  # of the oldest
        bar.update(round(seconds), round(whole), "; ".join(said))

    with (
        run.reporter.bar(f"{len(tasks)} pieces of work, by their seconds") as bar,
        closing(executor.run(tasks, look)) as endings,
    ):
        look([])
        for ended in endings:
            task, where = known[ended.name], f" on {ended.node}" if ended.node else ""
            end = f", {roughly(ended.seconds)}"
            if ended.error is not None:
                end = f": {ended.error.what} (see {log_of(logs, task.name)})"
            run.reporter.say(f"{'failed' if ended.error else 'done'}: {task.title}{where}{end}")
            seconds += task.seconds  # as estimated: the bar says by them how long the rest may take
            done += 1
            yield ended


def _last_said(task: Task, logs: Path) -> str:
    """How far a task is: the last whole line of its log."""
    log = log_of(logs, task.name)
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")[:-1] if log.exists() else []
    return lines[-1].strip() if lines else task.title


def _refusal(study: Study, run: Run, quick: bool) -> list[Row] | UserError | None:
    """What a study that cannot be measured says at once, so that nothing is trained for it in vain; else None."""
    from marsbench.racing.sweep import Sweep
    from marsbench.running.cells import CellRunner

    try:
        if study.grid is not None:
            Sweep(run, study.grid(run.scale, quick))
        cells = [cell for plan in study.plans for cell in plan.cells(run.benchmarks_of(plan))]
    except UserError as error:
        return error
    refused = [(cell, reason) for cell in cells if (reason := run.cannot_ask(cell.benchmark, cell.questions))]
    if not refused or len(refused) < len(cells):
        return None
    for cell, reason in refused:
        run.reporter.say_once(f"{cell.benchmark}: skipped ({reason})")
    return [CellRunner(run).without(cell, reason) for cell, reason in refused]


def executor_of(run: Run, *, jobs: int | None = None, cluster: str | None = None) -> Executor:
    """A cluster, or so many processes here: by default one per GPU, or per core for the world's small models."""
    import torch

    if cluster is not None:
        from marsbench.executors.cluster import Cluster  # it imports Ray

        return Cluster(cluster, run.workspace.logs)
    gpus = torch.cuda.device_count()
    jobs = jobs or gpus or (min(torch.get_num_threads(), _MOST) if run.scale.world else 1)
    if jobs == 1:
        return Here(run.workspace.logs, run.reporter)
    return Local(jobs, run.workspace.logs, gpus=gpus, preload=PRELOAD)
