"""Locks on files: one holder at a time, among the processes of all machines that share a folder."""

import math
import os
import socket
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from marsbench.errors import UserError, told_to_user

_LOST_S = 3600.0  # of waiting, where a lock stays when the machine of its holder is lost


@contextmanager
def locked(
    file: Path, *, patience_s: float = math.inf, say: Callable[[str], None] | None = None,
    busy: str = "another process holds this lock",
) -> Iterator[None]:  # fmt: skip
    """Hold a lock for the time of a `with` block; `say` is told who holds it first, where another process does.

    The system frees the locks of processes that die. On a file system without locks, an existing file stands for one,
    which may stay: the wait is an hour at most. `UserError` after `patience_s`, or where nothing can be locked.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(file)
    if not _acquired(lock, 0.0):
        if say is not None:
            say(_holder(file))
        bound = min(patience_s, _LOST_S) if isinstance(lock, SoftFileLock) else patience_s
        if not _acquired(lock, bound):
            fix = "wait for it; if that process is gone, remove the file"
            raise UserError(f"{busy}: {_holder(file)}", where=str(file), fix=fix)
    if not isinstance(lock, SoftFileLock):  # whose file says it already
        with suppress(OSError):
            file.write_text(f"{os.getpid()}\n{socket.gethostname()}\n")
    try:
        yield
    finally:
        lock.release()


def _acquired(lock: BaseFileLock, patience_s: float) -> bool:
    fix = "choose a folder on another file system, or have this one mounted with locks"
    mend = told_to_user("files cannot be locked here", OSError, NotImplementedError, where=lock.lock_file, fix=fix)
    with mend, suppress(Timeout), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a file stands for a lock, where the file system has none
        lock.acquire(timeout=patience_s if patience_s < math.inf else -1)
    return lock.is_locked


def _holder(file: Path) -> str:
    try:
        process, host = file.read_text().split()[:2]
    except (OSError, ValueError):
        return "an unknown process"
    return f"process {process} on {host}"
