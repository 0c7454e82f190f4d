"""Tasks that depend on each other, and the one interface behind which somebody carries them out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
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
    gpus: int = 1  # all of one machine; counts where there are GPUs
    alone: bool = False  # it times something: nothing may run beside it on its machine

    @abstractmethod
    def run(self, made: Sequence[Any], reporter: Reporter) -> Any:
        """Do it, given what the tasks before have made, in the order of `after`; whatever it raises ends it."""

    @abstractmethod
    def failed(self, error: UserError) -> Any:
        """What stands for its result where it has failed, for those that come after."""


@dataclass(frozen=True)
class Ended:
    """A task that has been carried out."""

    name: str
    value: Any  # what it has made, or `Task.failed`
    error: UserError | None  # why it failed for its own reasons, None where it did not
    node: str  # where it ran
    seconds: float  # it took


class Order:
    """Which tasks can start: those whose predecessors have ended; first what the longest way to the end begins with."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = {task.name: task for task in tasks}
        assert len(self._tasks) == len(tasks), "every task has a name of its own"
        self._values: dict[str, Any] = {}
        awaited = {task.name: [name for name in task.after if name in self._tasks] for task in tasks}
        self._way = _ways({task.name: task.seconds for task in tasks}, awaited)
        self._sorter = TopologicalSorter(awaited)
        self._sorter.prepare()
        self._ready: list[Task] = []
        self._look()

    def __bool__(self) -> bool:
        """Whether anything is left that has not ended."""
        return self._sorter.is_active()

    @property
    def ready(self) -> list[Task]:
        """What can start, in the order in which it should."""
        return list(self._ready)

    def take(self, task: Task) -> None:
        self._ready.remove(task)

    def give_back(self, task: Task) -> None:
        self._ready.insert(0, task)

    def made(self, task: Task) -> list[Any]:
        """What a task's predecessors have made; None for those that were done already."""
        return [self._values.get(name) for name in task.after]

    def end(self, ended: Ended) -> None:
        self._values[ended.name] = ended.value
        self._ready = [task for task in self._ready if task.name != ended.name]  # one that was never begun
        self._sorter.done(ended.name)
        self._look()

    def _look(self) -> None:
        self._ready += [self._tasks[name] for name in self._sorter.get_ready()]
        self._ready.sort(key=lambda task: -self._way[task.name])


def _ways(seconds: Mapping[str, float], awaited: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """How long it is from the start of each task to the end of all that waits for it."""
    ways = dict(seconds)
    for name in reversed([*TopologicalSorter(awaited).static_order()]):
        for before in awaited[name]:
            ways[before] = max(ways[before], seconds[before] + ways[name])
    return ways


class Executor(ABC):
    """Carries out tasks, on processes here or on nodes."""

    workers: int  # how many tasks run at a time
    tries: int  # of a task whose process or node was lost; one that does this every time has its own reasons
    logs: Path  # the folder of all logs

    def run(self, tasks: Sequence[Task]) -> Generator[Ended, None, None]:
        """Carry out all tasks, each after those that it comes after, and yield them as they end.

        A task that raises an error has failed; the others go on. One whose process or node was lost is done again, a
        few times. Who closes the iterator early ends whatever runs.
        """
        order, losses = Order(tasks), Counter[str]()
        self.open(tasks)
        try:
            while order:
                for task in order.ready:
                    if self.start(task, order.made(task)):
                        order.take(task)
                for task, ended in self.ended(order.ready):
                    losses[task.name] += ended is None
                    if ended is None and losses[task.name] < self.tries:
                        order.give_back(task)
                        continue
                    ended = ended or self._lost(task)
                    order.end(ended)
                    yield ended
        finally:
            self.close()

    def open(self, tasks: Sequence[Task]) -> None:  # noqa: B027
        """Get ready for some tasks; nothing runs yet."""

    @abstractmethod
    def start(self, task: Task, made: Sequence[Any]) -> bool:
        """Begin a task, given what those before it have made; False where there is no room for it yet."""

    @abstractmethod
    def ended(self, held_back: Sequence[Task]) -> list[tuple[Task, Ended | None]]:
        """What has ended, after a while, and how: None = its process was lost; `held_back` still have no room."""

    def close(self) -> None:  # noqa: B027
        """End whatever runs."""

    def _lost(self, task: Task) -> Ended:
        """The end of a task whose process was lost time and again."""
        what = f"{task.title}: its process was lost {self.tries} times"
        fix = "there may be too little memory for so many at a time: see its log, and --jobs"
        return ended_by(task, UserError(what, where=str(self.logs / f"{task.name}.log"), fix=fix))


def ended_by(task: Task, error: UserError) -> Ended:
    """The end of a task that an error ended before it could say so itself."""
    return Ended(task.name, task.failed(error), error, "", 0.0)
