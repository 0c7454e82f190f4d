"""The code sandbox: right programs pass, and hostile ones neither pass nor leave anything behind.

Attacks are bounded, so that a broken sandbox only fails a test. Each returns True if it
succeeded, which is the answer that its test expects.
"""

import datetime
import json
import os
import re
import shutil
import socket
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch
from urllib.error import URLError

import evalplus.data.humaneval
import psutil
import pytest
import wget

from marsbench.errors import UserError
from marsbench.evaluation import humaneval
from marsbench.evaluation.humaneval import Problem, load_problems, pass_at_1, run_completions, score_programs
from marsbench.evaluation.sandbox import Program, Reason, Recording, record_outputs, run_programs

PASSED = "passed"
RIGHT = Program("def add(a, b):\n    return a + b", "add", [[1, 2], [3, 4]], [3, 7])

# Programs with a function `attack`, or bodies of that function; it returns True where the attack has succeeded.
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
    "sleep that disarms the alarm and closes all descriptors": """
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number in (signal.SIGALRM, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        os.closerange(3, 256)
        while True:
            time.sleep(1)
    """,
}
CRASHES = {
    "syntax error": "def attack(:",
    "no entry point": "def other():\n    return True",
    "exception": "1 / 0",
    "recursion without limit": "sys.setrecursionlimit(10**9)\nreturn [attack()]",
    "memory hog": "return len(bytearray(16 * 2**30)) > 0",
    "slow memory hog": "hoard = []\nfor _ in range(4096):\n    hoard.append([0] * 2**18)",
    "huge output on stdout": "for _ in range(4096):\n    print('x' * 2**20)",
}
FORGERIES = {
    "os._exit": "os._exit(0)",
    "SystemExit at import": "raise SystemExit(0)\ndef attack():\n    return True",
    "equal to everything": "return type('Anything', (), {'__eq__': lambda *_: True})()",
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
    "verdict on every descriptor": """
        for fd in range(64):
            with suppress(OSError):
                os.write(fd, b"\\x00\\x00\\x00\\x06passed")
        return False
    """,
    "bytes that unfold to all memory where they are compared": """
        for fd in range(3, 64):
            with suppress(OSError):
                os.write(fd, b"\\x80\\x02cbuiltins\\nlist\\ncbuiltins\\nrange\\nJ\\xff\\xff\\xff\\x7f\\x85R\\x85R.")
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
    "posix.fork": "[posix.fork() for _ in range(4)]",
    "multiprocessing": """
        for method in ("fork", "spawn", "forkserver"):
            with suppress(BaseException):
                import_module("multiprocessing").get_context(method).Process(target=time.sleep, args=(60,)).start()
                return True
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
    "another name": """
        machinery = import_module("importlib.machinery")
        path, name = machinery.PathFinder.find_spec("_posixshmem").origin, "x._posixshmem"
        spec = machinery.ModuleSpec(name, machinery.ExtensionFileLoader(name, path), origin=path)
        import_module("_imp").create_dynamic(spec)
    """,
    "history of a line editor": "import_module('readline').write_history_file(FOLDER + '/new')",
    "one core for the worker": "os.sched_setaffinity(os.getppid(), {0})",
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
    "file write by the reader of the answer": """
        deed = f"__import__('posix').mkdir({FOLDER!r} + '/new') is None"
        return type("Letter", (), {"__reduce__": lambda _: (eval, (deed,))})()
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
            with suppress(OSError):
                for _ in range(128):
                    written += os.write(fd, b"x" * 2**20)
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
    "ctypes": """
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


def program_of(code: str) -> str:
    """The code of an attack: as it is, or as the body of its function."""
    code = textwrap.dedent(code)
    if re.search("^def ", code, re.M):
        return code
    imports = "import io, os, posix, signal, sys, time\nfrom contextlib import suppress\n"
    imports += "from importlib import import_module, reload\n"
    return f"{imports}def attack():\n{textwrap.indent(code, '    ')}\n    return True\n"


HOSTILE = {**TIME_WASTERS, **CRASHES, **FORGERIES, **ESCAPES}


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """What a run of all hostile programs, with a right one after each, did to its surroundings.

    The surroundings are a folder that every user may change, so that permissions do not do the sandbox's work.
    """
    tmp_path_factory.getbasetemp()  # made now, else it would lie in that folder and go with it
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as world:
        world.setattr(tempfile, "tempdir", name)  # so that the sandbox's own scratch lies here, too
        victim = Path(name) / "precious" / "victim"
        victim.parent.mkdir()
        victim.write_text("precious")
        for path in (Path(name), victim.parent, victim):
            path.chmod(0o777)
        with socket.create_server(("127.0.0.1", 0)) as server:
            places = f"VICTIM, FOLDER, PORT = {str(victim)!r}, {str(victim.parent)!r}, {server.getsockname()[1]}\n"
            attacks = [Program(places + program_of(code), "attack", [[]], [True]) for code in HOSTILE.values()]
            start = time.monotonic()
            both = [program for attack in attacks for program in (attack, RIGHT)]
            verdicts = run_programs(both, time_limit_s=0.7, memory_limit_mb=512)
            elapsed_s = time.monotonic() - start
            server.setblocking(False)
            was_called = False
            with suppress(BlockingIOError):
                server.accept()[0].close()
                was_called = True
        pairs = dict(zip(HOSTILE, zip(verdicts[::2], verdicts[1::2], strict=True), strict=True))
        seen: dict[str, Any] = {"folder": Path(name), "victim": victim, "was_called": was_called}
        yield SimpleNamespace(verdicts=pairs, elapsed_s=elapsed_s, **seen)


def _processes_at_home_in(folder: Path) -> list[psutil.Process]:
    left = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("HOME", "").startswith(str(folder)):
                left.append(process)
    return left


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_program_is_held(outcome: SimpleNamespace, name: str) -> None:
    """Guards against attacks that get through, forged verdicts, slow programs called wrong, and broken workers."""
    verdict, neighbour = outcome.verdicts[name]
    assert verdict != PASSED == neighbour
    assert (verdict == "timeout") or name not in TIME_WASTERS
    assert (verdict == "killed") or name != "os._exit"


def test_hostile_programs_leave_nothing_behind(outcome: SimpleNamespace) -> None:
    """Guards against files changed outside, scratch left behind, a connection, orphans, and limits that add up."""
    assert outcome.elapsed_s < 40, "the time wasters alone need several seconds of work"
    assert outcome.victim.read_text() == "precious" and outcome.victim.stat().st_mode & 0o777 == 0o777
    assert sorted(outcome.folder.rglob("*")) == [outcome.victim.parent, outcome.victim]
    assert not outcome.was_called
    deadline = time.monotonic() + 5
    while (left := _processes_at_home_in(outcome.folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


VALUES: dict[str, Any] = {  # what a right program may return -> what it equals
    "1 + 1": 2, "0.1 + 0.2": 0.3, "float('inf')": float("inf"), "decimal.Decimal('0.5')": 0.5, "numpy.array([3])": [3],
    "[(1, 2), {'a': {3}}, None, 'x']": [(1, 2), {"a": {3}}, None, "x"],
    "[collections.Counter('a'), collections.defaultdict(int, a=1), collections.OrderedDict(a=1)]": 3 * [{"a": 1}],
    "[collections.namedtuple('P', 'a b')(1, [2]), typing.NamedTuple('P', [('a', int)])(1)]": [(1, [2]), (1,)],
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
    "[enum.IntEnum('E', 'A B').B, enum.Enum('E', {'A': 'x'}, type=str).A]": [2, "x"],
    "[numpy.int64(3), numpy.float64(0.5), numpy.sqrt(4.0) > 1, fractions.Fraction(1, 2)]": [3, 0.5, True, 0.5],
    "[functools.lru_cache(None)(abs)(-3), list(collections.deque([1, 2], maxlen=1))]": [3, [2]],
}  # fmt: skip


DEEDS = [  # harmless calls
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
SECRETS = "import os, sys\ndef f():\n    return 'HF_TOKEN' in os.environ or 'torch' in sys.modules"
ROOT = "def find_zero(coefficients):\n    return {}"
# A program with its inputs, expected outputs and tolerance, and the verdict on it.
CASES: dict[str, tuple[Program, Reason]] = {
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
            Program(f"def f(n):\n    return n != {wrong}", "f", [[n] for n in range(5)], [True] * 5), verdict
        )
        for wrong, verdict in ((0, "failed"), (2, "failed"), (4, "failed"), (9, PASSED))
    },
    **{
        f"within {atol}": (Program("def f():\n    return 1.001", "f", [[]], [1.0], atol), verdict)
        for atol, verdict in ((0.01, PASSED), (0.0001, "failed"))
    },
    **{  # evalplus 0.3.1 fails all of these
        f"{root} as a root of x^2 - 1": (
            Program(ROOT.format(root), "find_zero", [[[-1, 0, 1]]], [1.0], 1e-4), verdict
        )
        for root, verdict in ((1.0, PASSED), (-1.0, PASSED), (0.5, "failed"))
    },
    "what attacks are made of": (Program(program_of("pass"), "attack", [[]], [True]), PASSED),
    "neither secrets nor torch": (Program(SECRETS, "f", [[]], [False]), PASSED),
    "usual libraries": (Program(LIBRARIES, "f", [[]], [20]), PASSED),
    "limits of resources": (Program(LIMITS, "f", [[]], [([3, 0, 64, 0], True)]), PASSED),
}  # fmt: skip


@pytest.fixture(scope="module")
def verdicts() -> dict[str, Reason]:
    with patch.dict(os.environ, HF_TOKEN="secret"):
        return dict(zip(CASES, run_programs([program for program, _ in CASES.values()]), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_a_program_is_told_right_from_wrong(verdicts: dict[str, Reason], name: str) -> None:
    """Guards against lost values, right programs refused, wrong ones passed, missing limits and visible secrets."""
    assert verdicts[name] == CASES[name][1]


def test_outputs_and_times_are_recorded() -> None:
    """Guards against outputs lost, exchanged or cut (HumanEval/15's has 130 MB), and times of other things."""
    code = (
        "import collections, time\ndef f(x, s):\n    time.sleep(s)\n    return [x, x], collections.Counter('aab'), 0.5"
    )
    inputs = [["first", 0.0], ["second", 0.3]]
    [recording] = record_outputs([Program(code, "f", inputs, None)])
    assert recording.outputs == [([word, word], {"a": 2, "b": 1}, 0.5) for word, _ in inputs]
    assert recording.seconds[0] < 0.2 < recording.seconds[1] < 0.6
    [recording] = record_outputs([Program("def f(size):\n    return 'x' * size", "f", [[2**27]], None)])
    assert [len(output) for output in recording.outputs] == [2**27]
    broken = [Program(code, "f", [[]], None) for code in ("def f(:", "import os\nos._exit(0)")]
    assert record_outputs(broken) == [Recording("failed", [], []), Recording("killed", [], [])]


def test_limit_of_one_input_ends_a_program() -> None:
    """Guards against a program that outlasts its first input's limit, by catching it and by changing the handler."""
    swallows = textwrap.dedent(TIME_WASTERS["endless loop that swallows exceptions"])
    code = "import signal\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)\ndef f():" + textwrap.indent(swallows, "    ")
    program = Program(code, "f", [[]] * 20, [None] * 20, limits_s=[0.5] * 20)
    start = time.monotonic()
    assert run_programs([program], time_limit_s=60.0) == ["timeout"]
    assert time.monotonic() - start < 8  # the limits of all inputs make 10 s


def test_faults_are_no_programs_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against programs that pass without inputs, missing limits, our own faults scored, and an endless wait."""
    assert run_programs([]) == []
    with pytest.raises(ValueError, match="0 inputs"):
        Program("", "f", [], [])
    with pytest.raises(ValueError, match="2 inputs, 1 limits"):
        Program("", "f", [[], []], [1, 1], limits_s=[1.0])

    class Unloadable:
        def __reduce__(self) -> tuple[Any, ...]:
            return int, ("x",)

    with pytest.raises(UserError, match="invalid literal"):
        run_programs([Program("", "f", [[Unloadable()]], [None])])
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(UserError, match=r"has failed(.|\n)*pip install"):
        run_programs([RIGHT])


FIXTURE = Path(__file__).parent / "data"
PROBLEMS = load_problems(FIXTURE)


@pytest.fixture(params=["fixture", pytest.param("all", marks=pytest.mark.slow)])
def data_dir(request: pytest.FixtureRequest) -> Path:
    """The committed problems, and all of them where there is a local copy."""
    if request.param == "fixture":
        return FIXTURE
    if not os.environ.get("MARSBENCH_DATA"):
        pytest.skip("MARSBENCH_DATA names no local copy of the benchmark data")
    return Path(os.environ["MARSBENCH_DATA"])


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def read_docs(data_dir: Path) -> list[dict[str, Any]]:
    """HumanEval's own rows, as lm-eval hands them to its filters."""
    return lines_of(data_dir / "humaneval" / "test.jsonl")


def corrupt(solution: str, entry_point: str) -> str:
    """The solution with each of its answers in a list."""
    return f"{solution}\n\nright = {entry_point}\ndef {entry_point}(*args):\n    return [right(*args)]\n"


def test_reference_solutions_pass_and_corrupted_ones_fail(data_dir: Path) -> None:
    """Guards against evalplus 0.3.1, which fails all for HumanEval/32, and against prompts that differ (115)."""
    docs, records = read_docs(data_dir), lines_of(data_dir / humaneval.LOCAL_FILE)
    solutions = [record["canonical_solution"] for record in records]
    wrong = [corrupt(solution, doc["entry_point"]) for solution, doc in zip(solutions, docs, strict=True)]
    assert len(docs) == (4 if data_dir == FIXTURE else 164)
    assert run_completions(zip(solutions, wrong, strict=True), docs, data_dir) == [["passed", "failed"]] * len(docs)


FIB, TRUNCATE = "HumanEval/55", "HumanEval/2"
WORDS = {  # problem -> completions, each with its word
    FIB: {
        "    return n if n < 2 else fib(n - 1) + fib(n - 2)": "passed",
        "    return 1 if n < 3 else fib(n - 1) + fib(n - 2)": "passed base only",  # HumanEval does not ask for fib(0)
    },
    TRUNCATE: {
        "    return number % 1.0\n": "passed",
        "    return number % 1.0\n```\nThis is right.": "passed",
        "    return number % 1.0\nThis is right.": "failed",
        "    return number % 1.0 + 5e-7": "passed",
        "    return number % 1.0 + 1e-4": "failed",
    },
}


def test_completions_by_hand() -> None:
    """Guards against HumanEval+ as HumanEval, prose in a program, wrong tolerances, and one limit for all inputs."""
    docs = {doc["task_id"]: doc for doc in read_docs(FIXTURE)}
    for task, completions in WORDS.items():
        assert run_completions([[*completions]], [docs[task]], FIXTURE) == [[*completions.values()]]
    program = "def fib(n):\n    return 1 if n < 3 else fib(n - 1) + fib(n - 2)"
    with patch.object(humaneval, "record_outputs", wraps=humaneval.record_outputs) as recorded:
        assert score_programs([(FIB, program)] * 2, PROBLEMS) == ["passed base only"] * 2
    assert len(recorded.call_args[0][0]) == 1, "a reference runs once, for any number of programs"
    for word, base, plus in (("passed", 1.0, 1.0), ("passed base only", 1.0, 0.0), ("failed", 0.0, 0.0)):
        assert pass_at_1({}, [word]).items() >= {"pass@1": base, "pass@1_plus": plus}.items()
    code = "import time\ndef wait(*seconds):\n    time.sleep(seconds[{index}])"
    inputs = [[0.0, 0.6, 1.6], [0.4, 1.3, 1.3]]  # limits: 1.0 s and about 1.6 s
    problem = Problem(Program(code.format(index=0), "wait", inputs, None), 1)
    programs = [("W/0", code.format(index=index)) for index in (0, 1, 2)]
    assert score_programs(programs, {"W/0": problem}) == ["passed", "passed", "timeout"]


RECORDS = lines_of(FIXTURE / humaneval.LOCAL_FILE)
FIRST, SECOND = (json.dumps(record) + "\n" for record in RECORDS[:2])
BROKEN = {
    "missing column": (FIRST + json.dumps({"task_id": "HumanEval/3"}) + "\n", "prompt(.|\n)*line 2"),
    "no tests": (FIRST + json.dumps({**json.loads(SECOND), "plus_input": []}) + "\n", "plus_input(.|\n)*line 2"),
    "tests that are null": (json.dumps({**json.loads(FIRST), "base_input": None}) + "\n", "base_input(.|\n)*line 1"),
    "arguments that are no list": (json.dumps({**json.loads(FIRST), "base_input": [3.5]}) + "\n", "base_input.0"),
    "a tolerance that is no number": (json.dumps({**json.loads(FIRST), "atol": float("nan")}) + "\n", "atol"),
    "duplicate": (FIRST + SECOND + FIRST, "HumanEval/2' stands in line 1 already(.|\n)*line 3"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_data_is_the_users_to_mend(tmp_path: Path, name: str) -> None:
    """Guards against broken data that is scored in part, or ends in a traceback."""
    content, message = BROKEN[name]
    (tmp_path / humaneval.LOCAL_FILE).parent.mkdir()
    (tmp_path / humaneval.LOCAL_FILE).write_text(content)
    with pytest.raises(UserError, match=message) as error:
        load_problems(tmp_path)
    assert error.value.where.startswith(str(tmp_path / humaneval.LOCAL_FILE))


def test_what_cannot_be_scored_is_the_users_to_mend(tmp_path: Path) -> None:
    """Guards against a silent download, questions left out of the score, programs measured by a broken reference."""
    with pytest.raises(UserError, match=r"no local copy(.|\n)*HumanEvalPlus.jsonl"):
        load_problems(tmp_path)
    with pytest.raises(UserError, match="no tests for HumanEval/0"):
        score_programs([(TRUNCATE, ""), ("HumanEval/0", "")], PROBLEMS)
    problem = Problem(Program("def f(:", "f", [[1], [2]], None), 1)
    with pytest.raises(UserError, match="reference solution of X/0 does not run: failed"):
        score_programs([("X/0", "def f(x):\n    return x")], {"X/0": problem})


def test_without_a_folder_evalplus_finds_the_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards against a loader that knows local folders only, and a traceback where there is no network."""
    monkeypatch.setattr(wget, "download", Mock(side_effect=URLError("no network")))
    monkeypatch.setattr(evalplus.data.utils, "CACHE_DIR", str(tmp_path))
    with pytest.raises(UserError, match=r"cannot be downloaded(.|\n)*no network"):
        load_problems()
    monkeypatch.setattr(evalplus.data.humaneval, "HUMANEVAL_OVERRIDE_PATH", str(FIXTURE / humaneval.LOCAL_FILE))
    assert load_problems() == PROBLEMS
