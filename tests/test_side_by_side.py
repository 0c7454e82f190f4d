"""Training and answering several at a time: the order, the bound, and what becomes of the others when one fails."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from marsbench.errors import UserError
from marsbench.presets import preset
from marsbench.rows.kinds import EvaluationRow
from marsbench.rows.workspace import Workspace
from marsbench.running import side_by_side
from marsbench.running.cells import Cells
from marsbench.running.plans import TrainedStage
from marsbench.running.run import Run
from marsbench.running.side_by_side import answer_side_by_side, in_order, train_side_by_side
from marsbench.running.tables import Table
from marsbench.studies import plan_of
from marsbench.training.stages import recipe

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
