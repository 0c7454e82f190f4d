"""The keys of rows and checkpoints: today's code must find what was measured, or it is measured again."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest
from stored import page_rows

from marsbench.keys import HISTORY, versions
from marsbench.line import TrainedStage
from marsbench.presets import preset
from marsbench.rows.kinds import EvaluationRow, TrainingRow
from marsbench.rows.workspace import Workspace
from marsbench.running.cells import Cells
from marsbench.running.plans import Asked
from marsbench.running.run import Run
from marsbench.studies import studies
from marsbench.training.stages import recipe

ROOT = Path(__file__).resolve().parent.parent
SAME_VERSIONS = {name: metadata.version(name) for name in ("torch", "transformers")}
ROWS = [
    (scale, seed, key)
    for scale, seed in (("mini", 0), ("mini", 1))
    for key, study in studies().items()
    if study.plan in study.plans and key in Workspace(ROOT, scale, f"seed{seed}" if seed else "").pages
]


def test_a_version_is_the_length_of_its_history(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a new line of history that leaves keys as they were."""
    before = recipe(preset("micro"), "base").key
    monkeypatch.setitem(HISTORY, "world", (*HISTORY["world"], "another world"))
    assert versions("world") == {"world": len(HISTORY["world"])}
    assert recipe(preset("micro"), "base").key != before


@pytest.mark.parametrize(("scale", "seed", "table"), ROWS)
def test_committed_cells_and_checkpoints_are_found_again(scale: str, seed: int, table: str, tmp_path: Path) -> None:
    """Guards against a run that trains and measures again what the committed rows hold."""
    rows, plan = page_rows(table, scale, seed), studies()[table].plan
    assert plan is not None
    seed = seed if plan.seed is None else plan.seed
    run = Run(preset(scale), Workspace(tmp_path, scale), seed=seed)
    arms, checked = {arm.name: arm for arm in plan.lines}, 0
    trained = {}
    for row in rows:
        if isinstance(row, TrainingRow):
            trained[TrainedStage(row.stage, row.block_size)] = row.checkpoint
            if SAME_VERSIONS.items() <= row.provenance["versions"].items():  # they are part of a recipe
                size = row.block_size or 4
                assert row.key == recipe(preset(scale), row.stage, block_size=size, seed=seed).key
        if isinstance(row, EvaluationRow) and row.status == "done":
            arm = arms[row.arm]
            draft = trained[arm.draft] if arm.draft else None
            assert row.key == Cells(run)._key(Asked(arm, row.benchmark, plan.questions), row.checkpoint, draft)
            checked += 1
    assert checked >= 6
