"""Progress on a terminal, and plain lines where there is none (a log file, a CI run)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_LINE_EVERY_S = 20.0


class Bar:
    """One piece of long work."""

    def __init__(self, title: str, progress: Progress | None, console: Console) -> None:
        self._title, self._progress, self._console = title, progress, console
        self._task = progress.add_task(title, total=None, note="") if progress else None
        self._printed = time.monotonic()

    def update(self, done: int, total: int, note: str = "") -> None:
        """Say how far the work is."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=done, total=total, note=note)
        elif time.monotonic() - self._printed > _LINE_EVERY_S:
            self._printed = time.monotonic()
            self._console.print(f"  {self._title}: {done}/{total} {note}", highlight=False)


def is_first_process() -> bool:
    """Whether this process is the only one, or the first of those that `accelerate launch` has started."""
    return os.environ.get("RANK", "0") == "0"


class Reporter:
    """Tells the user what goes on, on standard error; of several processes, only the first speaks."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, quiet=not is_first_process())

    def say(self, text: str) -> None:
        """One line that stays."""
        self._console.print(text, highlight=False, soft_wrap=True)

    @contextmanager
    def bar(self, title: str) -> Iterator[Bar]:
        """A bar for the time of a `with` block, gone afterwards."""
        if not self._console.is_terminal:
            self.say(title)
            yield Bar(title, None, self._console)
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        with Progress(*columns, console=self._console, transient=True) as progress:
            yield Bar(title, progress, self._console)
