"""This process alone, or several on this machine, a core or a GPU each, on the standard library's pool.

Every worker is a pool of one process, so that a lost process loses one task. On Linux all are forked off a process that
has imported what is heavy.
"""

import os
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import forkserver, get_context
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from pathlib import Path
from threading import Thread

from marsbench.errors import UserError
from marsbench.executors.tasks import LOOK_S, Ended, Executor, Task, ended_by, perform
from marsbench.progress import Reporter


class Local(Executor):
    """Up to `workers` processes at a time; a task that is `alone` has the whole machine.

    The processes end with the one that made them, even if it is killed.
    """

    tries = 3

    def __init__(self, workers: int, logs: Path, *, gpus: int = 0, preload: Sequence[str] = ()) -> None:
        """The processes share so many GPUs, or have a core each; `preload` names what every task imports."""
        self.workers, self.logs, self._gpus = workers, logs, gpus
        self._context = import_ahead(preload)
        self._idle, self._pools = list(range(self.workers)), dict[int, ProcessPoolExecutor]()
        self._running = dict[Future[Ended], tuple[Task, int]]()
        self._ours, self._theirs = self._context.Pipe(duplex=False)

    def close(self) -> None:
        if self._running:
            self._theirs.close()  # which ends all processes at once
        for pool in self._pools.values():
            pool.shutdown(cancel_futures=True)
        self._theirs.close()
        self._ours.close()

    def start(self, task: Task, made: Sequence[object]) -> bool:
        """Start a task in an idle lane, or, if it is to be alone and nothing runs, in a process of its own."""
        others = [running for running, _ in self._running.values()]
        has_room = not others if task.alone else self._idle and not any(other.alone for other in others)
        if not has_room:
            return False
        lane = _ALONE if task.alone else self._idle.pop(0)
        if task.alone and self._gpus:  # who idles meanwhile would keep the memory of its GPU
            for idle in [*self._pools]:
                self._pools.pop(idle).shutdown()
        if lane not in self._pools:
            self._pools[lane] = ProcessPoolExecutor(
                1, mp_context=self._context, initializer=_begin, initargs=(self._ours, lane, self._gpus)
            )
        self._running[self._pools[lane].submit(perform, task, made, self.logs)] = task, lane
        return True

    def ended(self) -> list[tuple[Task, Ended | None]]:
        """What has ended; its lanes are idle again, with a new process where the last one was lost."""
        done, _ = wait(self._running, timeout=LOOK_S, return_when=FIRST_COMPLETED)
        endings = list[tuple[Task, Ended | None]]()
        for future in done:
            task, lane = self._running.pop(future)
            lost = isinstance(future.exception(), BrokenProcessPool)
            if lane == _ALONE or lost:
                self._pools.pop(lane).shutdown(wait=False)
            if lane != _ALONE:
                self._idle.append(lane)
            endings.append((task, None if lost else future.result()))
        return endings


class Here(Executor):
    """This process, which does one task after another and says on the terminal what it does; a bug ends them all."""

    workers = tries = 1

    def __init__(self, logs: Path, reporter: Reporter) -> None:
        self.logs, self._reporter, self._over = logs, reporter, list[tuple[Task, Ended | None]]()

    def start(self, task: Task, made: Sequence[object]) -> bool:
        """Carry out a task, after the end of the last one was heard of."""
        if self._over:
            return False
        started = time.perf_counter()
        try:
            ended = Ended(task.name, task.run(made, self._reporter), None, "", time.perf_counter() - started)
        except UserError as error:
            ended = ended_by(task, error, seconds=time.perf_counter() - started)
        self._over.append((task, ended))
        return True

    def ended(self) -> list[tuple[Task, Ended | None]]:
        endings, self._over = self._over, []
        return endings


_ALONE = -1  # the lane of what is to be alone


def import_ahead(preload: Sequence[str]) -> BaseContext:
    """How processes start: forked off one that has imported everything, and begins to now; on macOS each by itself.

    Called before this process imports the same things, it does so beside it.
    """
    if sys.platform != "linux":
        return get_context("spawn")
    context = get_context("forkserver")
    context.set_forkserver_preload([*preload])
    forkserver.ensure_running()
    return context


def _begin(held: Connection, lane: int, gpus: int) -> None:
    """What a process does first: take its core or GPU, leave Ctrl-C to the driver, and listen whether that lives."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_end_with_driver, args=(held,), daemon=True).start()
    if lane == _ALONE:
        return
    if gpus:
        given = os.environ.get("CUDA_VISIBLE_DEVICES")  # of those that this process was given, one
        os.environ["CUDA_VISIBLE_DEVICES"] = given.split(",")[lane % gpus] if given else str(lane % gpus)
    else:
        import torch

        torch.set_num_threads(1)


def _end_with_driver(held: Connection) -> None:
    """End as soon as the driver lets go of the other end of a pipe, or is killed: the next run would do the same."""
    try:
        held.recv()
    except (EOFError, OSError):
        os._exit(1)
