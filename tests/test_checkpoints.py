"""The checkpoints of a run when somebody else is about the same one."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path

import pytest
from filelock import FileLock

from marsbench.line import TrainedStage
from marsbench.presets import preset
from marsbench.progress import Reporter
from marsbench.rows.kinds import TrainingRow
from marsbench.rows.workspace import Workspace
from marsbench.running.checkpoints import Checkpoints
from marsbench.running.run import Run
from marsbench.training.records import finished


class Heard(Reporter):
    """What a run says."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


@pytest.mark.parametrize("existing", ["reuse", "rerun"])
def test_who_comes_second_waits_and_uses_what_the_first_has_trained(
    existing: str, micro_checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against two trainings of one checkpoint at once, which end each other with a traceback."""

    def trained(*_: object) -> None:
        raise AssertionError("it was trained twice")

    monkeypatch.setattr("marsbench.training.trainer.train", trained)
    heard = Heard()
    run = Run(
        preset("micro"), Workspace(tmp_path, "micro"), "rerun" if existing == "rerun" else "reuse", reporter=heard
    )
    checkpoints, rows = Checkpoints(run), list[TrainingRow]()
    chosen = checkpoints.recipe(TrainedStage("base", None))
    folder = run.workspace.checkpoint(chosen)
    if existing == "rerun":  # an older one is there when both begin
        shutil.copytree(micro_checkpoints / chosen.name, folder)
    run.workspace.lock(chosen).parent.mkdir(parents=True)
    first = FileLock(run.workspace.lock(chosen))
    first.acquire()
    second = threading.Thread(target=lambda: rows.append(checkpoints.train(chosen)))
    second.start()
    while not heard.lines and second.is_alive():
        time.sleep(0.01)
    assert heard.lines == [f"another command is training {chosen.name} (an unknown process): waiting for it"]
    if existing == "reuse":
        shutil.copytree(micro_checkpoints / chosen.name, folder)
    first.release()
    second.join(timeout=60)
    record = finished(folder)
    assert record is not None and [row.checkpoint for row in rows] == [record.weights]
    assert chosen.key in run.store.rows()


def test_the_lock_is_given_back_when_training_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a failed training that makes the next command wait for ever."""

    def fails(*_: object) -> None:
        raise RuntimeError("no luck")

    monkeypatch.setattr("marsbench.training.trainer.train", fails)
    checkpoints = Checkpoints(Run(preset("micro"), Workspace(tmp_path, "micro")))
    chosen = checkpoints.recipe(TrainedStage("base", None))
    with pytest.raises(RuntimeError, match="no luck"):
        checkpoints.train(chosen)
    FileLock(Workspace(tmp_path, "micro").lock(chosen)).acquire(timeout=1).lock.release()
