"""The project's commands: `nox -l` lists them, and arguments after `--` go through to the program behind.

One environment, `.venv`, serves every session; whichever session comes first builds it.
"""

import hashlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

import nox
from filelock import FileLock, Timeout  # nox brings it along, by virtualenv

nox.options.sessions = ["tests", "lint"]
nox.options.default_venv_backend = "none"

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))
from marsbench.rendering.sessions import SESSIONS  # noqa: E402  reproduce-table2 and its like

VENV = ROOT / ".venv"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
STAMP = VENV / "recipe.sha256"


def recipe_hash() -> str:
    """The hash of all that decides what `.venv` holds, its place included: an environment cannot be moved."""
    files = [(ROOT / name).read_bytes() for name in ("pyproject.toml", "constraints.txt")]
    return hashlib.sha256(b"\0".join([*files, sys.version.encode(), str(ROOT).encode()])).hexdigest()


def environment_python(session: nox.Session) -> str:
    """The Python of the shared environment, built first if it is missing, unfinished or out of date."""
    if sys.version_info < (3, 11):  # noqa: UP036 - nox may run on an older Python than the package
        session.error("constraints.txt needs Python 3.11 or newer; install nox with a newer Python")
    lock = FileLock(VENV.with_suffix(".lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        session.log("another command builds the shared environment in .venv; waiting until it is done")
        lock.acquire()
    with lock:
        if not (PYTHON.exists() and STAMP.exists() and STAMP.read_text() == recipe_hash()):
            session.log("building the shared environment in .venv; this happens once and takes minutes")
            STAMP.unlink(missing_ok=True)
            session.run(sys.executable, "-m", "venv", "--clear", str(VENV))
            session.run(str(PYTHON), "-m", "pip", "install", "-c", "constraints.txt", "-e", ".[all]")
            STAMP.write_text(recipe_hash())  # last, so that an interrupted build is seen as unfinished
    return str(PYTHON)


@nox.session
def environment(session: nox.Session) -> None:
    """Build the environment that all sessions share (they also do it themselves).

    On Linux the default PyTorch wheel brings CUDA along. A machine without a GPU can take the much smaller
    CPU wheel of the same version: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu nox -s environment
    """
    session.log(f"ready: {environment_python(session)}")


@nox.session
def tests(session: nox.Session) -> None:
    """Run the test suite; arguments after -- go to pytest."""
    # Three on two cores: tests of servers, clusters and killed commands mostly wait.
    spread = "-n", "3", "--dist", "loadscope", "--no-loadscope-reorder"  # the longest modules first: tests/conftest.py
    session.run(environment_python(session), "-m", "pytest", "-q", *spread, *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, formatting and types."""
    python = environment_python(session)
    session.run(python, "-m", "ruff", "check", ".")
    session.run(python, "-m", "ruff", "format", "--check", ".")
    session.run(python, "-m", "mypy")


def session_running(command: tuple[str, ...]) -> Callable[[nox.Session], None]:
    """A session that runs one marsbench command, with what stands after `--` behind it."""

    def run(session: nox.Session) -> None:
        session.run(environment_python(session), "-m", "marsbench", *command, *session.posargs)

    return run


COMMANDS = {
    "gpu-check": (("gpu-check",), "Check a GPU: is it right, is it fast, what fits; writes reports/gpu.md."),
    "gpu-window": (("gpu-window",), "All that a GPU can say in --minutes 10, what matters most first."),
    "reproduce-all": (
        ("reproduce", "all"),
        "Reproduce the whole paper, every table and figure in turn; writes reports/index.md and all it leads to.",
    ),
    "reproduce": (
        ("reproduce",),
        "Reproduce any page by its name: `nox -s reproduce -- table2`; `marsbench list tables` names them.",
    ),
    **{name: (page.command, page.words) for name, page in SESSIONS.items()},
    "report": (("report",), "Render every report again from the rows in results/."),
}
for name, (command, words) in COMMANDS.items():
    make_session = session_running(command)
    make_session.__doc__ = words
    nox.session(make_session, name=name)
