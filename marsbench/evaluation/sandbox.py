"""Runs generated Python programs and says which of them are right, or records what reference solutions return.

Generated code runs only in evalplus's sandbox, hardened by `sandbox_worker`. This module owns the worker
interpreters: one per job, each in its own session, without torch, secrets or any way back to this process but
one pipe. A program that takes its worker down costs a new worker and nothing else.

This holds careless and mischievous programs; it is no virtual machine. They get the standard library and
numpy, but no files, processes, network or ctypes (so no scipy, pandas or sympy either). Where this process is
root, the workers become `nobody`, provided that user can read the Python installation; else that is said.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import pwd
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, cast, get_args

from marsbench.errors import UserError

# failed: wrong value or exception; timeout: past the time limit; killed: the process ended early.
Reason = Literal["passed", "failed", "timeout", "killed"]
READY = "ready"
START_LIMIT_S = 60.0
WORTH_A_WORKER = 16  # programs; fewer are run in the time that a worker takes to start
# evalplus needs up to 2.2 s more for a program that fights its alarm, and grants no program more than 60 s.
EVALPLUS_SLACK_S = 3.0
EVALPLUS_MAX_TIME_LIMIT_S = 60.0

# Classes, beyond those that pickle knows by itself, whose values may leave the sandbox.
PLAIN_CLASSES = {("builtins", name) for name in ("bytearray", "complex", "dict", "frozenset", "range", "set")}
PLAIN_CLASSES |= {("collections", "deque"), ("decimal", "Decimal"), ("fractions", "Fraction")}
PLAIN_CLASSES |= {("numpy", "dtype")}
PLAIN_CLASSES |= {("numpy.core.multiarray", "scalar"), ("numpy._core.multiarray", "scalar")}


class PlainUnpickler(pickle.Unpickler):
    """Loads built-in values and numbers, but nothing whose class the code in the sandbox made up."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in PLAIN_CLASSES:
            raise pickle.UnpicklingError(f"{module}.{name} is not plain data")
        return super().find_class(module, name)


@dataclass(frozen=True)
class Program:
    """Generated code and its tests: `entry_point(*inputs[i])` must return what equals `expected[i]`.

    Floats may differ by `atol`, where 0 means 1e-6. As in evalplus, a function called `find_zero` (HumanEval/32) may
    return any root of its polynomial. Of a reference solution nothing is expected: its calls are only made. Each call
    may take `limits_s[i]` seconds; without these, only the time of all together is limited.
    """

    code: str
    entry_point: str
    inputs: list[list[Any]]
    expected: list[Any] | None
    atol: float = 0.0
    limits_s: list[float] | None = None

    def __post_init__(self) -> None:
        for what, given in (("expected", self.expected), ("limits", self.limits_s)):
            if given is not None and not 0 < len(self.inputs) == len(given):
                raise ValueError(f"{len(self.inputs)} inputs, {len(given)} {what}: need one for one")


@dataclass(frozen=True)
class Recording:
    """What each call of a reference returned, and the seconds it took; both empty unless all calls returned."""

    reason: Reason
    outputs: list[Any]
    seconds: list[float]


def run_programs(
    programs: Sequence[Program], *, time_limit_s: float = 2.0, memory_limit_mb: int = 1024
) -> list[Reason]:
    """Verdicts in the order of `programs`, from a worker per core, or fewer for a few programs.

    `time_limit_s` (at most 60) is wall-clock time for all inputs of a program together. `memory_limit_mb` bounds its
    address space, except on macOS, which has no such limit. `UserError` if no worker can start.
    """
    asked = record_outputs(programs, time_limit_s=time_limit_s, memory_limit_mb=memory_limit_mb)
    return [recording.reason for recording in asked]


def record_outputs(
    references: Sequence[Program], *, time_limit_s: float = EVALPLUS_MAX_TIME_LIMIT_S, memory_limit_mb: int = 1024
) -> list[Recording]:
    """What reference solutions return, in their order; the rest is as for `run_programs`."""
    jobs, of_thread = max(1, min(os.cpu_count() or 1, len(references) // WORTH_A_WORKER)), threading.local()
    with (
        tempfile.TemporaryDirectory(prefix="marsbench-sandbox-") as scratch,
        ExitStack() as workers,
        ThreadPoolExecutor(jobs) as pool,  # after an interrupt, each worker ends with the program it is at
    ):

        def ask(program: Program) -> Recording:
            if not hasattr(of_thread, "worker"):
                of_thread.worker = workers.enter_context(closing(_Worker(scratch, time_limit_s, memory_limit_mb)))
            recording: Recording = of_thread.worker.ask(program)
            return recording

        return list(pool.map(ask, references))


class _Worker:
    """One `sandbox_worker` interpreter, started anew whenever a program takes it down."""

    def __init__(self, scratch: str, time_limit_s: float, memory_limit_mb: int) -> None:
        self._scratch, self._time_limit_s = scratch, time_limit_s
        self._environment = _environment(scratch, memory_limit_mb)
        self._start()

    def ask(self, program: Program) -> Recording:
        if self._process.poll() is not None:  # it ended while it had nothing to do, which is no program's doing
            self.close()
            self._start()
        reason: Reason = "killed"
        with suppress(EOFError, ConnectionError):
            self._connection.send(program)
            # Running and comparing are two calls of evalplus.
            if self._connection.poll(2 * (self._time_limit_s + EVALPLUS_SLACK_S)):
                message = self._connection.recv_bytes()
                word, _, record = message.partition(b"\n")
                if word.decode() not in get_args(Reason):
                    raise RuntimeError(f"the sandbox worker failed:\n{message.decode()}")
                stream = io.BytesIO(record)  # a pickled (output, seconds) for each call, where they were asked for
                pairs = [PlainUnpickler(stream).load() for _ in range(len(program.inputs) if record else 0)]
                return Recording(
                    cast(Reason, word.decode()), [output for output, _ in pairs], [seconds for _, seconds in pairs]
                )
            reason = "timeout"
        self.close()
        self._start()
        return Recording(reason, [], [])

    def close(self) -> None:
        """Kills the worker and whatever runs in its session."""
        if self._connection.closed:
            return
        with suppress(ProcessLookupError, PermissionError):  # macOS refuses where only a zombie is left
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._connection.close()

    def _start(self) -> None:
        with tempfile.TemporaryFile("w+") as log:
            for account in _accounts():
                try:
                    self._spawn(account, log.fileno())
                except OSError as error:  # this account cannot even reach the interpreter
                    print(error, file=log, flush=True)
                    continue
                with suppress(EOFError, ConnectionError):
                    if self._connection.poll(START_LIMIT_S) and self._connection.recv_bytes().decode() == READY:
                        if account is None and os.geteuid() == 0:
                            _warn_of_root()
                        return
                self.close()
            log.seek(0)
            raise UserError(
                "the sandbox for generated code did not start",
                where=log.read().strip().rpartition("\n")[2],
                fix='install the scoring packages: pip install "marsbench[eval]"',
            )

    def _spawn(self, account: pwd.struct_passwd | None, log_fd: int) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        if account:
            os.chown(self._scratch, account.pw_uid, account.pw_gid)
        arguments = [str(theirs.fileno()), str(self._time_limit_s)]
        with closing(theirs):
            self._process = subprocess.Popen(
                [sys.executable, "-m", "marsbench.evaluation.sandbox_worker", *arguments],
                cwd=self._scratch, env=self._environment, pass_fds=[theirs.fileno()], start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log_fd,
                user=account.pw_uid if account else None, group=account.pw_gid if account else None,
                extra_groups=[] if account else None,
            )  # fmt: skip


@cache
def _warn_of_root() -> None:
    print(
        f"warning: generated code runs as root, because user nobody cannot run {sys.executable}; "
        "install Python where everybody can read it, or start marsbench as another user",
        file=sys.stderr,
    )


def _accounts() -> list[pwd.struct_passwd | None]:
    """Whom to run the workers as, best first; None is the user of this process.

    Neither the limit on processes nor file permissions bind root, so `nobody` is tried first in its place.
    """
    if os.geteuid() == 0:
        with suppress(KeyError):
            return [pwd.getpwnam("nobody"), None]
    return [None]


def _environment(scratch: str, memory_limit_mb: int) -> dict[str, str]:
    """What a worker needs to start and to score alike every time; no secret of this process's environment."""
    return {
        "PATH": os.defpath,
        "HOME": scratch,
        "TMPDIR": scratch,
        "LANG": "C.UTF-8",
        "LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", ""),
        "PYTHONPATH": os.pathsep.join(os.path.abspath(folder) for folder in sys.path),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",  # the order of a set must not change a verdict
        "OMP_NUM_THREADS": "1",  # the worker forks, so numpy must not start threads in it
        "OPENBLAS_NUM_THREADS": "1",
        # evalplus reads this; -1 is its word for no limit.
        "EVALPLUS_MAX_MEMORY_BYTES": "-1" if sys.platform == "darwin" else str(memory_limit_mb * 2**20),
    }
