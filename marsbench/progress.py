"""Progress and tables on a terminal, plain lines where there is none (a log file, a CI run), libraries kept quiet."""

import atexit
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

_LINE_EVERY_S = 20.0
_COMPILING = ("dynamo", "inductor")  # the parts of torch that compile steps
Counted = Callable[[int, int], None]  # told how far something is: (done, of so many)
Say = Callable[[str], None]  # told a line for the user


class Bar:
    def __init__(self, title: str, progress: Progress | None, console: Console) -> None:
        self._title, self._progress, self._console = title, progress, console
        self._task = progress.add_task(title, total=None, note="") if progress else None
        self._printed = time.monotonic()
        # When the first update came, and what was done by then: an interrupted run's work says nothing of our speed.
        self._begun: tuple[float, int] | None = None

    def update(self, done: int, total: int, note: str = "") -> None:
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=done, total=total, note=note)
            return
        now = time.monotonic()
        since, before = self._begun = self._begun or (now, done)
        if now - self._printed > _LINE_EVERY_S:  # a line, with the time left at the speed so far if that is known
            self._printed = now
            left = f"{roughly((now - since) / (done - before) * (total - done))} left" if done > before else ""
            said = ", ".join(filter(None, [f"{done}/{total}", left, note]))
            self._console.print(f"  {self._title}: {said}", highlight=False, markup=False, soft_wrap=True)


def roughly(seconds: float) -> str:
    if seconds < 60:
        return "less than a minute"
    return f"about {seconds / 60:.0f} min" if seconds < 90 * 60 else f"about {seconds / 3600:.1f} hours"


def is_first_process() -> bool:
    """Whether this process is the only one, or the first of those that `accelerate launch` has started."""
    return os.environ.get("RANK", "0") == "0"


def all_processes() -> Any:
    """`PartialState`: the processes of `accelerate launch`, joined until Python ends (parted late, they abort it)."""
    import torch
    from accelerate import PartialState

    joined = PartialState(cpu=not torch.accelerator.is_available())
    atexit.register(joined.destroy_process_group)
    return joined


class Reporter:
    """Tells the user what goes on, on standard error; of several processes, only the first speaks."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, quiet=not is_first_process())
        self._said: set[str] = set()  # what must not be said twice

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def say_once(self, text: str) -> None:
        """One line that stays, however often it is given; none where it is empty."""
        if text and text not in self._said:
            self._said.add(text)
            self.say(text)

    @contextmanager
    def bar(self, title: str) -> Iterator[Bar]:
        """A bar for the time of a `with` block, gone afterwards; it guesses the time left by steps that are alike."""
        if not self._console.is_terminal:
            self.say(title)
            yield Bar(title, None, self._console)
            return
        columns: list[ProgressColumn] = [TextColumn("{task.description}", markup=False), BarColumn()]
        columns += [MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[note]}", markup=False)]
        with Progress(*columns, console=self._console, transient=True) as progress:
            yield Bar(title, progress, self._console)


def terminal_table(
    title: str, heads: Sequence[str], rows: Iterable[Sequence[str]], *, whole_names: bool = False
) -> Table:
    """A table for a terminal, whose words are folded; with `whole_names` those of the first column are not."""
    table = Table(title=title, title_justify="left")
    for number, head in enumerate(heads):
        table.add_column(head, overflow="fold", no_wrap=whole_names and number == 0)
    for row in rows:
        table.add_row(*row)
    return table


def quieten_libraries() -> None:
    """Only warnings that a user can act on remain; what is imported afterwards hears of it by the environment."""
    off = dict.fromkeys(("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS", "TQDM_DISABLE"), "1")
    off |= {"TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}
    off["TORCH_LOGS"] = ",".join(f"-{name}" for name in _COMPILING)  # torch sets levels when it comes
    for name, value in off.items():
        os.environ.setdefault(name, value)
    compiling = [f"torch._{name}" for name in _COMPILING]
    for name in ("lm_eval", "lm-eval", "transformers", "datasets", "accelerate", "httpx", *compiling):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"(lm_eval|transformers|datasets|accelerate|torch)\b")
    if (transformers := sys.modules.get("transformers")) is not None:
        transformers.utils.logging.disable_progress_bar()
    if (datasets := sys.modules.get("datasets")) is not None:
        datasets.disable_progress_bars()
