"""Tasks that depend on each other, and who carries them out: this process, or pools of one process each."""

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass
from graphlib import TopologicalSorter
from multiprocessing import forkserver, get_context
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from pathlib import Path
from threading import Thread
from typing import Any

from marsbench.errors import UserError
from marsbench.files import PACKAGE
from marsbench.progress import Reporter

LOOK_S = 1.0  # how long Ctrl-C may have to wait


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """One node of the graph: what it comes after, what it costs, and what it does in any process."""

    name: str  # of its log, too
    title: str  # what it is called on the terminal
    after: tuple[str, ...] = ()  # names of tasks; one that is not among those to do is done already
    seconds: float = 0.0  # what it may take, roughly: what the most work waits for starts first
    alone: bool = False  # it times something: nothing may run beside it on its machine
    gpus: int = 1  # of one machine that it uses together

    @abstractmethod
    def run(self, made: Sequence[Any], reporter: Reporter) -> Any:
        """Do it, given what the tasks before have made, in the order of `after`; an error ends it."""

    @abstractmethod
    def failed(self, error: UserError) -> Any:
        """What stands for its result where it has failed, for those that come after."""


@dataclass(frozen=True)
class Ended:
    name: str
    value: Any  # what it has made, or `Task.failed`
    error: UserError | None  # why it failed for its own reasons, None where it did not
    node: str  # where it ran
    seconds: float  # it took


def log_of(logs: Path, name: str) -> Path:
    return logs / f"{name}.log"


def perform(task: Task, made: Sequence[Any], logs: Path, node: str = "") -> Ended:
    """Carry out a task here, a cluster's `node`, given what those before have `made`; what it says goes to its log."""
    started, log = time.perf_counter(), log_of(logs, task.name)
    error: UserError | None = None
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        log.open("a", encoding="utf-8", buffering=1) as stream,  # behind what an earlier try has said
        redirect_stderr(stream),
    ):
        try:
            value = task.run(made, Reporter())
        except UserError as problem:
            error = problem
            print(problem, file=sys.stderr)
        except Exception as problem:  # a bug: its traceback is in the log
            traceback.print_exception(problem)
            what = f"{type(problem).__name__}: {str(problem).strip().partition(chr(10))[0]}"
            fix = "correct what the log says; the same command then goes on"
            error = UserError(f"{task.title} failed: {what}", where=str(log), fix=fix)
    took = time.perf_counter() - started
    return Ended(task.name, task.failed(error) if error else value, error, node, took)


def launch(task: Task, gpus: int, config: Path = PACKAGE / "presets" / "launch" / "fsdp.yaml") -> None:
    """Have `accelerate launch` start a process for each GPU; they do a task together, and end with this process."""
    options = ["--config_file", str(config), "--num_processes", str(gpus), "--main_process_port", "0"]  # any free port
    with tempfile.NamedTemporaryFile(suffix=".task") as file:
        file.write(pickle.dumps(task))
        file.flush()
        command = [sys.executable, "-m", "accelerate.commands.launch", *options, "-m", __name__, file.name]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=sys.stderr, stderr=sys.stderr) as launched:
            status = launched.wait()
    if status:
        what = f"{task.title} on {gpus} GPUs: a process ended with status {status}"
        raise UserError(what, fix="correct what the log says; the same command then goes on")


class Order:
    """Which tasks can start: those whose predecessors have ended; first what the longest way to the end begins with."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = {task.name: task for task in tasks}
        assert len(self._tasks) == len(tasks), "every task has a name of its own"
        self._values: dict[str, Any] = {}
        awaited = {task.name: [name for name in task.after if name in self._tasks] for task in tasks}
        # How long it is from the start of each task to the end of all that waits for it.
        self._way = {task.name: task.seconds for task in tasks}
        for name in reversed([*TopologicalSorter(awaited).static_order()]):
            for before in awaited[name]:
                self._way[before] = max(self._way[before], self._tasks[before].seconds + self._way[name])
        self._sorter = TopologicalSorter(awaited)
        self._sorter.prepare()
        self.ready: list[Task] = []  # what can start, in the order in which it should
        self._look()

    def __bool__(self) -> bool:
        return self._sorter.is_active()

    def take(self, task: Task) -> None:
        """A task has begun; `ready` is replaced, so that a loop over it goes on undisturbed."""
        self.ready = [other for other in self.ready if other is not task]

    def made(self, task: Task) -> list[Any]:
        return [self._values.get(name) for name in task.after]

    def end(self, ended: Ended) -> None:
        self._values[ended.name] = ended.value
        self.take(self._tasks[ended.name])  # one that was never begun
        self._sorter.done(ended.name)
        self._look()

    def _look(self) -> None:
        self.ready += [self._tasks[name] for name in self._sorter.get_ready()]
        self.ready.sort(key=lambda task: -self._way[task.name])


class Executor(ABC):
    workers: int  # how many tasks run at a time
    tries: int  # of a task whose process or node was lost
    logs: Path  # the folder of all logs
    _running: dict[Any, tuple[Task, Any]]  # result to be -> task, and where it runs

    def run(
        self, tasks: Sequence[Task], look: Callable[[list[Task]], None] = lambda running: None
    ) -> Generator[Ended, None, None]:
        """Carry out all tasks, each after its predecessors, and yield them as they end; what was lost is done again.

        Every second or so, `look` is told which tasks are running.
        """
        order, losses = Order(tasks), Counter[str]()
        try:
            while order:
                for task in order.ready:
                    if self.start(task, order.made(task)):
                        order.take(task)
                for task, ended in self.ended():
                    losses[task.name] += ended is None
                    if ended is None and losses[task.name] < self.tries:
                        order.ready.insert(0, task)
                        continue
                    if ended is None:
                        what = f"{task.title}: its process was lost {self.tries} times"
                        fix = "there may be too little memory for so many at a time: see its log, and --jobs"
                        error = UserError(what, where=str(log_of(self.logs, task.name)), fix=fix)
                        ended = Ended(task.name, task.failed(error), error, "", 0.0)
                    order.end(ended)
                    yield ended
                look([task for task, _ in self._running.values()])
        finally:
            self.close()

    @abstractmethod
    def start(self, task: Task, made: Sequence[Any]) -> bool:
        """Begin a task, given what those before it have made; False where there is no room for it yet."""

    @abstractmethod
    def ended(self) -> list[tuple[Task, Ended | None]]:
        """What has ended, after a while, and how: None = its process was lost."""

    def close(self) -> None:  # noqa: B027
        """End all tasks that run."""


class Local(Executor):
    """Up to `workers` processes, which end with this one; one `alone`, or with several GPUs, has the whole machine."""

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
        alone = task.alone or task.gpus > 1
        lanes = [lane for _, lane in self._running.values()]
        has_room = not lanes if alone else self._idle and _ALONE not in lanes
        if not has_room:
            return False
        lane = _ALONE if alone else self._idle.pop(0)
        if alone and self._gpus:  # who idles meanwhile would keep the memory of its GPU
            for idle in [*self._pools]:
                self._pools.pop(idle).shutdown()
        if lane not in self._pools:
            self._pools[lane] = ProcessPoolExecutor(
                1, mp_context=self._context, initializer=_begin, initargs=(self._ours, lane, self._gpus)
            )
        self._running[self._pools[lane].submit(perform, task, made, self.logs)] = task, lane
        return True

    def ended(self) -> list[tuple[Task, Ended | None]]:
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
        self._running = {}  # a task has ended when it has started

    def start(self, task: Task, made: Sequence[object]) -> bool:
        if self._over:
            return False
        started, error = time.perf_counter(), None
        try:
            value = task.run(made, self._reporter)
        except UserError as problem:
            error, value = problem, task.failed(problem)
        self._over.append((task, Ended(task.name, value, error, "", time.perf_counter() - started)))
        return True

    def ended(self) -> list[tuple[Task, Ended | None]]:
        endings, self._over = self._over, []
        return endings


_ALONE = -1  # the lane of what is to be alone


def import_ahead(preload: Sequence[str]) -> BaseContext:
    """How processes start: forked off one that imports all of this beside us from now on; on macOS each by itself."""
    if sys.platform != "linux":
        return get_context("spawn")
    context = get_context("forkserver")
    context.set_forkserver_preload([*preload])
    forkserver.ensure_running()
    return context


def _begin(held: Connection, lane: int, gpus: int) -> None:
    """What a process does first: take its core or GPU, leave Ctrl-C to the driver, and listen whether that lives."""

    def end_with_driver() -> None:  # a driver that lets go of the other end of the pipe, or is killed
        with suppress(EOFError, OSError):
            held.recv()
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=end_with_driver, daemon=True).start()
    if lane == _ALONE:
        return
    if gpus:
        given = os.environ.get("CUDA_VISIBLE_DEVICES")  # of those that this process was given, one
        os.environ["CUDA_VISIBLE_DEVICES"] = given.split(",")[lane % gpus] if given else str(lane % gpus)
    else:
        import torch

        torch.set_num_threads(1)


if __name__ == "__main__":  # one of the processes of `launch`
    Thread(target=lambda: os.read(0, 1) or os._exit(1), daemon=True).start()  # it ends when its launcher does
    pickle.loads(Path(sys.argv[1]).read_bytes()).run([], Reporter())
