"""Tasks that depend on each other, what a process does with one, and the interface behind which all are carried out."""

import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

from marsbench.errors import UserError
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


def ended_by(task: Task, error: UserError, node: str = "", seconds: float = 0.0) -> Ended:
    """The end of a task that an error has ended, after so many seconds on a node."""
    return Ended(task.name, task.failed(error), error, node, seconds)


# ---- in the process of a task ---------------------------------------------------------------------------------------


def log_of(logs: Path, name: str) -> Path:
    return logs / f"{name}.log"


def perform(task: Task, made: Sequence[Any], logs: Path, node: str = "") -> Ended:
    """Carry out a task here; what it says goes to its log, and its error, if there is one, into its end.

    `made` is what the tasks before have made, `node` the name of this machine in a cluster.
    """
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
            fix = "mend what the log says; the same command then goes on where it stopped"
            error = UserError(f"{task.title} failed: {what}", where=str(log), fix=fix)
    took = time.perf_counter() - started
    return ended_by(task, error, node, took) if error else Ended(task.name, value, None, node, took)


# ---- all of them ----------------------------------------------------------------------------------------------------


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
        """What a task's predecessors have made; None for those that were done already."""
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
    """Carries out one list of tasks, on processes here or on nodes."""

    workers: int  # how many tasks run at a time
    tries: int  # of a task whose process or node was lost
    logs: Path  # the folder of all logs

    def run(self, tasks: Sequence[Task]) -> Generator[Ended, None, None]:
        """Carry out all tasks, each after those that it comes after, and yield them as they end.

        A task that raises an error has failed; the others go on. One whose process or node was lost is done again, a
        few times. Closing the iterator early ends all tasks that run.
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
                        ended = ended_by(task, UserError(what, where=str(log_of(self.logs, task.name)), fix=fix))
                    order.end(ended)
                    yield ended
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
