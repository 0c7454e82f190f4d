"""Training several stages, or answering with several checkpoints, at a time: each in a process of its own on one core.

Small models leave the other cores idle.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import Any, Protocol, TypeVar

import torch

from marsbench.errors import UserError
from marsbench.rows.workspace import full_disk_explained
from marsbench.running.cells import Cells
from marsbench.running.checkpoints import Checkpoints
from marsbench.running.plans import Arm, TablePlan, TrainedStage
from marsbench.running.run import Run
from marsbench.running.tables import Table
from marsbench.training.stages import lineage, stage

_POLL_S = 0.2
_SHOWN = 500  # characters of what a failed process has said
_MOST = 4  # a process holds about a gibibyte
_WORTH_A_PROCESS = 1500  # questions; fewer are answered in the time that a process takes to start


class Process(Protocol):
    """What is started."""

    def poll(self) -> int | None:
        """The exit status, None while it runs."""
        ...

    def terminate(self) -> None:
        """Ask it to end."""
        ...


_Name = TypeVar("_Name", bound=Hashable)


def default_jobs() -> int:
    """How many processes to run at a time: one per core, but one in all on a GPU."""
    return 1 if torch.cuda.is_available() else min(torch.get_num_threads(), _MOST)


def train_side_by_side(run: Run, wanted: Iterable[TrainedStage], jobs: int) -> None:
    """Train what is missing of some stages, and of those that they start from, so many at a time.

    Only the world's models are trained in this way, and only what is missing. The others, and all of it where `jobs` is
    1 or each stage starts from the one before, are left to whoever asks for a checkpoint, with all cores.

    Raises:
        UserError: a training has failed; the others are ended, and go on where they stopped the next time.
    """
    missing = _untrained(run, wanted) if _may_share(run, jobs) else {}
    if _in_a_row(missing):
        return
    _side_by_side(run, "training", missing, lambda one: partial(_train, trained=one), jobs)


def answer_side_by_side(run: Run, plans: Iterable[TablePlan], jobs: int) -> None:
    """Answer what some tables lack: the lines of a checkpoint in one process, so many checkpoints at a time.

    Only with the world's models, and only what is missing; the rest is left to whoever asks for a table's rows.

    Raises:
        UserError: a process has failed; the others are ended, and what they have answered is kept.
    """
    missing = _unanswered(run, plans) if _may_share(run, jobs) else {}
    if len(missing) < 2:
        return
    alone = dict.fromkeys(missing)
    _side_by_side(run, "answering with", alone, lambda one: partial(_answer, plans=missing[one]), jobs)


def _may_share(run: Run, jobs: int) -> bool:
    """Whether a run's work may be spread over processes: not where each would make the same thing again."""
    return jobs > 1 and run.scale.world is not None and run.existing == "reuse" and run.is_whole


def _side_by_side(
    run: Run,
    doing: str,
    parents: Mapping[TrainedStage, TrainedStage | None],
    work: Callable[[TrainedStage], Callable[[Run], None]],
    jobs: int,
) -> None:
    """Do a piece of work per checkpoint, a parent's first, so many at a time, and say how far it is."""

    def start(one: TrainedStage) -> _Worker:
        log = run.workspace.log(doing.partition(" ")[0], *one)
        return _Worker(run, work(one), f"{doing} {_title(one)}", log)

    with run.reporter.bar(f"{doing} {len(parents)} checkpoints, {jobs} at a time, one core each") as bar:
        for done, one in enumerate(in_order(parents, start, jobs), 1):
            run.reporter.say(f"done: {doing} {_title(one)}")
            bar.update(done, len(parents))


def in_order(parents: Mapping[_Name, _Name | None], start: Callable[[_Name], Process], jobs: int) -> Iterator[_Name]:
    """Start everything, nothing before its parent is done and no more than `jobs` at a time; yields what is done.

    Args:
        parents: what to start -> what must be done before; a parent that is not to be started is done already.
        start: starts one.
        jobs: how many may run at a time.
    """
    waiting, running = list(parents), dict[_Name, Process]()
    try:
        while waiting or running:
            free = [one for one in waiting if parents[one] not in {*waiting, *running}]
            for one in free[: jobs - len(running)]:
                waiting.remove(one)
                running[one] = start(one)
            ended = [one for one, process in running.items() if process.poll() is not None]
            for one in ended:
                del running[one]
            yield from ended
            if not ended:
                time.sleep(_POLL_S)
    finally:
        for process in running.values():
            process.terminate()


def _untrained(run: Run, wanted: Iterable[TrainedStage]) -> dict[TrainedStage, TrainedStage | None]:
    """The stages to train, the long ones first, lest one is left over at the end -> what each starts from."""
    checkpoints, found = Checkpoints(run), dict[TrainedStage, TrainedStage | None]()
    for trained in wanted:
        parent = None
        for name in lineage(run.scale, trained.stage) if checkpoints.trains(*trained) else ():
            one = TrainedStage.of(name, trained.block_size)
            if checkpoints.record(one) is None:
                found[one] = parent
            parent = one
    return dict(sorted(found.items(), key=lambda item: -stage(item[0].stage).passes))


def _in_a_row(parents: Mapping[_Name, _Name | None]) -> bool:
    """Whether each has to wait for another, so that no two can run at the same time."""
    awaited = [parent if parent in parents else None for parent in parents.values()]
    return len(set(awaited)) == len(awaited)


def _unanswered(run: Run, plans: Iterable[TablePlan]) -> dict[TrainedStage, list[TablePlan]]:
    """Checkpoint -> tables, cut down to those of its lines that lack answers; where that is worth a process."""
    tables, questions = defaultdict(list), Counter[TrainedStage]()
    for plan in plans:
        lines = defaultdict(list)
        for arm in plan.arms:
            if count := _questions_left(run, plan, arm):
                lines[arm.trained].append(arm)
                questions[arm.trained] += count
        for trained, arms in lines.items():
            tables[trained].append(replace(plan, arms=tuple(arms), step_cost=False))
    return {trained: tables[trained] for trained, count in questions.most_common() if count >= _WORTH_A_PROCESS}


def _questions_left(run: Run, plan: TablePlan, arm: Arm) -> int:
    """How many questions a line has yet to answer."""
    try:
        left = [name for name in run.asked(plan) if not Cells(run).is_measured(arm, name, plan.questions)]
        return sum(len(run.exam(name, plan.questions).asked()) for name in left)
    except UserError:  # the table will say why
        return 0


class _Worker:
    """A piece of a run's work in a process of its own, on one core; what it says goes to a file below `runs/`."""

    def __init__(self, run: Run, work: Callable[[Run], None], title: str, log: Path) -> None:
        self._title, self._log = title, log
        log.parent.mkdir(parents=True, exist_ok=True)
        settings = {field.name: getattr(run, field.name) for field in fields(run) if field.name != "reporter"}
        self._process = get_context("spawn").Process(target=_run, args=(work, settings, log))
        self._process.start()

    def poll(self) -> int | None:
        """The exit status, None while it runs; `UserError`, with what it said last, if it has failed."""
        status = self._process.exitcode
        if status:
            said = self._log.read_text(encoding="utf-8").strip() or f"exit status {status}"
            raise UserError(
                f"{self._title} failed: {said[-_SHOWN:]}",
                where=str(self._log),
                fix="mend that; the same command then goes on where it stopped",
            )
        return status

    def terminate(self) -> None:
        """Ask it to end; what it has made is on disk."""
        self._process.terminate()


def _run(work: Callable[[Run], None], settings: Mapping[str, Any], log: Path) -> None:
    """What such a process does."""
    torch.set_num_threads(1)
    Thread(target=_end_with_parent, daemon=True).start()
    sys.stderr = log.open("w", encoding="utf-8", buffering=1)
    try:
        run = Run(**settings)
        with full_disk_explained(run.workspace.runs):
            work(run)
    except UserError as error:
        sys.exit(str(error))


def _end_with_parent() -> None:
    """End when the run does that started this process, killed or not: the next run would do the same work beside it."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _train(run: Run, trained: TrainedStage) -> None:
    Checkpoints(run).path(*trained)


def _answer(run: Run, plans: Sequence[TablePlan]) -> None:
    for plan in plans:
        Table(run, plan).rows()


def _title(trained: TrainedStage) -> str:
    return trained.stage if trained.block_size is None else f"{trained.stage}, B = {trained.block_size}"
