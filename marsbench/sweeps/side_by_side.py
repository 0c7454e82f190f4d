"""Training several stages at a time, each in a process of its own on one core: small models leave the others idle."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Protocol, TypeVar

import torch

from marsbench.errors import UserError
from marsbench.sweeps.plans import TrainedStage
from marsbench.sweeps.runner import Runner
from marsbench.training.stages import lineage

_POLL_S = 0.2
_SHOWN = 500  # characters of what a failed training has said
_MOST = 4  # a training holds about a gibibyte


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
    """How many trainings to run at a time: one per core, but one in all on a GPU."""
    return 1 if torch.cuda.is_available() else min(torch.get_num_threads(), _MOST)


def train_side_by_side(runner: Runner, wanted: Iterable[TrainedStage], jobs: int) -> None:
    """Train what is missing of some stages, and of those that they start from, so many at a time.

    Only the world's models are trained in this way, and only what is missing. The others, and all of it where `jobs` is
    1, are left to whoever asks for a checkpoint.

    Raises:
        UserError: a training has failed; the others are ended, and go on where they stopped the next time.
    """
    missing = _missing(runner, wanted)
    if jobs < 2 or len(missing) < 2 or runner.scale.world is None or runner.existing != "reuse":
        return
    with runner.reporter.bar(f"training {len(missing)} checkpoints, {jobs} at a time, one core each") as bar:
        for done, trained in enumerate(in_order(missing, lambda one: _Training(runner, one), jobs), 1):
            runner.reporter.say(f"trained {_title(trained)}")
            bar.update(done, len(missing))


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


def _missing(runner: Runner, wanted: Iterable[TrainedStage]) -> dict[TrainedStage, TrainedStage | None]:
    """The stages to train, parents first -> what each starts from."""
    found: dict[TrainedStage, TrainedStage | None] = {}
    for trained in wanted:
        parent = None
        for name in lineage(runner.scale, trained.stage) if runner.trains(*trained) else ():
            one = TrainedStage.of(name, trained.block_size)
            if not runner.is_trained(one):
                found[one] = parent
            parent = one
    return found


class _Training:
    """`marsbench train` in a process of its own; what it says goes to a file below `runs/`."""

    def __init__(self, runner: Runner, trained: TrainedStage) -> None:
        blocks = [] if trained.block_size is None else ["--block-size", str(trained.block_size)]
        options = {"--scale": runner.scale.scale, "--seed": runner.seed, "--output": runner.workspace.root}
        command = [trained.stage, *blocks, *[str(part) for option in options.items() for part in option]]
        self._trained, self._log = trained, runner.workspace.training_log(trained.stage, trained.block_size)
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
        status = self._process.poll()
        if status:
            said = self._log.read_text(encoding="utf-8").strip() or f"exit status {status}"
            raise UserError(
                f"training {_title(self._trained)} failed: {said[-_SHOWN:]}",
                where=str(self._log),
                fix="mend that; the same command then goes on where it stopped",
            )
        return status

    def terminate(self) -> None:
        """Ask it to end; its states are on disk."""
        self._process.terminate()


def _title(trained: TrainedStage) -> str:
    return trained.stage if trained.block_size is None else f"{trained.stage}, B = {trained.block_size}"
