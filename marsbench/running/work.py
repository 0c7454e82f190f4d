"""The pieces of a run as work for any process: what each makes, and what it hands over to whoever writes rows."""

from __future__ import annotations

import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from marsbench.errors import UserError
from marsbench.progress import Reporter
from marsbench.quiet import quieten_libraries
from marsbench.rows.kinds import Row
from marsbench.rows.store import BorrowedStore, RowStore
from marsbench.rows.workspace import full_disk_explained
from marsbench.running.cells import Cells
from marsbench.running.checkpoints import Checkpoints
from marsbench.running.graph import AnsweringPiece, Piece, TrainingPiece
from marsbench.running.plans import Asked, TablePlan, TrainedStage
from marsbench.running.run import Run, explained
from marsbench.running.train_on_many import is_launched, train_on_many
from marsbench.training.checkpoints import Loaded

_PATIENCE_S = 90.0  # how long a network file system may hide from one machine what another has written
_OWN = ("reporter", "borrowed", "failures")  # of every process


@dataclass(frozen=True)
class Made:
    """What a piece of work hands over."""

    rows: tuple[Row, ...] = ()  # measured now, for the store
    failures: Mapping[str, str] = field(default_factory=dict)  # what it could not make -> why (`Run.failures`)
    page: tuple[Row, ...] = ()  # all rows of a page, or of one of its races
    trained: TrainedStage | None = None  # the checkpoint that is there now
    error: UserError | None = None  # why there is nothing


def settings_of(run: Run) -> dict[str, Any]:
    """What another process needs to know of a run, wherever it works."""
    settings = {one.name: getattr(run, one.name) for one in fields(run) if one.name not in _OWN}
    data_dir = run.data_dir.resolve() if run.data_dir else None
    return {**settings, "workspace": replace(run.workspace, root=run.workspace.root.resolve()), "data_dir": data_dir}


@dataclass(frozen=True)
class RunWork(ABC):
    """A piece of a run's work; its classes say what is done."""

    settings: Mapping[str, Any]
    piece: Piece

    def __call__(self, made: Sequence[Made | None], reporter: Reporter) -> Made:
        """Do it with a run of this process's own, which knows what the pieces before have made."""
        quieten_libraries()
        found = [one for one in made if one is not None]
        rows = [row for one in found for row in one.rows]
        failures = {place: why for one in found for place, why in one.failures.items()}
        workspace = self.settings["workspace"]
        store = BorrowedStore(workspace.row_file, rows, journal=RowStore(workspace.journal(self.piece.name)))
        run = Run(**self.settings, reporter=reporter, borrowed=store, failures=failures)
        with full_disk_explained(run.workspace.runs):
            _await_visible([one.trained for one in found if one.trained], run)
            done = self.do(run)
        return replace(done, rows=tuple(store.added.values()))

    @abstractmethod
    def do(self, run: Run) -> Made:
        """Do it; rows that are kept are handed over."""

    @abstractmethod
    def failed(self, error: UserError) -> Made:
        """What others hear of it where it has failed."""


@dataclass(frozen=True)
class Train(RunWork):
    """Trains a checkpoint."""

    piece: TrainingPiece

    def do(self, run: Run) -> Made:
        """Train it now, unless the one that it starts from is missing."""
        if run.failures:
            raise UserError("; ".join(dict.fromkeys(run.failures.values())), fix="mend that first")
        processes = min(self.piece.gpus, torch.cuda.device_count())
        if processes > 1 and not is_launched() and not FromRun(run).is_trained(self.piece.trained):
            train_on_many(self, processes, run.workspace.logs)
        Checkpoints(run).path(*self.piece.trained)
        return Made(trained=self.piece.trained)

    def failed(self, error: UserError) -> Made:
        """Nothing that needs the checkpoint can be measured."""
        return Made(failures={self.piece.trained.place: f"{self.piece.title} failed: {_told(error)}"}, error=error)


@dataclass(frozen=True)
class Answer(RunWork):
    """Answers cells of one checkpoint, or a part of the questions of one."""

    piece: AnsweringPiece

    def do(self, run: Run) -> Made:
        """Answer cell by cell; one that fails does not keep the others from being answered."""
        part, checkpoints = replace(run, shard=self.piece.shard), Checkpoints(run)
        first = self.piece.cells[0].arm
        reason, loaded = checkpoints.available(first.trained)
        draft = None
        if not reason and first.draft is not None:
            reason, draft = checkpoints.available(first.draft)
        if reason or loaded is None:  # the page says so
            return Made()
        failures = {}
        for asked in self.piece.cells:
            if why := _why_not(part, asked, loaded, draft):
                failures[asked.place] = why
        return Made(failures=failures)

    def failed(self, error: UserError) -> Made:
        """None of its cells can be measured."""
        return Made(failures=dict.fromkeys((asked.place for asked in self.piece.cells), _told(error)), error=error)


def _why_not(run: Run, asked: Asked, loaded: Loaded, draft: Loaded | None) -> str:
    """Answer a cell; returns why that was not possible, empty where it was."""
    try:
        Cells(run).cell(asked.arm, loaded, asked.benchmark, draft, questions=asked.questions)
    except UserError as error:
        run.reporter.say(str(error))
        return _told(error)
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        return f"{type(error).__name__}: {str(error).strip()}"
    return ""


def _await_visible(wanted: Iterable[TrainedStage], run: Run) -> None:
    """Wait until this machine sees checkpoints that others have trained: a network file system takes a while.

    Raises:
        UserError: they do not come; better than to train them a second time.
    """
    checkpoints, patience = Checkpoints(run), time.monotonic() + _PATIENCE_S
    for one in wanted:
        folder = run.workspace.checkpoint(checkpoints.recipe(*one))
        while checkpoints.record(one) is None:
            if time.monotonic() > patience:
                raise UserError(
                    f"the checkpoint of {one.title} is not to be seen from here",
                    where=str(folder),
                    fix="check that all machines share the output folder, and see the log of its training",
                )
            if folder.parent.exists():
                list(folder.parent.iterdir())  # has a network file system look again
            time.sleep(1.0)


def _told(error: UserError) -> str:
    """An error as a reason in a cell."""
    return explained(error) if error.fix else error.what


class FromRun:
    """What a run finds on disk."""

    def __init__(self, run: Run) -> None:
        self._run, self._cells, self._checkpoints = run, Cells(run), Checkpoints(run)

    def is_trained(self, trained: TrainedStage) -> bool:
        """Whether a checkpoint of our own is there."""
        return self._checkpoints.record(trained) is not None

    def asked(self, plan: TablePlan) -> list[str]:
        """The benchmarks that a table asks in this run."""
        return self._run.asked(plan)

    def questions_left(self, asked: Asked) -> int:
        """How many questions of a cell have no answers yet; none where it cannot be asked, as its page will say."""
        try:
            if self._checkpoints.missing(*asked.arm.trained) or self._cells.is_measured(*asked):
                return 0
            return len(self._run.exam(asked.benchmark, asked.questions).asked())
        except UserError:
            return 0
