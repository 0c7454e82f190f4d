"""The graph of work, carried out on one computer: order, bound, failures, lost processes, the same rows."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from filelock import FileLock
from safetensors.torch import load_file
from serving_client import eventually
from small_work import count_and_die, do, fail, is_there, its_number, nothing, stay

from marsbench.errors import UserError
from marsbench.executors import tasks as executors
from marsbench.executors.tasks import Ended, Executor, Local, Order, Task, log_of, perform
from marsbench.files import PACKAGE
from marsbench.line import TrainedStage
from marsbench.overview import PRELOAD, reproduction, work
from marsbench.overview.work import PageTask, carry_out, executor_of, tasks_of
from marsbench.presets import preset
from marsbench.progress import Bar, Reporter
from marsbench.rows.kinds import EvaluationRow, Row, TrainingRow
from marsbench.rows.workspace import Workspace
from marsbench.running import graph
from marsbench.running.cells import CellRunner
from marsbench.running.checkpoints import Checkpoints
from marsbench.running.graph import AnswerTask, Known, RunTask, TrainTask
from marsbench.running.run import Run
from marsbench.studies import studies, study_of
from marsbench.training import checkpoints
from marsbench.training.records import finished
from marsbench.training.stages import recipe

PARENTS = {"base": None, "sft": "base", "draft": None, "mars": "sft", "medusa": "sft", "longer": "base"}


def paper_tasks(scale: str = "mini", *, workers: int = 2, **more: Any) -> dict[str, RunTask]:
    """All tasks of the paper at a scale, of which nothing is done yet."""
    chosen = more.pop("preset", preset(scale))
    ready = [study for study in studies().values() if study.in_paper]
    tasks = tasks_of(ready, chosen, Known(chosen), workers=workers, **more)
    assert len({task.name for task in tasks}) == len(tasks)
    return {task.name: task for task in tasks}


def ancestors(name: str, tasks: Mapping[str, RunTask]) -> set[str]:
    """All that a task comes after."""
    return {ancestor for before in tasks[name].after for ancestor in (before, *ancestors(before, tasks))}


@pytest.mark.parametrize("scale", ["micro", "0.5b", "7b"])
def test_every_piece_comes_after_all_that_it_needs(scale: str) -> None:
    """Guards against an answer without its checkpoint, a child before its parent, and a page before its answers."""
    chosen = preset(scale).with_checkpoints([], train_all=scale != "micro")
    tasks, known = paper_tasks(preset=chosen), Known(chosen)
    for task in tasks.values():
        before = ancestors(task.name, tasks)
        if isinstance(task, TrainTask) and task.trained.stage.startswith("mars"):
            assert "training-ar_sft" in before and ("training-base" in before) == (scale == "micro")
        if isinstance(task, AnswerTask):
            used = {stage for cell in task.cells for stage in (cell.line.trained, cell.line.draft) if stage is not None}
            if scale == "micro":
                assert {f"training-{stage.slug}" for stage in used - {("base", None)}} <= before
        if isinstance(task, PageTask) and not task.batch_size:
            before = [tasks[name] for name in task.after]
            places = {cell.id for each in before if isinstance(each, AnswerTask) for cell in each.cells}
            cells = graph.cells_of(study_of(task.study).plans, known)
            assert places >= {cell.id for cell in cells if known.questions_left(cell)}
    races = [task for task in tasks.values() if isinstance(task, PageTask) and task.batch_size]
    assert len(races) > 1 and all(task.alone for task in races)
    timed = {name for name, task in tasks.items() if task.alone and task not in races}
    assert timed == ({"table2", "discrepancies"} if scale == "micro" else {"discrepancies"})


def test_what_tables_share_is_done_once_and_evenly() -> None:
    """Guards against a shared cell answered twice or never, workers that wait for one task, and tasks of seconds."""
    tasks = paper_tasks()
    places = [cell.id for task in tasks.values() if isinstance(task, AnswerTask) for cell in task.cells]
    plans = [plan for study in studies().values() if study.in_paper for plan in study.plans]
    assert len(places) == len({*places})
    assert {*places} == {cell.id for cell in graph.cells_of(plans, Known(preset("mini")))}
    few, many = ([*paper_tasks("7b", workers=workers).values()] for workers in (2, 64))
    few, many = ([task for task in of if isinstance(task, AnswerTask)] for of in (few, many))
    assert len(few) < len(many) and max(len(task.cells) for task in few) > 2
    assert max(task.seconds for task in few) < 2 * sum(task.seconds for task in few) / 8


def children(parents: Mapping[str, str | None], **more: Any) -> list[Task]:
    return [do(name, nothing, Path(), *([before] if before else []), **more) for name, before in parents.items()]


def test_parents_come_first_and_the_longest_way_does() -> None:
    """Guards against a stage from an unfinished one, a long chain begun last, and waiting for a stage that is there."""
    order = Order([replace(task, seconds=5.0 if task.name == "draft" else 3.0) for task in children(PARENTS)])
    done = []
    while order:
        task = order.ready[0]
        order.take(task)
        assert order.made(task) == [PARENTS[task.name]] * len(task.after)
        order.end(Ended(task.name, task.name, None, "", 0.0))
        done.append(task.name)
    assert done[:2] == ["base", "sft"] and sorted(done) == sorted(PARENTS)
    order = Order(children({"mars": "sft", "medusa": "sft"}))
    assert [task.name for task in order.ready] == ["mars", "medusa"] and order.made(order.ready[0]) == [None]


@pytest.fixture
def two(tmp_path: Path) -> Local:
    """Two processes, forked from one that has imported everything already: one for all tests."""
    return Local(2, tmp_path / "logs", preload=PRELOAD)


def test_so_many_run_at_a_time_and_races_alone(two: Local, tmp_path: Path) -> None:
    """Guards against more processes than cores, cores that idle, and a race that is run beside another task."""
    tasks = [do(f"task{number}", stay, tmp_path) for number in range(5)]
    tasks += [do("race0", stay, tmp_path, alone=True), do("race1", stay, tmp_path, gpus=2)]
    beside = {ended.name: len(ended.value) for ended in two.run(tasks)}
    assert max(beside.values()) == 1 and beside["race0"] == beside["race1"] == 0


def test_what_fails_or_is_lost_ends_alone(two: Local, tmp_path: Path) -> None:
    """Guards against a task that fails or is lost for ever, takes the others with it, or gives no reason."""
    once, always = tmp_path / "once", tmp_path / "always"
    once.mkdir()
    always.mkdir()
    (once / "enough1").touch()
    tasks = [do("bad", fail, tmp_path, title="the bad one"), do("child", nothing, tmp_path, "bad")]
    tasks += [do("once", count_and_die, once), do("always", count_and_die, always, title="this one")]
    tasks += [do("other", nothing, tmp_path)]
    ended = {end.name: end for end in two.run(tasks)}
    assert len(ended) == 5 and ended["once"].value == "alive" and ended["other"].value == []
    why = "the bad one failed: ValueError: it does not work"
    errors = {name: end.error.what for name, end in ended.items() if end.error is not None}
    assert errors == {"bad": why, "always": "this one: its process was lost 3 times"}
    assert ended["child"].value == [f"failed: {why}"]
    assert "Traceback" in log_of(tmp_path / "logs", "bad").read_text()
    assert len([*always.glob("try*")]) == Local.tries


def test_who_idles_gives_back_its_gpu_for_a_race(tmp_path: Path) -> None:
    """Guards against a race that runs short of the memory which processes keep on a GPU that they do not use."""
    before = do("before", its_number, tmp_path)
    race = do("race", is_there, tmp_path, "before", alone=True)
    alive = {ended.name: ended.value for ended in Local(2, tmp_path / "logs", gpus=2).run([before, race])}
    assert alive["race"] is False


def wait_for(file: Path, patience: float = 60.0) -> str:
    """What a file holds, once it holds something."""
    assert eventually(lambda: file.exists() and file.read_text(), patience), f"{file} does not come"
    return file.read_text()


def assert_ends(process: int) -> None:
    assert eventually(lambda: not is_there(Path(), [process])), "it works on"


DRIVER = """
import signal
from pathlib import Path
from marsbench.executors.tasks import Local
from small_work import do, sleep_long

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell makes jobs in the background ignore it
    print([*Local(1, Path("logs")).run([do("long", sleep_long, Path("."))])])
"""


@pytest.mark.slow
@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGINT])
def test_processes_end_with_their_driver(by: signal.Signals, tmp_path: Path) -> None:
    """Guards against orphans that work on beside the command that resumes the killed one's work."""
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    known = [str(PACKAGE.parent), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, known))}
    with subprocess.Popen([sys.executable, script], cwd=tmp_path, env=paths, stderr=subprocess.DEVNULL) as driver:
        process = int(wait_for(tmp_path / "started"))
        driver.send_signal(by)
    assert_ends(process)


def test_ends_are_shown_by_the_work_that_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a run of hours that never shows how far it is, and a failure that only its log shows."""
    tasks = [do(name, nothing, tmp_path, title=name, seconds=10.0) for name in "abcd"]
    heard, notes = list[str](), list[str]()
    monkeypatch.setattr(Reporter, "say", lambda reporter, text: heard.append(text))
    run: Any = SimpleNamespace(reporter=Reporter(), workspace=SimpleNamespace(logs=tmp_path))
    monkeypatch.setattr(Bar, "update", lambda bar, done, total, note="": notes.append(f"{done} of {total}: {note}"))

    def ends(tasks: Sequence[Any], look: Any) -> Iterator[Ended]:
        for number, task in enumerate(tasks):
            log_of(tmp_path, task.name).write_bytes(
                b"begins\n  %s: %d/9\n  half a \xe2" % (task.name.encode(), number + 1)
            )
            look([task])
            yield Ended(task.name, None, UserError("no luck") if task.name == "b" else None, "", 1.0)

    assert len([*work.shown(SimpleNamespace(run=ends), tasks, run)]) == 4  # type: ignore[arg-type]
    assert notes[0] == "0 of 40: 0 pieces done"
    assert notes[1:] == [f"{10 * done} of 40: {done} pieces done; {'abcd'[done]}: {done + 1}/9" for done in range(4)]
    ended = ["done: a, less than a minute", f"failed: b: no luck (see {tmp_path}/b.log)"]
    assert heard[:3] == ["4 pieces of work, by their seconds", *ended]


class Here(Executor):
    """An executor that does everything at once in this process, by `perform` as others do."""

    workers, tries = 2, 1

    def __init__(self, logs: Path) -> None:
        self.logs, self.done = logs, list[str]()
        self.over: list[tuple[Task, Ended | None]] = []
        self._running = {}

    def start(self, task: Task, results: Sequence[Any]) -> bool:
        if not self.over:
            self.over.append((task, perform(task, results, self.logs)))
            self.done.append(task.name)
        return self.over[-1][0] is task

    def ended(self) -> list[tuple[Task, Ended | None]]:
        ended, self.over = self.over, []
        return ended


def run_in(folder: Path, checkpoints: Path | None, **more: Any) -> Run:
    """A run at scale micro, with checkpoints that are there already."""
    if checkpoints is not None:
        shutil.copytree(checkpoints, folder / "runs" / "micro" / "checkpoints")
    return Run(preset("micro"), Workspace(folder, "micro"), **more)


def comparable(rows: Sequence[Row]) -> list[dict[str, object]]:
    """Rows without what may differ from run to run."""
    return [{name: value for name, value in vars(row).items() if name not in ("seconds", "provenance")} for row in rows]


def test_a_page_made_of_pieces_is_the_page(
    tmp_path: Path, micro_checkpoints: Path, brief_training: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against rows that depend on the executor, work left to pages, rows a second run misses, two writers."""

    def rows_by(executor: Executor | None, folder: Path) -> list[dict[str, object]]:
        run = run_in(folder, micro_checkpoints, benchmarks=("mini_gsm8k",), limit=4)
        page = reproduction.reproduce_page("table4", run, executor or executors.Here(run.workspace.logs, run.reporter))
        assert page is not None and page.exists()
        rows = run.workspace.rows
        assert {type(row) for row in rows} == {EvaluationRow, TrainingRow}
        assert {row.key for row in rows} <= run.row_file.rows().keys()
        assert len(run.workspace.row_file.read_text().splitlines()) == len(run.row_file.rows()), "a row is there twice"
        return comparable(rows)

    in_turn = rows_by(None, tmp_path / "in_turn")
    here = Here(tmp_path / "logs")
    assert rows_by(here, tmp_path / "pieces") == in_turn
    trained = ["training-mars-b8", "training-mars-b16"]
    answered = [f"answering-{name}-1" for name in ("ar_sft", "mars-b4", "mars-b8", "mars-b16")]
    assert sorted(here.done) == sorted([*trained, *answered])
    monkeypatch.setattr(CellRunner, "row", None)  # nothing is left to measure, to load or to start
    monkeypatch.setattr(checkpoints, "load", None)
    again = Here(tmp_path / "logs")
    run = Run(preset("micro"), Workspace(tmp_path / "pieces", "micro"), benchmarks=("mini_gsm8k",), limit=4)
    reproduction.reproduce_page("table4", run, again)
    assert again.done == []


def test_processes_make_what_one_makes(tmp_path: Path, micro_checkpoints: Path) -> None:
    """Guards against checkpoints of other weights, under other names or without their rows."""
    run = run_in(tmp_path, None, benchmarks=("mini_bbh",), limit=2)
    rows = carry_out([study_of("table9")], run, executor_of(run, jobs=2))["table9"]
    assert isinstance(rows, list) and all(row.status == "done" for row in rows)
    for stage in ("base", "ar_sft", "mars"):
        chosen = recipe(run.scale, stage)
        folders = run.workspace.checkpoint(chosen), micro_checkpoints / chosen.name
        first, second = (load_file(folder / "model.safetensors") for folder in folders)
        assert all(first[name].equal(second[name]) for name in second)
        assert chosen.key in run.row_file.rows()


@pytest.mark.slow
def test_processes_train_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against several GPUs that each train a model, and a training on them that runs beside another task."""
    run = run_in(tmp_path, None, gpus_per_training=2)
    assert run.scale.world is not None
    brief = replace(run.scale.world, vocabulary_size=300, pretraining=replace(run.scale.world.pretraining, steps=4))
    run = replace(run, scale=replace(run.scale, world=brief))
    (task,) = graph.trainings([TrainedStage("base", None)], run.scale, work.RunState(run))
    assert task.gpus == 2
    config = tmp_path / "two.yaml"
    config.write_text("{compute_environment: LOCAL_MACHINE, distributed_type: MULTI_GPU, mixed_precision: 'no'}")
    executors.launch(replace(task, settings=graph.settings_of(run)), 2, config)
    record = finished(run.workspace.checkpoint(recipe(run.scale, "base")))
    assert record is not None and record.provenance["processes"] == 2
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(UserError, match="training base on 2 GPUs: a process ended with status 1"):
        executors.launch(task, 2, config)


def test_a_bad_checkpoint_fails_its_cells_and_nothing_else(
    tmp_path: Path, micro_checkpoints: Path, brief_training: None
) -> None:
    """Guards against lines that are quietly left out, a page lost for one of its lines, and a training for nothing."""
    run = run_in(tmp_path, micro_checkpoints, benchmarks=("mini_gsm8k",), limit=2)
    next((run.workspace.runs / "checkpoints").glob("mars-b4*/model.safetensors")).write_bytes(b"cut short")
    blocked = run.workspace.checkpoint(recipe(run.scale, "mars", block_size=8))
    blocked.with_name(f"{blocked.name}.partial").write_text("in the way")
    here = Here(tmp_path / "logs")
    page = reproduction.reproduce_page("table4", run, here)
    rows = [row for row in run.workspace.rows if isinstance(row, EvaluationRow)]
    status = {(row.stage, row.options.get("block_size")): (row.status, row.reason) for row in rows}
    assert status["ar_sft", None][0] == "done" and status["mars", 16][0] == "done"
    assert status["mars", 4][0] == "failed" and "cannot be loaded" in status["mars", 4][1]
    assert status["mars", 8][0] == "failed" and "training mars, B = 8 failed" in status["mars", 8][1]
    assert page is not None and "cannot be loaded" in page.read_text()


def test_a_training_that_cannot_be_is_tried_once(tmp_path: Path) -> None:
    """Guards against children that each train their failed parent again."""
    run = run_in(tmp_path, None, benchmarks=("mini_gsm8k",), limit=2)
    base = run.workspace.checkpoint(recipe(run.scale, "base"))
    base.parent.mkdir(parents=True)
    base.with_name(f"{base.name}.partial").write_text("in the way")
    here = Here(tmp_path / "logs")
    rows = carry_out([study_of("table9")], run, here)["table9"]
    assert isinstance(rows, list) and {row.status for row in rows} == {"failed"}
    assert log_of(here.logs, "training-base").read_text().count("Traceback") == 1
    assert "training base failed" in log_of(here.logs, "training-mars-b4").read_text()


def test_who_comes_second_waits_and_uses_what_the_first_has_trained(
    micro_checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against two trainings of one checkpoint at once, which end each other with a traceback."""
    monkeypatch.setattr("marsbench.training.trainer.train", None)
    heard = list[str]()
    monkeypatch.setattr(Reporter, "say", lambda reporter, text: heard.append(text))
    run = run_in(tmp_path, None)
    checkpoints, rows = Checkpoints(run), list[TrainingRow]()
    chosen = checkpoints.recipe(TrainedStage("base", None))
    folder = run.workspace.checkpoint(chosen)
    run.workspace.lock(chosen).parent.mkdir(parents=True)
    first = FileLock(run.workspace.lock(chosen))
    first.acquire()
    second = threading.Thread(target=lambda: rows.append(checkpoints.train(chosen)))
    second.start()
    while not heard and second.is_alive():
        time.sleep(0.01)
    assert heard == [f"another command is training {chosen.name} (an unknown process): waiting for it"]
    shutil.copytree(micro_checkpoints / chosen.name, folder)
    first.release()
    second.join(timeout=60)
    record = finished(folder)
    assert record is not None and [row.checkpoint for row in rows] == [record.weights]
    assert chosen.key in run.row_file.rows()
