"""The sandbox's worker: reads programs from a pipe and answers each with one word. `sandbox` starts it.

Every program takes two children of evalplus's `untrusted_check`:

1. The first runs the generated code behind evalplus's guard and the lock of this module, and records what the
   function returns for each input. It is told no expected value, and nothing it says is a verdict.
2. The second never meets the generated code: it reads the record as plain data, and evalplus compares.

Mere calls, of a reference solution, take the first child only, and the record itself goes back.

So nothing is gained by printing, exiting, patching evalplus, or returning an object that equals everything.

The lock exists because evalplus's guard only replaces some functions of `os`; sockets, ctypes, files opened
through `io` and raw forks remain. An audit hook refuses every audited action that is not plain computing, the
few unaudited ways out are removed, and resource limits bound the rest.
"""

from __future__ import annotations

import _posixsubprocess
import copyreg
import math
import multiprocessing
import os
import pickle
import posix
import resource
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import traceback
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import IO, Any

import numpy as np
from evalplus.eval import FAIL, PASS, untrusted_check
from evalplus.eval._special_oracle import _poly

from marsbench.evaluation.sandbox import READY, PlainUnpickler, Program, Reason

MIN_RECORD_LIMIT_BYTES = 64 * 2**20
REFERENCE_RECORD_LIMIT_BYTES = 512 * 2**20  # HumanEval/15 of HumanEval+ takes 130 MB

# What generated code may do, as audit events. The hook looks more closely at imports, files and frames.
HARMLESS_EVENTS = {"array.__new__", "builtins.id", "code.__new__", "compile", "exec", "marshal.loads"}
HARMLESS_EVENTS |= {"object.__delattr__", "object.__setattr__", "os.listdir", "os.putenv", "os.scandir"}
HARMLESS_EVENTS |= {"os.unsetenv", "pickle.find_class", "sys._getframemodulename", "sys.excepthook"}
HARMLESS_EVENTS |= {"sys.unraisablehook", "time.sleep"}
FRAMES = {"tb_frame", "gi_frame", "cr_frame", "ag_frame"}  # they lead to the variables of the worker
# They act without audit events, or make interpreters that have no hook.
REFUSED_MODULES = {"ctypes", "_ctypes", "_posixshmem", "_posixsubprocess", "_interpreters", "_xxsubinterpreters"}
LIBRARY_FOLDERS = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
LIBRARIES = (*(folder + os.sep for folder in LIBRARY_FOLDERS), os.path.dirname(np.__file__) + os.sep)

# Functions that reach beyond their process without an audit event.
UNAUDITED_OS = "mkfifo mknod pidfd_open setns setpgid setpgrp setpriority setsid unshare"
UNAUDITED = {os: UNAUDITED_OS, posix: UNAUDITED_OS, signal: "pidfd_send_signal"}
UNAUDITED |= {subprocess: "_fork_exec", _posixsubprocess: "fork_exec"}

for mapping in (Counter, OrderedDict, defaultdict):  # recorded as the plain dict that they equal
    copyreg.pickle(mapping, lambda items: (dict, (dict(items),)))


def main() -> None:
    """Serves programs until the other end of the pipe closes."""
    multiprocessing.set_start_method("fork")  # evalplus hands live objects to its child
    connection, time_limit_s = Connection(int(sys.argv[1])), float(sys.argv[2])
    connection.send_bytes(READY.encode())
    with suppress(EOFError):
        while True:
            message = connection.recv_bytes()
            try:
                reply = answer(pickle.loads(message), time_limit_s, len(message))
            except Exception:
                reply = traceback.format_exc().encode()
            connection.send_bytes(reply)


def answer(program: Program, time_limit_s: float, size_bytes: int) -> bytes:
    """The word on a program of so many bytes as a pickle, or for mere calls: theirs, a line break and their record."""
    time_limit_s = min(time_limit_s, sum(program.limits_s or [time_limit_s]))
    record_limit_bytes = REFERENCE_RECORD_LIMIT_BYTES
    if program.expected is not None:  # a right one records about as much as is expected of it
        record_limit_bytes = MIN_RECORD_LIMIT_BYTES + 4 * size_bytes
    with tempfile.TemporaryFile() as record:
        reason = run(program, record, time_limit_s, record_limit_bytes)
        record.seek(0)
        if reason != "passed":
            return reason.encode()
        if program.expected is not None:
            return b"passed" if _is_right(program, record, time_limit_s) else b"failed"
        return b"passed\n" + record.read()


def run(program: Program, record: IO[bytes], time_limit_s: float, record_limit_bytes: int) -> Reason:
    """Makes the calls in a child, which writes down what they return; passed: all of them returned."""
    start = time.monotonic()
    # For evalplus, all inputs of the program are one call under one time limit.
    arguments = [replace(program, expected=None), record, time_limit_s, record_limit_bytes]
    status = _evalplus(f"from {__name__} import run_locked as call", [arguments], [None], 0.0, time_limit_s)
    if status == PASS:
        return "passed"
    # The limit of one input ends the child before it can tell evalplus a status.
    limit_s = time_limit_s if status == FAIL else min(program.limits_s or [time_limit_s])
    if time.monotonic() - start >= limit_s:
        return "timeout"
    return "failed" if status == FAIL else "killed"


def _is_right(program: Program, record: IO[bytes], time_limit_s: float) -> bool:
    """Whether evalplus finds the recorded values equal to the expected ones."""
    # Any root answers HumanEval/32. evalplus 0.3.1 has a rule for that, but counts no input of the problem as
    # done and so fails every program; hence the polynomial's value there is compared with zero.
    is_root = program.entry_point == "find_zero"
    expected = [0.0] * len(program.inputs) if is_root else program.expected or []
    code = f"from {__name__} import replayer\ncall = replayer({record.fileno()}, {is_root})"
    return bool(_evalplus(code, program.inputs, expected, program.atol, time_limit_s) == PASS)


def _evalplus(code: str, inputs: list[Any], expected: list[Any], atol: float, time_limit_s: float) -> str:
    """evalplus's word on the function `call` that `code` defines, with `time_limit_s` for each input."""
    no_times = [0.0] * len(inputs)
    status, _ = untrusted_check(
        "", code, inputs, "call", expected, atol, no_times, fast_check=True, min_time_limit=time_limit_s
    )
    return str(status)


def replayer(record_fd: int, is_root: bool) -> Callable[..., Any]:
    """A function returning the recorded values in turn, or the value of its argument's polynomial there."""
    record = os.fdopen(record_fd, "rb")

    def replay(*arguments: Any) -> Any:
        value, _ = PlainUnpickler(record).load()
        return _poly(*arguments, value) if is_root else value

    return replay


def run_locked(program: Program, record: IO[bytes], time_limit_s: float, record_limit_bytes: int) -> None:
    """Locks this process for good, runs generated code in it, and records what its function returns, and when."""
    os.close(int(sys.argv[1]))  # and with the pipe every descriptor through which generated code could speak
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)
    _limit_resources(time_limit_s, record_limit_bytes)
    for module, names in UNAUDITED.items():
        for name in names.split():
            setattr(module, name, None)
    sys.modules.update(dict.fromkeys(REFUSED_MODULES))  # type: ignore[arg-type]  # None: not to be imported
    _refuse_side_effects()
    namespace: dict[str, Any] = {}
    exec(program.code, namespace)
    function = namespace[program.entry_point]
    for index, arguments in enumerate(program.inputs):
        if program.limits_s:  # ends this process then, however it swallows exceptions
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, program.limits_s[index])
        start = time.perf_counter()
        value = function(*arguments)
        pickle.dump((value, time.perf_counter() - start), record)
    record.flush()


def _limit_resources(time_limit_s: float, record_limit_bytes: int) -> None:
    """Adds to the memory limits that evalplus has set. The limit on processes does not bind root."""
    for kind, limit in (
        (resource.RLIMIT_CPU, math.ceil(time_limit_s) + 1),  # ends loops that survive evalplus's alarm
        (resource.RLIMIT_FSIZE, record_limit_bytes),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        lowest = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (lowest, lowest))


def _refuse_side_effects() -> None:
    """Installs an audit hook, never to be removed, that lets only computing and imports of libraries pass."""
    # Generated code can change every global and builtin name, so the hook uses copies of its own.
    harmless, refused_modules, frames = map(frozenset, (HARMLESS_EVENTS, REFUSED_MODULES, FRAMES))
    libraries, read_modes = LIBRARIES, (None, "r", "rb")
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
    string, kind, not_permitted, no_frame = str, type, PermissionError, ValueError

    def hook(event: str, args: tuple[Any, ...]) -> None:
        permitted = event in harmless
        if event == "import":
            permitted = kind(args[0]) is string and args[0] not in refused_modules
        elif event == "open":
            path, mode, flags = args
            reads = mode in read_modes and not flags & writing
            permitted = reads and kind(path) is string and path.startswith(libraries) and ".." not in path
        elif event == "object.__getattr__":
            permitted = args[1] not in frames
        elif event == "sys._getframe":
            raise no_frame("there are no frames in the sandbox")  # namedtuple, enum and typing are prepared
        if not permitted:
            raise not_permitted(f"{event} is refused in the sandbox")

    sys.addaudithook(hook)


if __name__ == "__main__":
    main()
