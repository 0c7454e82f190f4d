"""Runs generated Python programs and says which of them are right, or records what reference solutions return.

Worker interpreters, one per job, run `sandbox_worker`: without torch, secrets or any way back to this process but one
pipe, and without a network where Linux lets users give theirs up. There evalplus's guard, limits on resources and a
hook that refuses all but computing hold careless and mischievous programs: they get the standard library and numpy, but
no files, databases, processes, sockets, tracing or ctypes (so no asyncio, scipy, pandas or sympy either).

This is no virtual machine. A fault of CPython or numpy that lets a program write to memory gets past all of it, and
what is past it acts as the user who scores; programs may read what the interpreter has loaded, and they share the
machine's time and memory up to their limits. Score what was written to attack in a container, as a user of its own.
"""

import io
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from multiprocessing.connection import Connection
from typing import IO, Any, Literal, cast

from marsbench.errors import UserError

# failed: wrong value or exception; timeout: past the time limit; killed: the process ended early.
Reason = Literal["passed", "failed", "timeout", "killed"]
WORTH_A_WORKER = 16  # programs; fewer are run in the time that a worker takes to start
EVALPLUS_MAX_TIME_LIMIT_S = 60.0

# Classes, beyond those that pickle knows by itself, whose values may leave the sandbox.
_BUILTINS = "Ellipsis NotImplemented bytearray bytes complex dict float frozenset int list range set slice str tuple"
PLAIN_CLASSES = {
    *(("builtins", name) for name in _BUILTINS.split()),
    *(("datetime", name) for name in ("date", "datetime", "time", "timedelta", "timezone")),
    ("collections", "deque"), ("decimal", "Decimal"), ("fractions", "Fraction"), ("numpy", "dtype"),
    ("numpy.core.multiarray", "scalar"), ("numpy._core.multiarray", "scalar"),
}  # fmt: skip


class PlainUnpickler(pickle.Unpickler):
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
    outputs: list[Any] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def run_programs(
    programs: Sequence[Program], *, time_limit_s: float = 2.0, memory_limit_mb: int = 1024
) -> list[Reason]:
    """Verdicts in the order of `programs`, which have limits of time for all inputs and, but on macOS, of memory."""
    ran = record_outputs(programs, time_limit_s=time_limit_s, memory_limit_mb=memory_limit_mb)
    return [recording.reason for recording in ran]


def record_outputs(
    programs: Sequence[Program], *, time_limit_s: float = EVALPLUS_MAX_TIME_LIMIT_S, memory_limit_mb: int = 1024
) -> list[Recording]:
    jobs = max(1, min(os.cpu_count() or 1, len(programs) // WORTH_A_WORKER))
    parts = [programs[len(programs) * job // jobs : len(programs) * (job + 1) // jobs] for job in range(jobs)]

    def ask(pipe: Connection, part: Sequence[Program]) -> list[Recording]:
        recordings = []
        for program in part:
            pipe.send((replace(program, expected=None), time_limit_s, memory_limit_mb * 2**20))
            pipe.send(program.expected)  # read when it has run: before, nothing of what is expected is in the worker
            reason, pairs = cast(Reason, pipe.recv_bytes().decode()), list[tuple[Any, float]]()
            if reason == "passed" and program.expected is None:
                stream = io.BytesIO(pipe.recv_bytes())
                pairs = [PlainUnpickler(stream).load() for _ in program.inputs]
            recordings.append(Recording(reason, [output for output, _ in pairs], [seconds for _, seconds in pairs]))
        return recordings

    with ThreadPoolExecutor(jobs) as pool, tempfile.TemporaryFile("w+") as log, ExitStack() as workers:
        try:
            pipes = [workers.enter_context(_worker(log)) for _ in parts]
            return list(chain.from_iterable(pool.map(ask, pipes, parts)))
        except (EOFError, ConnectionError) as error:
            log.seek(0)
            last, fix = log.read().strip().rpartition("\n")[2], "pip install 'marsbench[eval]'; or free memory"
            raise UserError("the sandbox for generated code has failed", where=last, fix=fix) from error


@contextmanager
def _worker(log: IO[str]) -> Iterator[Connection]:
    """The pipe to a worker, which in the end is killed with all that runs in its session."""
    pipe, theirs = multiprocessing.Pipe()
    with pipe, tempfile.TemporaryDirectory(prefix="marsbench-sandbox-") as scratch:
        # What a worker needs to start and to score alike every time; no secret of this process's environment.
        environment = {
            "PATH": os.defpath, "HOME": scratch, "TMPDIR": scratch, "LANG": "C.UTF-8",
            "LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", ""), "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": os.pathsep.join(os.path.abspath(folder) for folder in sys.path),
            "PYTHONHASHSEED": "0",  # the order of a set must not change a verdict
            "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",  # the worker forks: numpy must not start threads
        }  # fmt: skip
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "marsbench.evaluation.sandbox_worker", str(theirs.fileno())],
                cwd=scratch, env=environment, pass_fds=[theirs.fileno()], start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log,
            )  # fmt: skip
        try:
            yield pipe
        finally:
            with suppress(ProcessLookupError, PermissionError):  # macOS refuses where only a zombie is left
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
