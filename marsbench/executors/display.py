"""One display of all that goes on, wherever it does."""

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from threading import Event, Thread

from rich.markup import escape

from marsbench.executors.tasks import Ended, Task, forget_state, log_of, read_state
from marsbench.progress import Reporter, Step, roughly

_LOOK_S = 2.0
_LOOK_BESIDE_RACES_S = 15.0  # so that looking is not what a race waits for


class Display(ExitStack):
    """What is done, running and waiting, tokens per second of all together, and how long it may take."""

    def __init__(self, reporter: Reporter, tasks: Sequence[Task], logs: Path) -> None:
        super().__init__()
        self._reporter, self._logs = reporter, logs
        self._tasks = {task.name: task for task in tasks}
        self._ended: set[str] = set()
        self._begun, self._over = time.monotonic(), Event()

    def __enter__(self) -> "Display":
        for name in self._tasks:  # an earlier run may have been killed
            forget_state(self._logs, name)
        title = f"{len(self._tasks)} pieces of work"
        self._bar = self.enter_context(self._reporter.bar(title, guesses=False))
        watching = Thread(target=self._watch, daemon=True)
        watching.start()
        self.callback(watching.join)
        self.callback(self._over.set)  # which comes first
        return self

    def end(self, ended: Ended) -> None:
        self._ended.add(ended.name)
        task, where = self._tasks[ended.name], f" on {ended.node}" if ended.node else ""
        if ended.error is None:
            self._reporter.say(escape(f"done: {task.title}{where}, {roughly(ended.seconds)}"))
        else:
            log = log_of(self._logs, task.name)
            self._reporter.say(escape(f"failed: {task.title}{where}: {ended.error.what} (see {log})"))

    def _watch(self) -> None:
        racing = False
        while not self._over.wait(_LOOK_BESIDE_RACES_S if racing else _LOOK_S):
            found = {name: read_state(self._logs, name) for name in self._tasks.keys() - self._ended}
            running = {name: step for name, step in found.items() if step is not None}
            racing = any(self._tasks[name].alone for name in running)
            self._bar.update(len(self._ended), len(self._tasks), self._note(running))

    def _note(self, running: Mapping[str, Step]) -> str:
        """What runs and waits, at what speed, and how long the rest may take."""
        waiting = len(self._tasks) - len(self._ended) - len(running)
        rate = sum(step.tokens_per_second for step in running.values())
        # How long the rest may take, if what is done says how good the estimates are.
        done = sum(self._tasks[name].seconds for name in self._ended)
        for name, step in running.items():  # the part of its present step that is done: of several steps, a guess
            done += self._tasks[name].seconds * step.done / step.total if step.total else 0.0
        whole, passed = sum(task.seconds for task in self._tasks.values()), time.monotonic() - self._begun
        left = f"{roughly(passed * (whole - done) / done)} left" if done else ""
        said = [f"{len(running)} running", f"{waiting} waiting", f"{rate:,.0f} tokens/s" if rate else "", left]
        return ", ".join(filter(None, said))
