"""The code sandbox: right programs pass, and hostile ones neither pass nor leave anything behind.

Attacks are bounded, so that a broken sandbox fails a test and not the machine. Each returns True if it
succeeded, which is the answer that its test expects.
"""

from __future__ import annotations

import datetime
import re
import shutil
import socket
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from marsbench.errors import UserError
from marsbench.evaluation import sandbox
from marsbench.evaluation.sandbox import Program, Reason, Recording, record_outputs, run_programs

PASSED = "passed"
RIGHT = Program("def add(a, b):\n    return a + b", "add", [[1, 2], [3, 4]], [3, 7])

# Programs whose function `attack` returns True where it has succeeded: as a whole, or the body of that function.
TIME_WASTERS = {
    "endless loop": "while True:\n    pass",
    "endless loop that swallows exceptions": """
        while True:
            try:
                while True:
                    pass
            except BaseException:
                pass
    """,
    "endless loop at import": "while True:\n    pass\ndef attack():\n    return True",
    "sleep that disarms the alarm": """
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number in (signal.SIGALRM, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        while True:
            time.sleep(1)
    """,
    "sleep that cuts the line to evalplus": """
        signal.setitimer(signal.ITIMER_REAL, 0)
        os.closerange(3, 256)
        while True:
            time.sleep(1)
    """,
}
CRASHES = {
    "syntax error": "def attack(:",
    "no entry point": "def other():\n    return True",
    "exception": "1 / 0",
    "recursion": "attack()",
    "recursion without limit": "sys.setrecursionlimit(10**9)\nreturn [attack()]",
    "memory hog": "return len(bytearray(16 * 2**30)) > 0",
    "slow memory hog": "hoard = []\nfor _ in range(4096):\n    hoard.append([0] * 2**18)",
    "huge output on stdout": "for _ in range(4096):\n    print('x' * 2**20)",
}
FORGERIES = {
    "os._exit": "os._exit(0)",
    "sys.exit": "sys.exit(0)",
    "SystemExit at import": "raise SystemExit(0)\ndef attack():\n    return True",
    "equal to everything": """
        class Anything:
            def __eq__(self, other):
                return True
        return Anything()
    """,
    "a number equal to everything": """
        class Number(int):
            def __eq__(self, other):
                return True
        import_module("builtins").Number = Number
        return Number(0)
    """,
    "a library's object that is equal to everything": "return import_module('unittest.mock').ANY",
    "patched comparison": """
        import evalplus.eval, numpy
        evalplus.eval.is_floats = numpy.allclose = lambda *args, **kwargs: True
        return False
    """,
    "status in shared memory": """
        status, details, progress = import_module("multiprocessing").current_process()._args[-3:]
        status.value, details[0], progress.value = 0, True, 1
        os._exit(0)
    """,
    "verdict on every descriptor": """
        for fd in range(64):
            try:
                os.write(fd, b"\\x00\\x00\\x00\\x06passed")
            except OSError:
                pass
        return False
    """,
    "answer from the callers' frames": """
        frame = sys._getframe()
        while frame and "program" not in frame.f_locals:
            frame = frame.f_back
        return frame.f_locals["program"].expected[0]
    """,
    "answer from a traceback": """
        try:
            raise ValueError
        except ValueError as error:
            frame = error.__traceback__.tb_frame
        while frame and "program" not in frame.f_locals:
            frame = frame.f_back
        return frame.f_locals["program"].expected[0]
    """,
    "hook disarmed through a frame": """
        try:
            posix.fork()
        except PermissionError as error:
            trace = error.__traceback__
            while trace:
                trace.tb_frame.f_locals.update(harmless=["os.fork", "os.listdir"], permitted=True)
                trace = trace.tb_next
        posix.fork()
    """,
}
ESCAPES = {
    "os.fork": "[os.fork() for _ in range(4)]",
    "posix.fork": "[posix.fork() for _ in range(4)]",
    "multiprocessing": """
        import multiprocessing
        for method in ("fork", "spawn", "forkserver"):
            try:
                multiprocessing.get_context(method).Process(target=time.sleep, args=(60,)).start()
                return True
            except BaseException:
                pass
        return False
    """,
    "process pool": "return import_module('concurrent.futures').ProcessPoolExecutor(1).submit(abs, -1).result() == 1",
    "subprocess": "reload(import_module('subprocess')).Popen(['sleep', '60'])",
    "os.system": "return posix.system('sleep 60 &') == 0",
    "posix_spawn": "os.posix_spawn('/bin/sleep', ['sleep', '60'], {})",
    "fork_exec": """
        sys.modules.pop("_posixsubprocess")
        import_module("multiprocessing.util").spawnv_passfds(b"/bin/sleep", [b"sleep", b"60"], [])
    """,
    "another interpreter": """
        name = "_interpreters" if sys.version_info >= (3, 13) else "_xxsubinterpreters"
        sys.modules.pop(name, None)
        interpreters = import_module(name)
        run = getattr(interpreters, "exec", None) or interpreters.run_string
        run(interpreters.create(), f"import posix; posix.mkdir({FOLDER + '/new'!r})")
    """,
    "new session": "os.setsid()",
    "signal to the worker": "posix.kill(os.getppid(), 9)",
    "signal by descriptor": "signal.pidfd_send_signal(os.pidfd_open(os.getppid()), 9)",
    "os.remove": "posix.remove(VICTIM)",
    "shutil.rmtree": "os.unlink, os.rmdir = posix.unlink, posix.rmdir\nreload(import_module('shutil')).rmtree(FOLDER)",
    "pathlib": "os.unlink = posix.unlink\nimport_module('pathlib').Path(VICTIM).unlink()",
    "rename": "posix.rename(VICTIM, VICTIM + '2')",
    "chmod": "posix.chmod(VICTIM, 0)",
    "symlink": "posix.symlink('/', FOLDER + '/link')",
    "fifo": "posix.mkfifo(FOLDER + '/fifo')",
    "truncate": "io.open(VICTIM, 'w').close()",
    "file write": "return os.write(os.open(FOLDER + '/new', os.O_WRONLY | os.O_CREAT), b'x') == 1",
    "file write by whoever reads the answer": """
        class Letter:
            def __reduce__(self):
                return eval, (f"__import__('posix').mkdir({FOLDER!r} + '/new') is None",)
        return Letter()
    """,
    "file read": "return io.open(VICTIM).read() == 'precious'",
    "database": "import_module('sqlite3').connect(FOLDER + '/base').execute('create table t (x)')",
    "disk filling": """
        files = [import_module("tempfile").NamedTemporaryFile(delete=False) for _ in range(4)]
        return all(file.write(b"x" * 2**20) for file in files)
    """,
    "disk filling through open descriptors": """
        written = 0
        for fd in range(3, 64):
            try:
                for _ in range(128):
                    written += os.write(fd, b"x" * 2**20)
            except OSError:
                pass
        return written > 100 * 2**20
    """,
    "shared memory": """
        sys.modules.pop("_posixshmem", None)
        import _posixshmem
        fd = _posixshmem.shm_open("/marsbench-attack", os.O_CREAT | os.O_RDWR)
        _posixshmem.shm_unlink("/marsbench-attack")
        return os.write(fd, b"x") == 1
    """,
    "socket": "import_module('socket').create_connection(('127.0.0.1', PORT), timeout=1)",
    "http": "import_module('urllib.request').urlopen(f'http://127.0.0.1:{PORT}', timeout=1)",
    "ctypes": "return import_module('ctypes').CDLL(None).getpid() > 0",
    "ctypes, loaded anew": """
        for name in ("ctypes", "_ctypes"):
            sys.modules.pop(name, None)
        return import_module("ctypes").CDLL(None).getpid() > 0
    """,
    "lifted limits": """
        sys.modules.pop("resource", None)
        resource = import_module("resource")
        resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
    """,
    "disarmed hook": """
        import gc
        for thing in gc.get_objects():
            if getattr(thing, "__name__", "") == "hook":
                thing.__code__ = (lambda event, args: None).__code__
    """,
}


def whole(code: str) -> str:
    """A program of its own, or one around the body of its function."""
    code = textwrap.dedent(code)
    if re.search("^def ", code, re.M):
        return code
    imports = "import io, os, posix, signal, sys, time\nfrom importlib import import_module, reload\n"
    return f"{imports}def attack():\n{textwrap.indent(code, '    ')}\n    return True\n"


HOSTILE = {**TIME_WASTERS, **CRASHES, **FORGERIES, **ESCAPES}


@dataclass
class Outcome:
    """What a run of all hostile programs, with a right one after each, did to its surroundings."""

    verdicts: dict[str, Reason]
    neighbours: dict[str, Reason]
    elapsed_s: float
    folder: Path
    victim: Path
    was_called: bool


@pytest.fixture(scope="module")
def outcome() -> Iterator[Outcome]:
    """Of a folder that every user may enter and change, as permissions must not stand in for the sandbox."""
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", name)  # so that the sandbox's own scratch lies here, too
        victim = Path(name) / "precious" / "victim"
        victim.parent.mkdir()
        victim.write_text("precious")
        for path in (Path(name), victim.parent, victim):
            path.chmod(0o777)
        with socket.create_server(("127.0.0.1", 0)) as server:
            places = f"VICTIM, FOLDER, PORT = {str(victim)!r}, {str(victim.parent)!r}, {server.getsockname()[1]}\n"
            attacks = [Program(places + whole(code), "attack", [[]], [True]) for code in HOSTILE.values()]
            start = time.monotonic()
            both = [program for attack in attacks for program in (attack, RIGHT)]
            verdicts = run_programs(both, time_limit_s=1.0, memory_limit_mb=512)
            elapsed_s = time.monotonic() - start
            server.setblocking(False)
            was_called = False
            with suppress(BlockingIOError):
                server.accept()[0].close()
                was_called = True
        yield Outcome(
            dict(zip(HOSTILE, verdicts[::2], strict=True)), dict(zip(HOSTILE, verdicts[1::2], strict=True)), elapsed_s,
            Path(name), victim, was_called,
        )  # fmt: skip


def _processes_at_home_in(folder: Path) -> list[psutil.Process]:
    left = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("HOME", "").startswith(str(folder)):
                left.append(process)
    return left


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_program_is_held(outcome: Outcome, name: str) -> None:
    """Guards against an attack that gets through, a verdict that can be forged, a slow program told for a wrong one,
    and a dead or desynchronised worker that costs the next program its verdict.
    """
    assert outcome.verdicts[name] != PASSED and outcome.neighbours[name] == PASSED
    assert (outcome.verdicts[name] == "timeout") or name not in TIME_WASTERS
    assert (outcome.verdicts[name] == "killed") or name != "os._exit"


def test_hostile_programs_leave_nothing_behind(outcome: Outcome) -> None:
    """Guards against files changed outside, scratch left behind, a connection, orphans, and limits that add up."""
    assert outcome.elapsed_s < 40, "the time wasters alone need about 15 s of work"
    assert outcome.victim.read_text() == "precious" and outcome.victim.stat().st_mode & 0o777 == 0o777
    assert sorted(outcome.folder.rglob("*")) == [outcome.victim.parent, outcome.victim]
    assert not outcome.was_called
    deadline = time.monotonic() + 5
    while (left := _processes_at_home_in(outcome.folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


def check(code: str, expected: Any, *arguments: Any, entry_point: str = "f", atol: float = 0.0) -> Reason:
    program = Program(textwrap.dedent(code), entry_point, [list(arguments)], [expected], atol)
    return run_programs([program])[0]


VALUES: dict[str, Any] = {  # what a right program may return -> what it equals
    "1 + 1": 2,
    "0.1 + 0.2": 0.3,
    "[(1, 2), {'a': {3}}, None, 'x']": [(1, 2), {"a": {3}}, None, "x"],
    "float('inf')": float("inf"),
    "collections.Counter('aab')": {"a": 2, "b": 1},
    "collections.defaultdict(lambda: 0, a=1)": {"a": 1},
    "collections.OrderedDict(a=1)": {"a": 1},
    "collections.namedtuple('P', 'a b')(1, [2])": (1, [2]),
    "typing.NamedTuple('P', [('a', int)])(1)": (1,),
    "[type('S', (base,), {})(value) for base, value in ((str, 'x'), (int, 3), (float, 0.5), (list, [1]))]": [
        "x", 3, 0.5, [1]
    ],
    "[type('S', (base,), {})([1, 2]) for base in (tuple, set, frozenset)]": [(1, 2), {1, 2}, frozenset((1, 2))],
    "type('S', (complex,), {})(1j)": 1j,
    "[collections.UserList([1]), collections.UserString('x')]": [[1], "x"],
    "[collections.UserDict(a=1), collections.ChainMap({'a': 1}), types.MappingProxyType({'a': 1})]": 3 * [{"a": 1}],
    "[{'a': 1}.keys(), {'a': 1}.items()]": [{"a"}, {("a", 1)}],
    "[memoryview(b'x'), type('S', (bytearray,), {})(b'x')]": [b"x", b"x"],
    "[type('S', (base,), {})('0.5') for base in (decimal.Decimal, fractions.Fraction)]": [0.5, 0.5],
    "[datetime.date(2020, 2, 3), datetime.timedelta(1)]": [datetime.date(2020, 2, 3), datetime.timedelta(1)],
    "[int, ..., slice(1, 2)]": [int, ..., slice(1, 2)],
    "numpy.array([3])": [3],
    "enum.IntEnum('E', 'A B').B": 2,
    "enum.Enum('E', {'A': 'x'}, type=str).A": "x",
    "numpy.int64(3)": 3,
    "numpy.float64(0.5)": 0.5,
    "numpy.sqrt(4.0) > 1": True,
    "decimal.Decimal('0.5')": 0.5,
    "fractions.Fraction(1, 2)": 0.5,
    "sum(number for number in range(4))": 6,
    "functools.lru_cache(None)(abs)(-3)": 3,
    "list(collections.deque([1, 2], maxlen=1))": [2],
}  # fmt: skip


DEEDS = [  # that reach nothing
    "traceback.print_exc()", "traceback.format_exc()", "traceback.format_exception(error)", "logging.exception('so')",
    "traceback.extract_tb(error.__traceback__)", "traceback.print_stack()", "types.FunctionType(f.__code__, {})",
    "marshal.dumps([1])", "glob.glob('*')", "[*os.walk('.')]", "[*pathlib.Path('.').rglob('*')]", "inspect.stack()",
]  # fmt: skip
DOING = """
import glob, inspect, logging, marshal, os, pathlib, traceback, types
def f():
    try:
        return 1 / 0
    except ZeroDivisionError as error:
        {}
    return 1
"""
LIBRARIES = """
import asyncio, collections, dataclasses, datetime, enum, functools, hashlib, heapq, json, logging
import random, re, statistics, string, typing, warnings
import numpy as np
Pair = collections.namedtuple("Pair", "a b")
Colour = enum.Enum("Colour", "RED")
class Row(typing.NamedTuple):
    n: int
@dataclasses.dataclass(order=True)
class Item:
    n: int = 0
@functools.lru_cache(None)
def double(n: int) -> int:
    logging.warning("n %s", n)
    warnings.warn("n")
    return 2 * n
def f():
    random.seed(0)
    hashlib.md5(b"x").hexdigest()
    return double(Pair(1, 2).b + Row(3).n + Item(4).n + int(np.linalg.det(np.eye(2))))
"""
LIMITS = """
import sys
def f():
    del sys.modules["resource"]
    import resource
    kinds = resource.RLIMIT_CPU, resource.RLIMIT_NPROC, resource.RLIMIT_NOFILE, resource.RLIMIT_CORE
    file_size, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return [resource.getrlimit(kind)[1] for kind in kinds], 0 < file_size < 2**28
"""
ROOT = "def find_zero(coefficients):\n    return {}"
# What is told of a program: its code, what is expected of it, its tolerance, and the verdict.
TOLD: dict[str, tuple[Program, Reason]] = {
    **{
        f"a right value: {code}": (
            Program(
                "import collections, datetime, decimal, enum, fractions, functools, numpy, types, typing\n"
                f"def f():\n    return {code}", "f", [[]], [right],
            ), PASSED,
        )
        for code, right in VALUES.items()
    },
    **{deed: (Program(DOING.replace("{}", deed, 1), "f", [[]], [1]), PASSED) for deed in DEEDS},
    **{
        f"wrong: {code}": (Program(f"def f():\n    return {code}", "f", [[]], [expected]), "failed")
        for code, expected in [
            ("3", 2), ("'2'", 2), ("(1, 2)", [1, 2]), ("0.3001", 0.3), ("None", 0), ("lambda: 2", 2),
            ("[0.5, 1]", [0.5]), ("{1: 2}.values()", [2]), ("__import__('numpy').arange(2)", [0, 1]),
            ("type('S', (list,), {})([1])", (1,)), ("type('M', (dict,), {'__eq__': lambda *_: True})(a=1)", {"a": 2}),
        ]
    },
    **{
        f"one wrong value, {wrong}": (
            Program(f"def f(n):\n    return n != {wrong}", "f", [[n] for n in range(5)], [True] * 5), told
        )
        for wrong, told in ((0, "failed"), (2, "failed"), (4, "failed"), (9, PASSED))
    },
    **{
        f"within {atol}": (Program("def f():\n    return 1.001", "f", [[]], [1.0], atol), told)
        for atol, told in ((0.01, PASSED), (0.0001, "failed"))
    },
    **{  # which evalplus 0.3.1 fails, whatever they say
        f"{root} as a root of x^2 - 1": (
            Program(ROOT.format(root), "find_zero", [[[-1, 0, 1]]], [1.0], 1e-4), told
        )
        for root, told in ((1.0, PASSED), (-1.0, PASSED), (0.5, "failed"))
    },
    "what attacks are made of": (Program(whole("pass"), "attack", [[]], [True]), PASSED),
    "usual libraries": (Program(LIBRARIES, "f", [[]], [20]), PASSED),
    "limits of resources": (Program(LIMITS, "f", [[]], [([3, 0, 64, 0], True)]), PASSED),
}  # fmt: skip


@pytest.fixture(scope="module")
def verdicts() -> dict[str, Reason]:
    return dict(zip(TOLD, run_programs([program for program, _ in TOLD.values()]), strict=True))


@pytest.mark.parametrize("name", TOLD)
def test_a_program_is_told_right_from_wrong(verdicts: dict[str, Reason], name: str) -> None:
    """Guards against values that are lost or changed on their way out of the sandbox, a lock so tight that it fails
    right programs, a comparison that accepts what evalplus rejects, and limits that other layers would hide.
    """
    assert verdicts[name] == TOLD[name][1]


def test_worker_sees_neither_secrets_nor_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a parent's environment, torch or threads reaching the sandbox."""
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert torch.ones(8, 8).sum() == 64
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    code = "import os, sys\ndef f():\n    return 'HF_TOKEN' in os.environ or 'torch' in sys.modules"
    try:
        assert check(code, False) == PASSED
    finally:
        stop.set()
        thread.join()


def test_outputs_and_times_are_recorded() -> None:
    """Guards against outputs that are lost, changed or exchanged, and against times that are not the calls'."""
    code = (
        "import collections, time\ndef f(x, s):\n    time.sleep(s)\n    return [x, x], collections.Counter('aab'), 0.5"
    )
    inputs = [["first", 0.0], ["second", 0.3]]
    [recording] = record_outputs([Program(code, "f", inputs, None)])
    assert recording.outputs == [([word, word], {"a": 2, "b": 1}, 0.5) for word, _ in inputs]
    assert recording.seconds[0] < 0.2 < recording.seconds[1] < 0.6


def test_large_outputs_are_recorded() -> None:
    """Guards against the limit of programs, which would cut the 130 MB of HumanEval/15's reference."""
    [recording] = record_outputs([Program("def f(size):\n    return 'x' * size", "f", [[2**27]], None)])
    assert [len(output) for output in recording.outputs] == [2**27]


@pytest.mark.parametrize("code, reason", [("def f(:", "failed"), ("import os\nos._exit(0)", "killed")])
def test_outputs_of_broken_code_are_not_recorded(code: str, reason: Any) -> None:
    """Guards against half a recording, against which every program would fail."""
    assert record_outputs([Program(code, "f", [[]], None)]) == [Recording(reason, [], [])]


@pytest.mark.parametrize("obstacle", ["pass", "signal.signal(signal.SIGALRM, signal.SIG_IGN)"])
def test_limit_of_one_input_ends_a_program(obstacle: str) -> None:
    """Guards against a program that outlasts its first input's limit, by catching it or by changing the handler."""
    code = f"""
        import signal
        {obstacle}
        def f():
            while True:
                try:
                    while True:
                        pass
                except BaseException:
                    pass
    """
    program = Program(textwrap.dedent(code), "f", [[]] * 20, [None] * 20, limits_s=[0.5] * 20)
    start = time.monotonic()
    assert run_programs([program], time_limit_s=60.0) == ["timeout"]
    assert time.monotonic() - start < 8  # the limits of all inputs make 10 s


def test_programs_that_are_not_asked_anything_are_refused() -> None:
    """Guards against programs that pass because nothing was asked of them, and inputs without a limit."""
    assert run_programs([]) == []
    with pytest.raises(ValueError, match="0 inputs"):
        Program("", "f", [], [])
    with pytest.raises(ValueError, match="2 inputs, 1 limits"):
        Program("", "f", [[], []], [1, 1], limits_s=[1.0])


BOMB = """
import os, pickle
def f():
    data = b"\\x80\\x02cbuiltins\\nlist\\ncbuiltins\\nrange\\nJ\\xff\\xff\\xff\\x7f\\x85R\\x85R."
    for fd in range(3, 64):
        try:
            os.write(fd, data)
        except OSError:
            pass
"""


def test_a_record_that_unfolds_to_any_size_is_refused() -> None:
    """Guards against a few bytes of plain data that take all memory where they are compared."""
    assert run_programs([Program(BOMB, "f", [[]], [None])], memory_limit_mb=1024) == ["failed"]


def test_fault_of_the_worker_is_raised() -> None:
    """Guards against faults of our own that are scored as the program's."""

    class Unloadable:
        def __reduce__(self) -> tuple[Any, ...]:
            return int, ("x",)

    with pytest.raises(RuntimeError, match="invalid literal"):
        run_programs([Program("", "f", [[Unloadable()]], [None])])


def test_worker_that_cannot_start_is_the_users_to_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an endless wait, or silent zeros, where evalplus is missing."""
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(UserError, match="did not start"):
        run_programs([RIGHT])


def test_a_worker_that_was_killed_between_two_programs_is_nobodys_fault() -> None:
    """Guards against a verdict "killed" on a program that never ran."""
    with tempfile.TemporaryDirectory() as scratch, closing(sandbox._Worker(scratch, 2.0, 1024)) as worker:
        assert worker.ask(RIGHT).reason == "passed"
        worker._process.kill()
        worker._process.wait()
        assert worker.ask(RIGHT).reason == "passed"
