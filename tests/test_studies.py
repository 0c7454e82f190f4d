"""The registry of studies: a study that one module adds is known to every command, session and page."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from marsbench.errors import UserError
from marsbench.findings.claims import ABSTRACT
from marsbench.rendering.sessions import SESSIONS
from marsbench.studies import items, plan_of, plans, studies, study_of

ROOT = Path(__file__).resolve().parent.parent
THROW_AWAY = '''"""Figure 7: a study that a test has written."""

from marsbench.findings.between_lines import more_accurate
from marsbench.findings.claims import Section
from marsbench.rendering.figures import differences_figure
from marsbench.rendering.page import TablePage
from marsbench.line import Line
from marsbench.running.plans import TablePlan
from marsbench.studies.lines import AR_SFT
from marsbench.studies.study import table_study

LINES = (Line("base", "Base", "base", "ar"), AR_SFT)
PLAN = TablePlan("7", "What a test asks", LINES, benchmarks=("gsm8k",), figure=True)
STUDY = table_study(
    TablePage(
        plan=PLAN,
        opening="Two lines that a test has made up.",
        claims=(more_accurate(PLAN, "ar_sft", "base", name="helps", text="Fine-tuning helps the test"),),
        figure="accuracy",
        caption="Accuracy of two lines",
        drawing=differences_figure("base", "ar_sft"),
    ),
    asks="does one module suffice?",
    section=Section("Figure 7", (4, 7)),
)
'''
COMMANDS = """
import sys
from typer.testing import CliRunner
from rich.console import Console
from marsbench.cli import app

Console._environ = {"COLUMNS": "300", "LINES": "50"}
for line in sys.argv[1:]:
    done = CliRunner().invoke(app, line.split())
    print(f"<{line}>", done.exit_code, done.stdout, done.stderr, done.exception)
"""


def test_a_study_is_one_module(micro_checkpoints: Path, tmp_path: Path) -> None:
    """Guards against a second place to enter a study in, which the next author forgets."""
    here = tmp_path / "checkout"
    shutil.copytree(ROOT / "marsbench", here / "marsbench")
    for name in ("noxfile.py", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, here)
    shutil.copytree(ROOT / "tasks", here / "tasks")
    (here / "marsbench" / "studies" / "figure7.py").write_text(THROW_AWAY)
    shutil.copytree(micro_checkpoints, here / "runs" / "micro" / "checkpoints")
    environment = {**os.environ, "PYTHONPATH": str(here), "OMP_NUM_THREADS": "1"}

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments], cwd=here, env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout

    assert "reproduce -> Reproduce any page by its name" in run("-m", "nox", "-l")
    micro = "--scale micro"
    said = run(
        "-c", COMMANDS, "list tables", f"plan --table figure7 {micro}", f"reproduce figure7 {micro}", f"report {micro}"
    )
    listed, planned, reproduced, reported = said.split("\n<", 3)
    assert "does one module suffice?" in listed and "marsbench reproduce figure7" in listed
    assert "Figure 7 at scale micro: What a test asks" in planned
    assert "> 0" in reproduced and "figure7.md" in reproduced and "figure7.md" in reported
    pages = {name: (here / "reports" / "micro" / f"{name}.md").read_text() for name in ("figure7", "index")}
    assert "Two lines that a test has made up." in pages["figure7"]
    assert "does one module suffice?" in pages["index"]
    places = [pages["index"].index(f"| {name} ") for name in ("Figure 6", "Figure 7", "Appendix A")]
    assert places == sorted(places)
    assert "[Section 4.7](figure7.md)" in pages["index"] and "Fine-tuning helps the test" in pages["index"]


def test_the_registry_is_in_the_papers_order() -> None:
    """Guards against tables in the order of their files, and pages of ours among the paper's."""
    keys = [item.key for item in items()]
    tables = [f"table{number}" for number in (2, 3, 4, 5, 6, 8, 9)]
    figures = [f"figure{number}" for number in (1, 3, 6)]
    assert keys == [
        *tables,
        *figures,
        "appendix-a",
        "regime",
        "discrepancies",
        "gains",
        "lengths",
        "adapter",
        "curves",
        "map",
        "rivals",
        "speedup",
        "serving",
        "real-model",
    ]
    assert [session.makes for session in SESSIONS.values()] == keys, "each has a session that README can show"
    assert [key for key in studies() if key in keys] == [key for key in keys if key in studies()]


def test_every_study_is_called_as_its_module_and_says_what_it_is() -> None:
    """Guards against a session that makes another page than its name says, and lines of the index without words."""
    for key, study in studies().items():
        assert study.key == key and study.asks and study.name
        assert study.is_made or study.on
    for item in items():
        assert SESSIONS[item.session].makes == item.key and SESSIONS[item.session].words


def test_what_stands_on_another_page_is_found_there() -> None:
    """Guards against `marsbench reproduce figure3` that knows no such page, and names that are silently accepted."""
    assert [study_of(name).key for name in ("table5", "figure3", "appendix-a", "table2")] == [
        "speedup", "table8", "table2", "table2",
    ]  # fmt: skip
    assert plan_of("table5") is plans()["table5"]
    for refuse in (study_of, plan_of):
        with pytest.raises(UserError, match="table99"):
            refuse("table99")


def test_every_claim_has_its_place_in_the_paper() -> None:
    """Guards against claims of a page that the page of claims leaves out, or puts under another page's rows."""
    sections = {item.section for item in items()}
    for study in studies().values():
        for claim in study.claims:
            assert claim.page == study.key
            assert claim.section in sections or claim.section is ABSTRACT
            assert claim.name or claim.section is None, "pages find the paper's claims by their names"
