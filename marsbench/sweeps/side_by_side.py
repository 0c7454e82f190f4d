"""Training several stages, or answering with several checkpoints, at a time: each in a process of its own on one core.

Small models leave the other cores idle.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from marsbench.errors import UserError
from marsbench.evaluation.local_data import Unavailable
from marsbench.sweeps.plans import Arm, TablePlan, TrainedStage
from marsbench.sweeps.runner import Runner
from marsbench.training.stages import lineage, stage

_POLL_S = 0.2
_SHOWN = 500  # characters of what a failed process has said
_MOST = 4  # a process holds about a gibibyte
_WORTH_A_PROCESS = 1500  # questions; fewer are answered in the time that a process takes to start


class Process(Protocol):
    """What is started, in the way of `subprocess.Popen`."""

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


def train_side_by_side(runner: Runner, wanted: Iterable[TrainedStage], jobs: int) -> None:
    """Train what is missing of some stages, and of those that they start from, so many at a time.

    Only the world's models are trained in this way, and only what is missing. The others, and all of it where `jobs` is
    1, are left to whoever asks for a checkpoint.

    Raises:
        UserError: a training has failed; the others are ended, and go on where they stopped the next time.
    """
    missing = _untrained(runner, wanted) if _may_share(runner, jobs) else {}
    if len(missing) < 2:
        return
    with runner.reporter.bar(f"training {len(missing)} checkpoints, {jobs} at a time, one core each") as bar:
        for done, trained in enumerate(in_order(missing, lambda one: _Training(runner, one), jobs), 1):
            runner.reporter.say(f"trained {_title(trained)}")
            bar.update(done, len(missing))


def answer_side_by_side(runner: Runner, plans: Iterable[TablePlan], jobs: int) -> None:
    """Answer what some tables lack: the lines of a checkpoint in one process, so many checkpoints at a time.

    Only with the world's models, and only what is missing; the rest is left to whoever asks for a table's rows.

    Raises:
        UserError: a process has failed; the others are ended, and what they have answered is kept.
    """
    missing = _unanswered(runner, plans) if _may_share(runner, jobs) else {}
    if len(missing) < 2:
        return
    alone = dict.fromkeys(missing)
    with runner.reporter.bar(f"answering with {len(missing)} checkpoints, {jobs} at a time, one core each") as bar:
        for done, trained in enumerate(in_order(alone, lambda one: _Answering(runner, one, missing[one]), jobs), 1):
            runner.reporter.say(f"answered with {_title(trained)}")
            bar.update(done, len(missing))


def _may_share(runner: Runner, jobs: int) -> bool:
    """Whether a run's work may be spread over processes: not where each would make the same thing again."""
    return jobs > 1 and runner.scale.world is not None and runner.existing == "reuse" and runner.shard == (1, 1)


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


def _untrained(runner: Runner, wanted: Iterable[TrainedStage]) -> dict[TrainedStage, TrainedStage | None]:
    """The stages to train, the long ones first, lest one is left over at the end -> what each starts from."""
    found: dict[TrainedStage, TrainedStage | None] = {}
    for trained in wanted:
        parent = None
        for name in lineage(runner.scale, trained.stage) if runner.trains(*trained) else ():
            one = TrainedStage.of(name, trained.block_size)
            if not runner.is_trained(one):
                found[one] = parent
            parent = one
    return dict(sorted(found.items(), key=lambda item: -stage(item[0].stage).passes))


def _unanswered(runner: Runner, plans: Iterable[TablePlan]) -> dict[TrainedStage, list[TablePlan]]:
    """Checkpoint -> tables, cut down to those of its lines that lack answers; where that is worth a process."""
    tables, questions = defaultdict(list), Counter[TrainedStage]()
    for plan in plans:
        lines = defaultdict(list)
        for arm in plan.arms:
            if count := _questions_left(runner, plan, arm):
                lines[arm.trained].append(arm)
                questions[arm.trained] += count
        for trained, arms in lines.items():
            tables[trained].append(replace(plan, arms=tuple(arms), step_cost=False))
    return {trained: tables[trained] for trained, count in questions.most_common() if count >= _WORTH_A_PROCESS}


def _questions_left(runner: Runner, plan: TablePlan, arm: Arm) -> int:
    """How many questions a line has yet to answer."""
    names = plan.of(runner.benchmarks or runner.scale.benchmarks)
    try:
        left = [name for name in names if not runner.is_measured(arm, name, plan.questions)]
        return sum(len(runner.exam(name, plan.questions).asked()) for name in left)
    except Unavailable:  # the table will say why
        return 0


class _Training:
    """`marsbench train` in a process of its own; what it says goes to a file below `runs/`."""

    def __init__(self, runner: Runner, trained: TrainedStage) -> None:
        blocks = [] if trained.block_size is None else ["--block-size", str(trained.block_size)]
        options = {"--scale": runner.scale.scale, "--seed": runner.seed, "--output": runner.workspace.root}
        command = [trained.stage, *blocks, *[str(part) for option in options.items() for part in option]]
        self._title, self._log = f"training {_title(trained)}", runner.workspace.log("training", *trained)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "marsbench", "train", *command],
                stdout=subprocess.DEVNULL,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def poll(self) -> int | None:
        """The exit status; `UserError` if it has failed."""
        return _checked(self._process.poll(), self._title, self._log)

    def terminate(self) -> None:
        """Ask it to end; its states are on disk."""
        self._process.terminate()


class _Answering:
    """The lines of some tables on one checkpoint, in a process of their own that says what it does to such a file."""

    def __init__(self, runner: Runner, trained: TrainedStage, plans: Sequence[TablePlan]) -> None:
        self._title, self._log = f"answering with {_title(trained)}", runner.workspace.log("answering", *trained)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        settings = {field.name: getattr(runner, field.name) for field in fields(runner) if field.name != "reporter"}
        self._process = get_context("spawn").Process(target=_answer, args=(settings, plans, self._log))
        self._process.start()

    def poll(self) -> int | None:
        """The exit status; `UserError` if it has failed."""
        return _checked(self._process.exitcode, self._title, self._log)

    def terminate(self) -> None:
        """Ask it to end; its rows and answers are on disk."""
        self._process.terminate()


def _answer(settings: Mapping[str, Any], plans: Sequence[TablePlan], log: Path) -> None:
    """What such a process does."""
    torch.set_num_threads(1)
    sys.stderr = log.open("w", encoding="utf-8", buffering=1)
    try:
        runner = Runner(**settings)
        for plan in plans:
            runner.table(plan)
    except UserError as error:
        sys.exit(str(error))


def _checked(status: int | None, title: str, log: Path) -> int | None:
    """The exit status of a process; `UserError`, with what it said last, if it has failed."""
    if status:
        said = log.read_text(encoding="utf-8").strip() or f"exit status {status}"
        raise UserError(
            f"{title} failed: {said[-_SHOWN:]}",
            where=str(log),
            fix="mend that; the same command then goes on where it stopped",
        )
    return status


def _title(trained: TrainedStage) -> str:
    return trained.stage if trained.block_size is None else f"{trained.stage}, B = {trained.block_size}"
