"""Training and answering several at a time: the order, the bound, and what becomes of the others when one fails."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import psutil
import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from marsbench.cli import app
from marsbench.errors import UserError
from marsbench.overview import reproduction
from marsbench.paths import PACKAGE
from marsbench.presets import preset
from marsbench.racing.sweep import Sweep
from marsbench.rows.kinds import EvaluationRow, Row, TrainingRow
from marsbench.rows.store import read_rows
from marsbench.rows.workspace import Workspace
from marsbench.running import side_by_side
from marsbench.running.cells import Cells
from marsbench.running.plans import TrainedStage
from marsbench.running.run import Run
from marsbench.running.side_by_side import _in_a_row, answer_side_by_side, in_order, train_side_by_side
from marsbench.running.tables import Table
from marsbench.studies import plan_of, studies
from marsbench.studies.study import Study
from marsbench.training.stages import recipe

TIMES = ("seconds", "provenance")  # of a row; what may differ from run to run
PARENTS = {"base": None, "sft": "base", "draft": None, "mars": "sft", "medusa": "sft", "longer": "base"}


class Fake:
    """A process that runs for a number of polls."""

    def __init__(self, polls: int, fails: bool = False) -> None:
        self.left, self.fails, self.terminated = polls, fails, False

    def poll(self) -> int | None:
        self.left -= 1
        if self.left > 0:
            return None
        if self.fails:
            raise UserError("it failed", fix="mend it")
        return 0

    def terminate(self) -> None:
        self.terminated = True


def starter(
    log: list[tuple[str, list[str]]], polls: Callable[[str], int]
) -> tuple[dict[str, Fake], Callable[[str], Fake]]:
    """Starts fakes, and logs beside whom each of them starts."""
    started: dict[str, Fake] = {}

    def start(name: str) -> Fake:
        log.append((name, [other for other, process in started.items() if process.left > 0]))
        started[name] = Fake(polls(name))
        return started[name]

    return started, start


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side, "_POLL_S", 0.0)
    monkeypatch.setattr(side_by_side, "_WORTH_A_PROCESS", 1)


@pytest.mark.parametrize("jobs", [1, 2, 3])
def test_parents_come_first_and_no_more_run_than_may(jobs: int) -> None:
    """Guards against a stage that starts from an unfinished one, idle cores, and more processes than cores."""
    log: list[tuple[str, list[str]]] = []
    _, start = starter(log, lambda name: 3 + len(name))
    done = list(in_order(PARENTS, start, jobs))
    assert sorted(done) == sorted(PARENTS)
    for child, parent in PARENTS.items():
        assert parent is None or done.index(parent) < done.index(child)
    assert max(len(beside) for _, beside in log) == jobs - 1
    if jobs == 1:
        assert done == ["base", "sft", "draft", "mars", "medusa", "longer"]


def test_a_parent_that_is_not_to_be_started_is_done() -> None:
    """Guards against waiting for ever for a checkpoint that was there already."""
    _, start = starter([], lambda name: 1)
    assert list(in_order({"mars": "sft", "medusa": "sft"}, start, 2)) == ["mars", "medusa"]


def test_the_others_end_when_one_fails() -> None:
    """Guards against trainings that go on behind the user's back after an error."""
    started: dict[str, Fake] = {}

    def start(name: str) -> Fake:
        started[name] = Fake(2 if name == "draft" else 9, fails=name == "draft")
        return started[name]

    with pytest.raises(UserError, match="it failed"):
        list(in_order(PARENTS, start, 2))
    assert started["base"].terminated


@pytest.mark.parametrize(
    ("parents", "in_a_row"),
    [
        ({}, True),
        ({"mars": "sft"}, True),
        ({"mars": "sft", "base": None, "sft": "base"}, True),
        ({"mars": "sft", "medusa": "sft"}, False),
        ({"mars": "sft", "draft_mars": "draft_sft"}, False),
        (PARENTS, False),
    ],
)
def test_a_row_of_stages_is_known(parents: dict[str, str | None], in_a_row: bool) -> None:
    """Guards against stages that wait for each other, each on one core while the others idle."""
    assert _in_a_row(parents) == in_a_row


def test_training_side_by_side_is_training(tmp_path: Path, micro_checkpoints: Path) -> None:
    """Guards against checkpoints of other weights, under other names or without their rows; and a silent failure."""
    run = Run(preset("micro"), Workspace(tmp_path, "micro"))
    train_side_by_side(run, [TrainedStage("draft_base", None), TrainedStage("ar_sft", None)], jobs=2)
    for stage in ("draft_base", "base", "ar_sft"):
        chosen = recipe(run.scale, stage)
        folders = run.workspace.checkpoint(chosen), micro_checkpoints / chosen.name
        first, second = (load_file(folder / "model.safetensors") for folder in folders)
        assert all(first[name].equal(second[name]) for name in second)
        assert chosen.key in run.store.rows()
    blocked = run.workspace.checkpoint(recipe(run.scale, "medusa"))
    blocked.with_name(f"{blocked.name}.partial").write_text("in the way")
    with pytest.raises(UserError, match="training medusa failed"):
        train_side_by_side(run, [TrainedStage("medusa", None), TrainedStage("mars", 4)], jobs=2)


def test_answering_side_by_side_is_answering(
    tmp_path: Path, micro_checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against rows that the tables do not find again, or that differ from theirs; and a silent failure."""
    plan = plan_of("table9")

    def run_in(folder: Path) -> Run:
        shutil.copytree(micro_checkpoints, folder / "runs" / "micro" / "checkpoints")
        return Run(preset("micro"), Workspace(folder, "micro"), benchmarks=("mini_gsm8k",))

    in_turn, beside = run_in(tmp_path / "in_turn"), run_in(tmp_path / "beside")
    expected = Table(in_turn, plan).rows()
    answer_side_by_side(beside, [plan], jobs=2)
    monkeypatch.setattr(Cells, "_measure", None)  # nothing is left to measure
    for row, other in zip(Table(beside, plan).rows(), expected, strict=True):
        assert row.key == other.key
        if isinstance(row, EvaluationRow) and isinstance(other, EvaluationRow):
            assert (row.correct, row.emitted, row.forwards) == (other.correct, other.emitted, other.forwards)
    monkeypatch.setattr(side_by_side, "_Worker", None)  # nor to start
    answer_side_by_side(beside, [plan], jobs=2)


def test_a_failure_in_answering_is_heard(tmp_path: Path, micro_checkpoints: Path) -> None:
    """Guards against lines that are quietly left to the next run."""
    checkpoints = tmp_path / "runs" / "micro" / "checkpoints"
    shutil.copytree(micro_checkpoints, checkpoints)
    next(checkpoints.glob("mars-b4*/model.safetensors")).write_bytes(b"cut short")
    run = Run(preset("micro"), Workspace(tmp_path, "micro"), benchmarks=("mini_gsm8k",))
    with pytest.raises(UserError, match=r"(?s)answering with mars, B = 4 failed.*cannot be loaded"):
        answer_side_by_side(run, [plan_of("table9")], jobs=2)


def test_a_process_that_cannot_write_says_so_in_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a traceback in a log where one line would do."""
    monkeypatch.setattr(sys, "stderr", sys.stderr)  # such a process has one of its own
    (tmp_path / "runs").write_text("in the way")
    settings = {"scale": preset("micro"), "workspace": Workspace(tmp_path, "micro")}
    with pytest.raises(SystemExit, match="cannot be written to"):
        side_by_side._run(lambda run: None, settings, tmp_path / "log")


WORKER = """
import os, time
from pathlib import Path
from marsbench.presets import preset
from marsbench.rows.workspace import Workspace
from marsbench.running.run import Run
from marsbench.running.side_by_side import _Worker

def work(run):
    Path("started.new").write_text(str(os.getpid()))
    Path("started.new").rename("started")
    time.sleep(600)

if __name__ == "__main__":
    _Worker(Run(preset("micro"), Workspace(Path("."), "micro")), work, "sleeping", Path("logs/log"))
    time.sleep(600)
"""


@pytest.mark.slow
def test_workers_end_with_a_killed_run(tmp_path: Path) -> None:
    """Guards against orphans that work on beside the command that goes on where the killed one stopped."""
    script, started = tmp_path / "worker.py", tmp_path / "started"
    script.write_text(WORKER)
    paths = os.pathsep.join(filter(None, [str(PACKAGE.parent), os.environ.get("PYTHONPATH")]))
    with subprocess.Popen([sys.executable, script], cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths}) as run:
        while not started.exists():
            assert run.poll() is None
            time.sleep(0.05)
        run.kill()
    worker, patience = psutil.Process(int(started.read_text())), time.monotonic() + 20
    while worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < patience, "it works on"
        time.sleep(0.05)


# ---- pages ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What `reproduce` does, in turn, and on how much; none of it is done."""
    done: list[tuple[str, int]] = []

    def measure(*_: object) -> list[Row]:
        done.append(("measure", 1))
        return []

    monkeypatch.setattr(
        reproduction, "train_side_by_side", lambda run, wanted, jobs: done.append(("train", len([*wanted])))
    )
    monkeypatch.setattr(
        reproduction, "answer_side_by_side", lambda run, plans, jobs: done.append(("answer", len([*plans])))
    )
    monkeypatch.setattr(Study, "rows", measure)
    monkeypatch.setattr(Sweep, "rows", measure)
    return done


@pytest.mark.parametrize("name", [*studies(), "appendix-a"])
def test_a_page_times_nothing_before_all_side_by_side_work_has_ended(
    name: str, log: list[tuple[str, int]], tmp_path: Path
) -> None:
    """Guards against steps and races timed beside trainings, and a page whose checkpoints are trained one by one."""
    arguments = ["reproduce", name, "--scale", "micro", "--jobs", "2", "--output", str(tmp_path)]
    assert CliRunner().invoke(app, arguments).exit_code == 3  # there is nothing to show
    assert [what for what, _ in log] == ["train", "answer", "measure"]
    assert log[0][1] > 0 or name in ("compiled", "serving")  # whose one checkpoint starts from a row of others
    log.clear()
    assert CliRunner().invoke(app, [*arguments[:4], "--jobs", "1", *arguments[6:]]).exit_code == 3
    assert [what for what, _ in log] == ["measure"]


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("table8", ["--benchmarks", "mini_bbh"]),
        ("table9", ["--benchmarks", "gsm8k", "--data-dir", "."]),
        ("table5", ["--benchmarks", "mini_bbh,mini_ifeval,mini_gpqa,mini_gsm8k,mini_humaneval"]),
    ],
)
def test_nothing_is_trained_for_a_page_that_refuses(
    name: str, more: list[str], log: list[tuple[str, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against an hour of training before a word on benchmarks that the page cannot ask."""
    monkeypatch.chdir(tmp_path)
    CliRunner().invoke(app, ["reproduce", name, "--scale", "micro", "--jobs", "2", *more])
    assert log[:2] == [("train", 0), ("answer", 0)]


class Here:
    """A worker that does its piece of work at once in this process, with a run of its own as processes have."""

    titles: ClassVar[list[str]] = []

    def __init__(self, run: Run, work: Callable[[Run], None], title: str, log: Path) -> None:
        work(Run(run.scale, run.workspace, benchmarks=run.benchmarks, limit=run.limit))
        self.titles.append(title)

    def poll(self) -> int:
        return 0

    def terminate(self) -> None:
        raise AssertionError("it has ended")


def test_a_page_made_side_by_side_is_the_page(
    tmp_path: Path, micro_checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against rows of a page that depend on how many processes made them, times and origins aside.

    And against work that is left to the page itself.
    """
    monkeypatch.setattr(side_by_side, "_Worker", Here)

    def rows_with(jobs: int) -> list[dict[str, object]]:
        folder = tmp_path / str(jobs)
        shutil.copytree(micro_checkpoints, folder / "runs" / "micro" / "checkpoints")
        run = Run(preset("micro"), Workspace(folder, "micro"), benchmarks=("mini_gsm8k",), limit=4)
        page = reproduction.reproduce_page("table4", run, jobs=jobs)
        assert page is not None and page.exists()
        rows = read_rows(run.workspace.results("table4"))
        assert {type(row) for row in rows} == {EvaluationRow, TrainingRow}
        return [{name: value for name, value in vars(row).items() if name not in TIMES} for row in rows]

    in_turn = rows_with(1)
    assert Here.titles == []
    assert rows_with(2) == in_turn
    trained, answered = ["mars, B = 8", "mars, B = 16"], ["ar_sft", "mars, B = 4", "mars, B = 8", "mars, B = 16"]
    done = [*[f"training {one}" for one in trained], *[f"answering with {one}" for one in answered]]
    assert sorted(Here.titles) == sorted(done) and Here.titles[:2] == done[:2]
