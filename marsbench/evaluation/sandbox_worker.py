"""The sandbox's worker: runs the programs that come by a pipe and says a word on each. `sandbox` starts it.

A program runs in a child, behind evalplus's guard and a lock, and what its function returns for each input is written
down. It is told no expected value, and nothing it says is a verdict: when it has ended, another child reads the record
as plain data and compares. So nothing is gained by printing, exiting, patching, or returning what equals everything.

evalplus's guard only replaces some functions of `os`; sockets, ctypes, files opened through `io` and raw forks remain.
So an audit hook refuses every audited action that is not plain computing, the few unaudited ways out are removed, and
resource limits bound the rest.
"""

import _posixsubprocess
import ctypes
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
import time
import zoneinfo
from collections import UserList, UserString, deque
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
from evalplus.eval import is_floats
from evalplus.eval._special_oracle import _poly
from evalplus.eval.utils import reliability_guard

from marsbench.evaluation.sandbox import PlainUnpickler, Program

DONE = 77  # exit status of a child that has done its work
WHY = {DONE: "passed", 1: "failed"} | dict.fromkeys((-signal.SIGALRM, -signal.SIGXCPU, None), "timeout")  # else killed
NO_NETWORK = 0x10000000 | 0x40000000  # of Linux's `unshare`: a namespace of users, in it one of networks
RECORD_BYTES = 2**28 - 1  # at most; HumanEval/15 of HumanEval+ takes 130 MB

# What generated code may do, as audit events. The hook looks more closely at imports and files.
HARMLESS_EVENTS = """
    array.__new__ builtins.id builtins.input code.__new__ compile exec function.__new__ glob.glob glob.glob/2
    marshal.dumps marshal.loads object.__delattr__ object.__getattr__ object.__setattr__ os.fwalk os.listdir os.putenv
    os.scandir os.unsetenv os.walk pathlib.Path.glob pathlib.Path.rglob pickle.find_class sys._getframe
    sys._getframemodulename sys.excepthook sys.unraisablehook time.sleep
"""
# They act without audit events, or make interpreters that have no hook.
REFUSED_MODULES = """
    ctypes _ctypes _dbm _gdbm _interpreters _multiprocessing _posixshmem _posixsubprocess _testcapi _testinternalcapi
    _tkinter _xxsubinterpreters readline
"""
_PATHS = (*map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")), os.path.dirname(np.__file__))
LIBRARIES = tuple(folder + os.sep for folder in (*_PATHS, *zoneinfo.TZPATH))
# Functions that reach beyond their process without an audit event.
UNAUDITED_OS = "mkfifo mknod pidfd_open sched_setaffinity sched_setparam sched_setscheduler setns setpgid setpgrp "
UNAUDITED_OS += "setpriority setsid unshare"
UNAUDITED = {os: UNAUDITED_OS, posix: UNAUDITED_OS, signal: "pidfd_send_signal"}
UNAUDITED |= {subprocess: "_fork_exec", _posixsubprocess: "fork_exec"}

# Values of classes made of plain ones or standing for them, such as named tuples, counters and views of dictionaries,
# are recorded as the plain values that they hold, whatever their class says that they equal.
_WHOLE = slice(None)
PLAIN: dict[type, Callable[[Any], Any]] = {
    str: str.__str__, int: int.__int__, float: float.__float__, complex: complex.__pos__, dict: dict.copy,
    set: set().union, frozenset: frozenset().union, tuple: lambda value: tuple.__getitem__(value, _WHOLE),
    list: lambda value: list.__getitem__(value, _WHOLE), bytes: lambda value: bytes.__getitem__(value, _WHOLE),
    bytearray: bytes, memoryview: bytes, Decimal: Decimal, Fraction: Fraction, deque: deque, UserList: list,
    UserString: str, Mapping: dict, Set: set, np.ndarray: lambda value: value.tolist() if value.size == 1 else value,
}  # fmt: skip


class PlainPickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        base = next((base for base in PLAIN if isinstance(value, base)), None)
        plain = value if base is None else PLAIN[base](value)
        return NotImplemented if type(plain) is type(value) else (type(plain), (plain,))


def main() -> None:
    """Run programs, and compare what each has returned with what is expected of it, until the pipe closes."""
    connection, record = Connection(int(sys.argv[1])), Path("record")
    if sys.platform == "linux":  # where users may not give up the network, the hook still refuses it
        ctypes.CDLL(None).unshare(NO_NETWORK)
    with suppress(EOFError):
        while True:
            program, limit_s, memory = connection.recv()
            until_s = min(limit_s, sum(program.limits_s or [limit_s]))
            reason, expected = _ended(until_s, run_locked, program, record, memory), connection.recv()
            if reason == "passed" and expected is not None:
                reason = _ended(limit_s, compare, program, expected, record, memory)
            connection.send_bytes(reason.encode())
            if reason == "passed" and expected is None:
                connection.send_bytes(record.read_bytes())
            expected = None  # the next program must not find what was expected of this one
            record.unlink(missing_ok=True)


def _ended(limit_s: float, work: Callable[..., None], *arguments: Any) -> str:
    child = multiprocessing.get_context("fork").Process(target=work, args=(limit_s, *arguments))
    child.start()
    until = time.monotonic() + limit_s
    wait([child.sentinel], limit_s)  # for its end; generated code may close the pipe that tells of it, and live on
    while child.exitcode is None and time.monotonic() < until:
        time.sleep(0.001)
    reason = WHY.get(child.exitcode, "killed")
    child.kill()
    child.join()
    return reason


def compare(_: float, program: Program, outputs: Sequence[Any], record: Path, memory: int) -> None:
    """End this process, by DONE if the recorded values equal the expected ones, by evalplus's rule.

    Any root answers HumanEval/32. evalplus 0.3.1 has a rule for that, but counts no input of the problem as done and
    so fails every program; hence the polynomial's value there is compared with zero.
    """
    if sys.platform != "darwin":  # a record may unfold to any size
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    is_root, atol = program.entry_point == "find_zero", program.atol
    with suppress(Exception), record.open("rb") as stream:  # what is no plain data, or cannot be compared, is not right
        for arguments, expected in zip(program.inputs, outputs, strict=True):
            value, _ = PlainUnpickler(stream).load()
            if is_root:
                value, expected = _poly(*arguments, value), 0.0
            atol = atol or (1e-6 if is_floats(expected) else 0.0)  # as in evalplus, from the first floats on
            right = value == expected
            if not right and atol and type(value) is type(expected):
                right = not isinstance(expected, list | tuple) or len(value) == len(expected)
                right = right and np.allclose(value, expected, rtol=1e-7, atol=atol)
            if not right:
                sys.exit(1)
        os._exit(DONE)
    sys.exit(1)


def run_locked(limit_s: float, program: Program, record: Path, memory: int) -> None:
    """Lock this process for good, run generated code in it, and record what its function returns, and when."""
    file = record.open("wb")
    os.close(int(sys.argv[1]))  # and with the pipe every descriptor through which generated code could speak
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)
    for kind, limit in (  # they add to the memory limits of evalplus's guard; that on processes does not bind root
        (resource.RLIMIT_CPU, math.ceil(limit_s) + 1), (resource.RLIMIT_FSIZE, RECORD_BYTES),
        (resource.RLIMIT_NPROC, 0), (resource.RLIMIT_NOFILE, 64), (resource.RLIMIT_CORE, 0),
    ):  # fmt: skip
        _, hard = resource.getrlimit(kind)
        lowest = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (lowest, lowest))
    end = os._exit
    reliability_guard(None if sys.platform == "darwin" else memory)
    for module, names in UNAUDITED.items():
        for name in names.split():
            setattr(module, name, None)
    sys.modules.update(dict.fromkeys(REFUSED_MODULES.split()))  # type: ignore[arg-type]  # None: not to be imported
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
        PlainPickler(file).dump((value, time.perf_counter() - start))
    file.flush()
    end(DONE)


def _refuse_side_effects() -> None:
    """Install an audit hook, never to be removed, that lets only computing and imports of libraries pass."""

    # Generated code can change every global and builtin name, and through frames, as a traceback leads to them, the
    # variables of functions around this one: so the hook uses defaults of its own.
    def hook(
        event: str, args: tuple[Any, ...], *, harmless: Any = frozenset(HARMLESS_EVENTS.split()),  # noqa: B008
        refused_modules: Any = frozenset(REFUSED_MODULES.split()), libraries: Any = LIBRARIES,  # noqa: B008
        writing: int = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC, string: Any = str, kind: Any = type,
        not_permitted: Any = PermissionError,
    ) -> None:  # fmt: skip
        permitted = event in harmless
        if event == "import":
            permitted = kind(args[0]) is string and args[0].rpartition(".")[2] not in refused_modules
        elif event == "open":
            path, mode, flags = args
            reads = mode in (None, "r", "rb") and not flags & writing
            permitted = reads and kind(path) is string and path.startswith(libraries) and ".." not in path
        if not permitted:
            raise not_permitted(f"{event} is refused in the sandbox")

    sys.addaudithook(hook)


if __name__ == "__main__":
    main()
