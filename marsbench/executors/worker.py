"""What a process does with one task: its log, how far it is, and its failure in words."""

from __future__ import annotations

import json
import math
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from pathlib import Path
from typing import Any

from marsbench.errors import UserError
from marsbench.executors.tasks import Ended, Task
from marsbench.files import write_atomically
from marsbench.progress import Reporter, Step

_NOTES_S = 2.0  # between two notes of how far a task is


def log_of(logs: Path, name: str) -> Path:
    return logs / f"{name}.log"


def read_state(logs: Path, name: str) -> Step | None:
    """How far a task is, as its process notes it in a file beside its log; None where it is not running."""
    try:
        return Step(*json.loads(_state_of(logs, name).read_text(encoding="utf-8")))
    except (OSError, ValueError):  # a network file system may show a file that is on its way
        return None


def forget_state(logs: Path, name: str) -> None:
    """Remove what a task that was killed has left: it is not running."""
    _state_of(logs, name).unlink(missing_ok=True)


def _state_of(logs: Path, name: str) -> Path:
    return logs / f"{name}.state"


def perform(task: Task, made: Sequence[Any], logs: Path, node: str = "") -> Ended:
    """Carry out a task here; what it says goes to its log, and its error, if there is one, into its end.

    `made` is what the tasks before have made, `node` the name of this machine in a cluster.
    """
    started, error = time.perf_counter(), None
    log = log_of(logs, task.name)
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        with (
            log.open("a", encoding="utf-8", buffering=1) as stream,  # behind what an earlier try has said
            redirect_stderr(stream),
            _followed(task, logs) as reporter,
        ):
            try:
                value = task.run(made, reporter)
            except Exception as problem:
                error = _in_words(problem, task, log)
                value = task.failed(error)
    except OSError as problem:  # of the log, or of what lies beside it
        fix = "free space, or mend its permissions; the same command then goes on where it stopped"
        error = UserError(f"{task.title} cannot write its log: {problem.strerror or problem}", where=str(log), fix=fix)
        value = task.failed(error)
    return Ended(task.name, value, error, node, time.perf_counter() - started)


def _in_words(problem: Exception, task: Task, log: Path) -> UserError:
    """A failure as an error that says where to look; the log has the traceback of what is a bug."""
    if isinstance(problem, UserError):
        print(problem, file=sys.stderr)
        return problem
    traceback.print_exception(problem)
    said = str(problem).strip().splitlines() or [""]
    return UserError(
        f"{task.title} failed: {type(problem).__name__}: {said[0]}",
        where=str(log),
        fix="mend what the log says; the same command then goes on where it stopped",
    )


@contextmanager
def _followed(task: Task, logs: Path) -> Iterator[Reporter]:
    """A reporter whose steps are noted in a file, every few seconds; once where every disturbance would be timed."""
    file, noted = _state_of(logs, task.name), -math.inf

    def follow(step: Step) -> None:
        nonlocal noted
        if not task.alone and time.monotonic() - noted > _NOTES_S:
            noted = time.monotonic()
            with suppress(OSError):  # nothing that work should end for
                write_atomically(file, json.dumps(step).encode())

    write_atomically(file, json.dumps(Step(task.title, 0, 0)).encode())
    try:
        yield Reporter(follow)
    finally:
        file.unlink(missing_ok=True)
