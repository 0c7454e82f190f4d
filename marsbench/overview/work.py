"""The graph of work handed to an executor, and what comes back: rows, which are written here and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from marsbench.errors import UserError
from marsbench.executors.display import Display
from marsbench.executors.local import Local
from marsbench.executors.tasks import Executor, Task, Work
from marsbench.overview import PRELOAD
from marsbench.overview.graph import graph_of
from marsbench.presets import Preset
from marsbench.racing.sweep import Sweep
from marsbench.rows.kinds import Row
from marsbench.rows.store import RowStore
from marsbench.running.graph import AnsweringPiece, PagePiece, Piece, RacePiece, TrainingPiece
from marsbench.running.run import Run
from marsbench.running.tables import Table
from marsbench.running.work import Answer, FromRun, Made, RunWork, Train, settings_of
from marsbench.studies import study_of
from marsbench.studies.study import Study

_MOST = 4  # processes by default: each holds about a gibibyte


@dataclass(frozen=True)
class MakePage(RunWork):
    """Measures the rows of a page that are still missing."""

    piece: PagePiece

    def do(self, run: Run) -> Made:
        """All rows of the page."""
        return Made(page=tuple(study_of(self.piece.study).rows(run)))

    def failed(self, error: UserError) -> Made:
        """The page is not made."""
        return Made(error=error)


@dataclass(frozen=True)
class RunRace(RunWork):
    """Runs one race of a page."""

    piece: RacePiece
    quick: bool

    def do(self, run: Run) -> Made:
        """The rows of all contenders at one batch size."""
        grid = study_of(self.piece.study).grid
        assert grid is not None, "who races has a grid"
        return Made(page=tuple(Sweep(run, grid(run.scale, self.quick).at(self.piece.batch_size)).rows()))

    def failed(self, error: UserError) -> Made:
        """The page is not made."""
        return Made(error=error)


def carry_out(
    wanted: Sequence[Study], run: Run, executor: Executor, *, quick: bool = False, gpus: int = 1
) -> dict[str, list[Row] | UserError]:
    """Do all that some studies lack, and write its rows as they come.

    Args:
        wanted: the studies, none that refuses.
        run: whose rows they are.
        executor: who does it.
        quick: whether a study that races a grid races its quick one.
        gpus: how many GPUs each training gets.

    Returns:
        Key of each study -> all rows of its page, or why there are none.
    """
    pieces = graph_of(
        wanted, run.scale, FromRun(run), quick=quick, workers=executor.workers, seed=run.seed, gpus=gpus
    )  # fmt: skip
    settings, written = settings_of(run), set[str]()
    tasks = [_task(piece, settings, quick) for piece in pieces]
    made: dict[str, Made] = {}
    with closing(executor.run(tasks)) as running, Display(run.reporter, tasks, run.workspace.logs) as display:
        for ended in running:
            made[ended.name] = ended.value
            _write(ended.value.rows, run, written)
            if ended.error is None:
                RowStore(run.workspace.journal(ended.name)).remove()
            display.end(ended)
    return {study.key: _page(study, pieces, made) for study in wanted}


def _task(piece: Piece, settings: Mapping[str, Any], quick: bool) -> Task:
    """A piece of work as an executor takes it."""
    work: Work
    if isinstance(piece, TrainingPiece):
        work = Train(settings, piece)
    elif isinstance(piece, AnsweringPiece):
        work = Answer(settings, piece)
    elif isinstance(piece, RacePiece):
        work = RunRace(settings, piece, quick)
    else:
        assert isinstance(piece, PagePiece)
        work = MakePage(settings, piece)
    return Task(piece.name, piece.title, work, piece.after, piece.seconds, piece.gpus, piece.alone)


def _write(rows: Sequence[Row], run: Run, written: set[str]) -> None:
    """Write rows that are new: who was lost at the last moment, or shares a cell, hands them over again."""
    for row in rows:
        if row.key not in written and run.store.rows().get(row.key) != row:
            run.keep(row)
        written.add(row.key)


def _page(study: Study, pieces: Sequence[Piece], made: Mapping[str, Made]) -> list[Row] | UserError:
    """The rows of a page, from all that made some of them, or the first reason why there are none."""
    parts = [made[one.name] for one in pieces if isinstance(one, PagePiece | RacePiece) and one.study == study.key]
    for part in parts:
        if part.error is not None:
            return part.error
    # Each race names the trainings and the timed steps that all of them need.
    return list({row.key: row for part in parts for row in part.page}.values()) if study.grid else [*parts[0].page]


def refuses(study: Study, run: Run, *, quick: bool) -> bool:
    """Whether a study will say at once that it cannot be measured, so that nothing is trained for it in vain."""
    try:
        if study.grid is not None:
            Sweep(run, study.grid(run.scale, quick))
        return study.cells is not None and not Table(run, study.cells).can_ask
    except UserError:
        return True


def default_jobs(scale: Preset) -> int:
    """How many processes to work at a time: one per GPU, or one per core where the world's small models are asked."""
    if torch.cuda.is_available():
        return torch.cuda.device_count()
    return min(torch.get_num_threads(), _MOST) if scale.world else 1


def executor_of(run: Run, *, jobs: int | None = None, cluster: str | None = None) -> Executor | None:
    """Who carries out the work of a run; None where it is better off in this process alone.

    That is where one process is all, where a run answers one shard only, and where it makes again what is there: each
    process would make the same thing again.
    """
    if cluster is not None:
        return executor_at(run.workspace.logs, 1, cluster)
    jobs = jobs or default_jobs(run.scale)
    if jobs == 1 or not run.is_whole or run.existing != "reuse":
        return None
    return executor_at(run.workspace.logs, jobs)


def executor_at(logs: Path, jobs: int, cluster: str | None = None) -> Executor:
    """So many processes here, or a cluster."""
    if cluster is None:
        return Local(jobs, logs, gpus=torch.cuda.device_count(), preload=PRELOAD)
    from marsbench.executors.cluster import Cluster  # it imports Ray

    return Cluster(cluster, logs)
