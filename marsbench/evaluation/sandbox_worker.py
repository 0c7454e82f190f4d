"""The sandbox's worker: reads requests from a pipe and answers each with a word. `sandbox` starts it.

A program runs in a child, behind evalplus's guard and a lock, and what its function returns for each input is written
down. It is told no expected value, and nothing it says is a verdict: when it has ended, the record is read as plain
data and compared here. So nothing is gained by printing, exiting, patching, or returning what equals everything.

The lock exists because evalplus's guard only replaces some functions of `os`; sockets, ctypes, files opened through
`io` and raw forks remain. An audit hook refuses every audited action that is not plain computing, the few unaudited
ways out are removed, and resource limits bound the rest.
"""

import _posixsubprocess
import io
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
import zoneinfo
from collections import UserList, UserString, deque
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from multiprocessing.connection import Connection
from typing import IO, Any

import numpy as np
from evalplus.eval import is_floats
from evalplus.eval._special_oracle import _poly
from evalplus.eval.utils import reliability_guard

from marsbench.evaluation.sandbox import READY, PlainUnpickler, Program, Reason

DONE = 77  # exit status of a child that has made all calls
LATE = (-signal.SIGALRM, -signal.SIGXCPU, None)  # those of a child that took too long

# What generated code may do, as audit events. The hook looks more closely at imports and files.
HARMLESS_EVENTS = """
    array.__new__ builtins.id builtins.input code.__new__ compile exec function.__new__ glob.glob glob.glob/2
    marshal.dumps marshal.loads object.__delattr__ object.__getattr__ object.__setattr__ os.fwalk os.listdir os.putenv
    os.scandir os.unsetenv os.walk pathlib.Path.glob pathlib.Path.rglob pickle.find_class sys._getframe
    sys._getframemodulename sys.excepthook sys.unraisablehook time.sleep
"""
# They act without audit events, or make interpreters that have no hook.
REFUSED_MODULES = "ctypes _ctypes _posixshmem _posixsubprocess _interpreters _xxsubinterpreters"
LIBRARIES = tuple(
    folder + os.sep
    for folder in (
        *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")), os.path.dirname(np.__file__),
        *zoneinfo.TZPATH,
    )
)  # fmt: skip
# Functions that reach beyond their process without an audit event.
UNAUDITED_OS = "mkfifo mknod pidfd_open setns setpgid setpgrp setpriority setsid unshare"
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
    """Writes values of such classes as plain ones."""

    def reducer_override(self, value: Any) -> Any:
        base = next((base for base in PLAIN if isinstance(value, base)), None)
        plain = value if base is None else PLAIN[base](value)
        return NotImplemented if type(plain) is type(value) else (type(plain), (plain,))


def main() -> None:
    """Serve requests until the other end of the pipe closes."""
    connection = Connection(int(sys.argv[1]))
    connection.send_bytes(READY)
    with suppress(EOFError):
        while True:
            message = connection.recv_bytes()
            try:
                what, *arguments = pickle.loads(message)
                reply = record(*arguments) if what == "record" else compare(*arguments)
            except Exception:
                reply = traceback.format_exc().encode()
            message, arguments = b"", []  # the next program must not find what was expected of this one
            connection.send_bytes(reply)


def record(program: Program, limit_s: float, most_bytes: int, memory: int) -> bytes:
    """`passed`, a line break and what all calls returned, each with its seconds; or why they did not return."""
    with tempfile.TemporaryFile() as file:
        child = multiprocessing.get_context("fork").Process(
            target=run_locked, args=(program, file, limit_s, most_bytes, memory)
        )
        child.start()
        child.join(limit_s)
        ended = child.exitcode
        child.kill()
        child.join()
        file.seek(0)
        if ended == DONE:
            return b"passed\n" + file.read()
    reason: Reason = "timeout" if ended in LATE else "failed" if ended == 1 else "killed"
    return reason.encode()


def compare(program: Program, recorded: bytes, memory: int) -> bytes:
    """Whether the recorded values equal the expected ones, by evalplus's rule.

    Any root answers HumanEval/32. evalplus 0.3.1 has a rule for that, but counts no input of the problem as done and
    so fails every program; hence the polynomial's value there is compared with zero.
    """
    stream, is_root, atol = io.BytesIO(recorded), program.entry_point == "find_zero", program.atol
    before = resource.getrlimit(resource.RLIMIT_AS)
    try:
        if sys.platform != "darwin":  # a record may unfold to any size
            resource.setrlimit(resource.RLIMIT_AS, (memory, before[1]))
        for arguments, expected in zip(program.inputs, program.expected or [], strict=True):
            value, _ = PlainUnpickler(stream).load()
            if is_root:
                value, expected = _poly(*arguments, value), 0.0
            atol = atol or (1e-6 if is_floats(expected) else 0.0)  # as in evalplus, from the first floats on
            if not (value == expected or (atol and _close(value, expected, atol))):
                return b"failed"
        return b"passed"
    except Exception:  # what is no plain data, or cannot be compared, is not right
        return b"failed"
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _close(value: Any, expected: Any, atol: float) -> bool:
    if type(value) is not type(expected) or (isinstance(expected, list | tuple) and len(value) != len(expected)):
        return False
    return bool(np.allclose(value, expected, rtol=1e-7, atol=atol))


def run_locked(program: Program, file: IO[bytes], limit_s: float, most_bytes: int, memory: int) -> None:
    """Lock this process for good, run generated code in it, and record what its function returns, and when."""
    os.close(int(sys.argv[1]))  # and with the pipe every descriptor through which generated code could speak
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)
    for kind, limit in (  # they add to the memory limits of evalplus's guard; that on processes does not bind root
        (resource.RLIMIT_CPU, math.ceil(limit_s) + 1), (resource.RLIMIT_FSIZE, most_bytes), (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, 64), (resource.RLIMIT_CORE, 0),
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
            permitted = kind(args[0]) is string and args[0] not in refused_modules
        elif event == "open":
            path, mode, flags = args
            reads = mode in (None, "r", "rb") and not flags & writing
            permitted = reads and kind(path) is string and path.startswith(libraries) and ".." not in path
        if not permitted:
            raise not_permitted(f"{event} is refused in the sandbox")

    sys.addaudithook(hook)


if __name__ == "__main__":
    main()
