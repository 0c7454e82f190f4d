"""The project's commands: `nox -l` lists them, and arguments after `--` go through to the program behind.

One environment, `.venv`, serves every session; whichever session comes first builds it.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import nox

nox.options.sessions = ["tests", "lint"]
nox.options.default_venv_backend = "none"

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
STAMP = VENV / "recipe.sha256"


def recipe_hash() -> str:
    """The hash of all that decides what `.venv` holds, its place included: an environment cannot be moved."""
    files = [(ROOT / name).read_bytes() for name in ("pyproject.toml", "constraints.txt")]
    return hashlib.sha256(b"\0".join([*files, sys.version.encode(), str(ROOT).encode()])).hexdigest()


def environment_python(session: nox.Session) -> str:
    """The Python of the shared environment, built first if it is missing, unfinished or out of date."""
    if sys.version_info < (3, 11):
        session.error("constraints.txt needs Python 3.11 or newer; install nox with a newer Python")
    if not (PYTHON.exists() and STAMP.exists() and STAMP.read_text() == recipe_hash()):
        session.log("building the shared environment in .venv; this happens once and takes minutes")
        STAMP.unlink(missing_ok=True)
        session.run(sys.executable, "-m", "venv", "--clear", str(VENV))
        session.run(str(PYTHON), "-m", "pip", "install", "-c", "constraints.txt", "-e", ".[all]")
        STAMP.write_text(recipe_hash())  # last, so that an interrupted build is seen as unfinished
    return str(PYTHON)


def run_marsbench(session: nox.Session, *command: str) -> None:
    """Run one marsbench command, with what stands after `--` behind it."""
    session.run(environment_python(session), "-m", "marsbench", *command, *session.posargs)


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
    session.run(environment_python(session), "-m", "pytest", "-q", "-n", "2", "--dist", "loadscope", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, formatting and types."""
    python = environment_python(session)
    session.run(python, "-m", "ruff", "check", ".")
    session.run(python, "-m", "ruff", "format", "--check", ".")
    session.run(python, "-m", "mypy")


REPRODUCTIONS = {  # what `marsbench reproduce` makes -> what `nox -l` says of it
    "all": "Reproduce the whole paper, every table and figure in turn; writes reports/index.md and all it leads to.",
    "table2": "Reproduce the paper's Table 2 (quality of every recipe); writes reports/table2.md.",
    "table3": "Reproduce the paper's Table 3 (what the SFT loss does); writes reports/table3.md.",
    "table4": "Reproduce the paper's Table 4 (several tokens per forward, by block size); writes reports/table4.md.",
    "table5": "Reproduce the paper's Table 5 (the block-level cache, by the clock): the speed sweep.",
    "table6": "Reproduce the paper's Table 6 (speculative decoding, by the clock): the speed sweep.",
    "table8": "Reproduce the paper's Table 8 and Figure 3 (accuracy against speed); writes reports/table8.md.",
    "table9": "Reproduce the paper's Table 9 (MARS against Jacobi decoding); writes reports/table9.md.",
    "figure1": "Reproduce the paper's Figure 1 (an answer, forward pass by forward pass); writes reports/figure1.md.",
    "figure3": "Reproduce the paper's Figure 3 (accuracy against speed): Table 8's figure; writes reports/table8.md.",
    "figure6": "Reproduce the paper's Figure 6 (three metrics of confidence); writes reports/figure6.md.",
    "appendix-a": "Reproduce the paper's Appendix A (the cost of training); writes reports/table2.md.",
    "discrepancies": "What difference it makes where paper and released code differ; writes reports/discrepancies.md.",
    "gains": "Where the gain comes from: rivals at equal accuracy, tokens by class; writes reports/gains.md.",
    "engine": "Race the decoding methods and check the lossless ones against AR; writes reports/engine.md.",
}


def reproduction(name: str, words: str) -> None:
    """Make the session of one page."""

    def reproduce(session: nox.Session) -> None:
        run_marsbench(session, "reproduce", name)

    reproduce.__doc__ = words
    nox.session(reproduce, name=f"reproduce-{name}")


for name, words in REPRODUCTIONS.items():
    reproduction(name, words)


@nox.session(name="speedup-sweep")
def speedup_sweep(session: nox.Session) -> None:
    """Race thresholds, windows and methods at several batch sizes; writes reports/speedup.md."""
    run_marsbench(session, "sweep")


@nox.session
def report(session: nox.Session) -> None:
    """Render every report again from the rows in results/."""
    run_marsbench(session, "report")
