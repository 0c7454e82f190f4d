"""What a task costs beside its work: the start of a process with its imports, the way through the queue, its result."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

from marsbench.errors import UserError
from marsbench.executors.tasks import Executor, Task
from marsbench.progress import Reporter

RESULT_BYTES = 256 * 1024  # about the rows of a benchmark of 12,000 questions


class Overhead(NamedTuple):
    """Seconds."""

    start: float  # of all processes at once, with what they import
    queue: float  # of one worker, for every task: from the end of one to the start of the next
    transfer: float  # more of it, for a result of `RESULT_BYTES`

    @property
    def of_a_process(self) -> float:
        """What a task costs that has a process of its own, as on a GPU of a cluster."""
        return self.start + self.queue + self.transfer


@dataclass(frozen=True, kw_only=True)
class _Touch(Task):
    """Imports some modules and gives back so many bytes: no work at all."""

    modules: tuple[str, ...] = ()
    size: int = 0

    def run(self, made: Sequence[Any], reporter: Reporter) -> bytes:
        for module in self.modules:
            import_module(module)
        return bytes(self.size)

    def failed(self, error: UserError) -> bytes:
        return b""


def measure(executor: Executor, modules: Sequence[str], count: int) -> Overhead:
    """Have an executor do nothing, several times over: as many tasks as workers, then so many more, then with results.

    Raises:
        UserError: a task failed, so that its time means nothing.
    """

    def tasks(name: str, many: int, before: Sequence[Task], **does: Any) -> list[_Touch]:
        after = tuple(task.name for task in before)
        return [_Touch(name=f"{name}-{number}", title=name, after=after, **does) for number in range(many)]

    starts = tasks("start", executor.workers, (), modules=(*modules,))
    empty = tasks("empty", count, starts)
    heavy = tasks("heavy", count, empty, size=RESULT_BYTES)
    last, before = {}, time.perf_counter()
    for ended in executor.run([*starts, *empty, *heavy]):
        if ended.error is not None:
            raise ended.error
        last[ended.name.partition("-")[0]] = time.perf_counter()
    queue = (last["empty"] - last["start"]) * executor.workers / count
    with_result = (last["heavy"] - last["empty"]) * executor.workers / count
    return Overhead(last["start"] - before, queue, max(with_result - queue, 0.0))
