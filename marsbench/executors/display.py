"""One display of all that is done, wherever it was."""

import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rich.markup import escape

from marsbench.executors.tasks import Ended, Task, log_of
from marsbench.progress import Reporter, roughly


def shown(running: Iterable[Ended], tasks: Sequence[Task], reporter: Reporter, logs: Path) -> Iterator[Ended]:
    """The ends of tasks as they come: how many are done, which have failed, and how long the rest may take.

    How far a task is that runs, its log says.
    """
    known, seconds, begun = {task.name: task for task in tasks}, 0.0, time.monotonic()
    whole = sum(task.seconds for task in tasks)
    with reporter.bar(f"{len(tasks)} pieces of work", guesses=False) as bar:
        for done, ended in enumerate(running, 1):
            task, where = known[ended.name], f" on {ended.node}" if ended.node else ""
            if ended.error is None:
                reporter.say(escape(f"done: {task.title}{where}, {roughly(ended.seconds)}"))
            else:
                log = log_of(logs, task.name)
                reporter.say(escape(f"failed: {task.title}{where}: {ended.error.what} (see {log})"))
            seconds += task.seconds  # what is done says how good the estimates are
            left = (time.monotonic() - begun) * (whole - seconds) / seconds if seconds else 0.0
            bar.update(done, len(tasks), f"{roughly(left)} left" if left else "")
            yield ended
