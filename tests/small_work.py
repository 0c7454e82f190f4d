"""Small tasks for tests of executors, in a module that processes import quickly."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from marsbench.errors import UserError
from marsbench.executors.tasks import Task
from marsbench.progress import Reporter
from marsbench.provenance import NODE


@dataclass(frozen=True, kw_only=True)
class Do(Task):
    """A small task: calls a function of a module with its folder."""

    function: Callable[[Path, Sequence[Any]], Any]
    folder: Path

    def run(self, results: Sequence[Any], reporter: Reporter) -> Any:
        return self.function(self.folder, results)

    def failed(self, error: UserError) -> Any:
        return f"failed: {error.what}"


def do(
    name: str, function: Callable[[Path, Sequence[Any]], Any], folder: Path, *after: str, title: str = "", **more: Any
) -> Do:
    return Do(name=name, title=title, after=after, function=function, folder=folder, **more)


def nothing(folder: Path, results: Sequence[Any]) -> Any:
    return results


def stay(folder: Path, results: Sequence[Any]) -> list[str]:
    """The other tasks that run on this node at the same time."""
    node = os.environ.get(NODE, "here")
    mine = folder / f"{node}-{os.getpid()}-{time.monotonic_ns()}"
    mine.touch()
    time.sleep(0.3)
    beside = [file.name for file in folder.glob("*-*-*") if file != mine]
    mine.unlink()
    return beside


def fail(folder: Path, results: Sequence[Any]) -> Any:
    """Fail as a bug of ours or of a library does."""
    raise ValueError("it does not work")


def count_and_die(folder: Path, results: Sequence[Any]) -> Any:
    """Die as a process without memory does, until the folder says that it is enough."""
    tries = len([*folder.glob("try*")])
    (folder / f"try{tries}").touch()
    if not (folder / f"enough{tries}").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def sleep_long(folder: Path, results: Sequence[Any]) -> Any:
    """Run far longer than any test waits."""
    (folder / "started").write_text(str(os.getpid()))
    time.sleep(600)


def wait_for_word(folder: Path, results: Sequence[Any]) -> str:
    """Wait for ever the first time, and not at all the second; returns the node's name."""
    here = os.environ[NODE]
    try:
        (folder / "running").open("x").write(here)
    except FileExistsError:
        return here
    time.sleep(600)
    return here


def its_number(folder: Path, results: Sequence[Any]) -> int:
    return os.getpid()


def is_there(folder: Path, results: Sequence[Any]) -> bool:
    """Whether the process of the task before is still there."""
    return psutil.pid_exists(results[0]) and psutil.Process(results[0]).status() != psutil.STATUS_ZOMBIE
