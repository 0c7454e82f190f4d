"""Runs generated Python programs and says which of them are right, or records what reference solutions return.

Worker interpreters, one per job, run `sandbox_worker`: without torch, secrets or any way back to this process but one
pipe, and without a network where the system lets users give theirs up (`unshare`). There evalplus's guard, limits on
resources and a hook that refuses all but computing hold careless and mischievous programs: they get the standard
library and numpy, but no files, databases, processes, sockets, tracing or ctypes (so no asyncio, scipy, pandas or
sympy either).

This is no virtual machine. A fault of CPython or numpy that lets a program write to memory gets past all of it, and
what is past it acts as the user who scores; programs may read what the interpreter has loaded, and they share the
machine's time and memory up to their limits. Score what was written to attack in a container, as a user of its own.
"""

import io
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, cast, get_args

from marsbench.errors import UserError

# failed: wrong value or exception; timeout: past the time limit; killed: the process ended early.
Reason = Literal["passed", "failed", "timeout", "killed"]
READY = b"ready"
START_LIMIT_S = 60.0
WORTH_A_WORKER = 16  # programs; fewer are run in the time that a worker takes to start
SLACK_S = 5.0  # that a worker may take beyond a program's time
EVALPLUS_MAX_TIME_LIMIT_S = 60.0
MIN_RECORD_BYTES, MAX_RECORD_BYTES = 64 * 2**20, 512 * 2**20  # HumanEval/15 of HumanEval+ takes 130 MB

# Classes, beyond those that pickle knows by itself, whose values may leave the sandbox.
_BUILTINS = "Ellipsis NotImplemented bytearray bytes complex dict float frozenset int list range set slice str tuple"
PLAIN_CLASSES = {
    *(("builtins", name) for name in _BUILTINS.split()),
    *(("datetime", name) for name in ("date", "datetime", "time", "timedelta", "timezone")),
    ("collections", "deque"), ("decimal", "Decimal"), ("fractions", "Fraction"), ("numpy", "dtype"),
    ("numpy.core.multiarray", "scalar"), ("numpy._core.multiarray", "scalar"),
}  # fmt: skip


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

    `time_limit_s` is wall-clock time for all inputs of a program together. `memory_limit_mb` bounds its address space,
    except on macOS, which has no such limit. `UserError` if no worker can start.
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
        self._scratch, self._time_limit_s, self._memory = scratch, time_limit_s, memory_limit_mb * 2**20
        self._start()

    def ask(self, program: Program) -> Recording:
        # While the program runs, nothing of what is expected is in the worker.
        expected, most_bytes = program.expected, MAX_RECORD_BYTES
        if expected is not None:  # a right one records about as much
            most_bytes = MIN_RECORD_BYTES + 4 * len(pickle.dumps(expected))
        limit_s = min(self._time_limit_s, sum(program.limits_s or [self._time_limit_s]))
        reason, record = self._reply("record", replace(program, expected=None), limit_s, most_bytes, self._memory)
        if reason == "passed" and expected is None:
            stream = io.BytesIO(record)
            pairs = [PlainUnpickler(stream).load() for _ in program.inputs]
            return Recording(reason, [output for output, _ in pairs], [seconds for _, seconds in pairs])
        return Recording(
            reason if reason != "passed" else self._reply("compare", program, record, self._memory)[0], [], []
        )

    def _reply(self, *request: Any) -> tuple[Reason, bytes]:
        """The worker's word, and the record behind it."""
        if self._process.poll() is not None:  # it ended while it had nothing to do, which is no program's doing
            self.close()
            self._start()
        reason: Reason = "killed"
        with suppress(EOFError, ConnectionError):
            self._connection.send(request)
            if self._connection.poll(self._time_limit_s + SLACK_S):
                word, _, record = self._connection.recv_bytes().partition(b"\n")
                if word.decode() not in get_args(Reason):
                    raise RuntimeError(f"the sandbox worker failed:\n{word.decode()}\n{record.decode()}")
                return cast(Reason, word.decode()), record
            reason = "timeout"
        self.close()
        self._start()
        return reason, b""

    def close(self) -> None:
        """Kill the worker and all that runs in its session."""
        if self._connection.closed:
            return
        with suppress(ProcessLookupError, PermissionError):  # macOS refuses where only a zombie is left
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._connection.close()

    def _start(self) -> None:
        # What a worker needs to start and to score alike every time; no secret of this process's environment.
        environment = {
            "PATH": os.defpath, "HOME": self._scratch, "TMPDIR": self._scratch, "LANG": "C.UTF-8",
            "LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", ""), "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": os.pathsep.join(os.path.abspath(folder) for folder in sys.path),
            "PYTHONHASHSEED": "0",  # the order of a set must not change a verdict
            "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",  # the worker forks: numpy must not start threads
        }  # fmt: skip
        unshare = shutil.which("unshare")
        with tempfile.TemporaryFile("w+") as log:
            for without_network in ([[unshare, "--user", "--net"]] if unshare else []) + [[]]:
                self._connection, theirs = multiprocessing.Pipe()
                with closing(theirs):
                    self._process = subprocess.Popen(
                        [*without_network, sys.executable, "-m", "marsbench.evaluation.sandbox_worker",
                         str(theirs.fileno())],
                        cwd=self._scratch, env=environment, pass_fds=[theirs.fileno()], start_new_session=True,
                        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log,
                    )  # fmt: skip
                with suppress(EOFError, ConnectionError):
                    if self._connection.poll(START_LIMIT_S) and self._connection.recv_bytes() == READY:
                        return
                self.close()
            log.seek(0)
            raise UserError(
                "the sandbox for generated code did not start",
                where=log.read().strip().rpartition("\n")[2],
                fix='install the scoring packages: pip install "marsbench[eval]"',
            )
