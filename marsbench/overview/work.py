"""The work behind some studies as one list of tasks, and what comes back: rows, which are written here alone.

A plan, one shard, processes of this machine and a cluster all read that list.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from marsbench.errors import UserError
from marsbench.executors.display import Display
from marsbench.executors.local import Here
from marsbench.executors.tasks import Ended, Executor
from marsbench.overview import PRELOAD
from marsbench.presets import Preset
from marsbench.rows.kinds import Row
from marsbench.rows.store import RowStore
from marsbench.running.graph import Known, Made, RunTask, after, answers, cells_of, settings_of, trainings
from marsbench.studies import study_of
from marsbench.studies.study import Study

if TYPE_CHECKING:
    from marsbench.line import TrainedStage
    from marsbench.running.plans import Asked, TablePlan
    from marsbench.running.run import Run

_MOST = 4  # processes by default: each holds about a gibibyte
_SCORING_S = 5.0  # of putting the answers of a page together and scoring them


@dataclass(frozen=True, kw_only=True)
class PageTask(RunTask):
    """Makes rows of one page: one of its races, or whatever it measures itself beside the scores of its answers."""

    study: str
    batch_size: int | None = None  # of its race; None = all rows of a page that has none
    quick: bool = False

    def do(self, run: Run) -> Made:
        from marsbench.racing.sweep import Sweep

        study = study_of(self.study)
        if study.grid is None or self.batch_size is None:
            return Made(page=tuple(study.rows(run)))
        grid = study.grid(run.scale, self.quick).part(run.shard).at(self.batch_size)
        return Made(page=tuple(Sweep(run, grid).rows()))


def tasks_of(
    wanted: Sequence[Study], scale: Preset, known: Known, *,
    workers: int, quick: bool = False, gpus: int = 1, shard: tuple[int, int] = (1, 1),
) -> list[RunTask]:  # fmt: skip
    """All that some studies lack, each task behind those that it comes after.

    `shard` is (i, n) of all questions and contenders: only the whole is scored.
    """
    stages = [stage for study in wanted for stage in study.trains(scale, quick)]
    trained = trainings(stages, scale, known, gpus=gpus if scale.pretrained else 1)
    asked = cells_of([study.cells for study in wanted if study.cells], known)
    found: list[RunTask] = [*trained, *answers(asked, trained, scale, known, workers=workers, shard=shard)]
    pages = [study for study in wanted if study.grid is not None or shard == (1, 1)]
    return [*found, *[task for study in pages for task in _tasks_of_page(study, scale, known, found, quick)]]


def _tasks_of_page(study: Study, scale: Preset, known: Known, before: Sequence[RunTask], quick: bool) -> list[PageTask]:
    """What makes the rows of a page: one race per batch size, or all in one."""
    cells = cells_of([study.cells] if study.cells else [], known)
    first = after([*study.trains(scale, quick), *cells], before)
    common: dict[str, Any] = {"after": first, "study": study.key}
    if study.grid is None:
        timed = study.times(scale)
        title = f"timing and scoring {study.name}" if timed else f"scoring {study.name}"
        return [PageTask(name=study.key, title=title, seconds=_SCORING_S, alone=timed, **common)]
    grid = study.grid(scale, quick)
    return [
        PageTask(
            name=f"{study.key}-batch{size}", title=f"racing {study.name}, {size} at once", alone=True,
            seconds=grid.at(size).seconds(scale), batch_size=size, quick=quick, **common,
        )
        for size in grid.batch_sizes
    ]  # fmt: skip


class FromRun(Known):
    """What a run finds on disk."""

    def __init__(self, run: Run) -> None:
        from marsbench.running.cells import Cells
        from marsbench.running.checkpoints import Checkpoints

        super().__init__(run.scale)
        self._run, self._cells, self._checkpoints = run, Cells(run), Checkpoints(run)

    def is_trained(self, trained: TrainedStage) -> bool:
        """Whether it may be taken as it is."""
        return self._run.existing == "reuse" and self._checkpoints.record(trained) is not None

    def asked(self, plan: TablePlan) -> list[str]:
        return self._run.asked(plan)

    def questions_left(self, asked: Asked) -> int:
        """See `Known`; none where it cannot be asked, as its page will say."""
        try:
            if self._checkpoints.missing(asked.line.trained) or self._cells.known(asked):
                return 0
            return len(self._run.exam(asked.benchmark, asked.questions).asked())
        except UserError:
            return 0


def carry_out(
    wanted: Sequence[Study], run: Run, executor: Executor, *, quick: bool = False, gpus: int = 1
) -> dict[str, list[Row] | UserError]:
    """Do all that some studies lack, and write its rows as they come.

    Returns:
        Key of each study -> all rows of its page, or why there are none. A shard scores no answers.
    """
    refused = {study.key: said for study in wanted if (said := _refusal(study, run, quick)) is not None}
    wanted = [study for study in wanted if study.key not in refused]
    if not wanted:
        return refused
    alone = isinstance(executor, Here)  # and says itself what it does
    how: dict[str, Any] = {"workers": 0 if alone else executor.workers, "quick": quick, "gpus": gpus}
    planned, settings = tasks_of(wanted, run.scale, FromRun(run), **how, shard=run.shard), settings_of(run)
    tasks = [replace(task, settings=settings) for task in planned]
    of_pages = [task for task in tasks if isinstance(task, PageTask)]
    written, made = set[str](), dict[str, Ended]()
    display = nullcontext() if alone else Display(run.reporter, tasks, run.workspace.logs)
    with closing(executor.run(tasks)) as running, display as shown:
        for ended in running:
            made[ended.name] = ended
            for row in ended.value.rows:  # who was lost at the last moment, or shares a cell, hands them over again
                if row.key not in written and run.store.rows().get(row.key) != row:
                    run.keep(row)
                written.add(row.key)
            if ended.error is None:
                RowStore(run.workspace.journal(ended.name)).remove()
            if ended.error is not None and run.existing == "fail":
                raise ended.error
            if shown is not None:
                shown.end(ended)
            elif ended.error is not None and ended.name not in {page.name for page in of_pages}:
                run.reporter.say(escape(str(ended.error)))
    pages = {study.key: _page([made[task.name] for task in of_pages if task.study == study.key]) for study in wanted}
    return refused | pages


def _page(parts: Sequence[Ended]) -> list[Row] | UserError:
    """The rows of a page, from all that made some of them, or the first reason why there are none."""
    if error := next((part.error for part in parts if part.error is not None), None):
        return error
    rows = [row for part in parts for row in part.value.page]
    # Each race names the trainings and the timed steps that all of them need.
    return rows if len(parts) == 1 else list({row.key: row for row in rows}.values())


def _refusal(study: Study, run: Run, quick: bool) -> list[Row] | UserError | None:
    """What a study that cannot be measured says at once, so that nothing is trained for it in vain; else None."""
    from marsbench.racing.sweep import Sweep
    from marsbench.running.cells import Table

    try:
        if study.grid is not None:
            Sweep(run, study.grid(run.scale, quick))
        return study.rows(run) if study.cells is not None and not Table(run, study.cells).can_ask else None
    except UserError as error:
        return error


def default_jobs(scale: Preset) -> int:
    """How many processes to work at a time: one per GPU, or one per core where the world's small models are asked."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.device_count()
    return min(torch.get_num_threads(), _MOST) if scale.world else 1


def executor_of(run: Run, *, jobs: int | None = None, cluster: str | None = None) -> Executor:
    """Who carries out the work of a run: this process where it makes again what is there, as each would."""
    jobs = jobs or default_jobs(run.scale)
    alone = cluster is None and (jobs == 1 or run.existing != "reuse")
    return Here(run.workspace.logs, run.reporter) if alone else executor_at(run.workspace.logs, jobs, cluster)


def executor_at(logs: Path, jobs: int, cluster: str | None = None) -> Executor:
    """So many processes here, or a cluster."""
    if cluster is None:
        import torch

        from marsbench.executors.local import Local

        return Local(jobs, logs, gpus=torch.cuda.device_count(), preload=PRELOAD)
    from marsbench.executors.cluster import Cluster  # it imports Ray

    return Cluster(cluster, logs)
