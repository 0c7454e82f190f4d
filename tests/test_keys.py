"""The keys of rows and checkpoints: today's code must find what was measured, or it is measured again."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from marsbench import keys
from marsbench.presets import preset
from marsbench.rows.kinds import EvaluationRow, TrainingRow
from marsbench.rows.store import read_rows
from marsbench.rows.workspace import Workspace
from marsbench.running.cells import Cells
from marsbench.running.plans import TrainedStage
from marsbench.running.run import Run
from marsbench.studies import studies
from marsbench.training.stages import recipe

SAME_VERSIONS = {name: metadata.version(name) for name in ("torch", "transformers")}
ROOT = Path(__file__).resolve().parent.parent
TABLES = [key for key, study in studies().items() if study.cells and (ROOT / f"results/tiny/{key}.jsonl").exists()]


@pytest.mark.parametrize("parts", keys.SAME_NUMBERS, ids="+".join)
def test_code_that_decides_numbers_has_not_changed_unseen(parts: tuple[str, ...]) -> None:
    """Guards against everything measured again for an import that moved, and old rows kept for code that differs.

    If no number has changed: `python -m marsbench.keys` prints what belongs into `SAME_NUMBERS`. If one may have: put
    today's hash there twice, and measure the committed rows again.
    """
    assert keys.source_hash(*parts) == keys.SAME_NUMBERS[parts].keyed_by


def test_changed_code_has_keys_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against numbers of code that somebody changed passing for those of the code that was released."""
    (tmp_path / "decoding").mkdir()
    (tmp_path / "decoding" / "engine.py").write_text("changed = True")
    monkeypatch.setattr(keys, "PACKAGE", tmp_path)
    keys.source_hash.cache_clear()
    assert keys.source_hash(*keys.DECODING) not in [known.keyed_by for known in keys.SAME_NUMBERS.values()]
    keys.source_hash.cache_clear()


@pytest.mark.parametrize("table", TABLES)
def test_committed_cells_and_checkpoints_are_found_again(table: str, tmp_path: Path) -> None:
    """Guards against a run that trains and measures again what the committed rows hold."""
    run, plan = Run(preset("tiny"), Workspace(tmp_path, "tiny")), studies()[table].plan
    assert plan is not None
    arms, checked = {arm.name: arm for arm in plan.arms}, 0
    trained = {}
    for row in read_rows(ROOT / f"results/tiny/{table}.jsonl"):
        if isinstance(row, TrainingRow):
            trained[TrainedStage(row.stage, row.block_size)] = row.checkpoint
            if SAME_VERSIONS.items() <= row.provenance["versions"].items():  # they are part of a recipe
                assert row.key == recipe(preset("tiny"), row.stage, block_size=row.block_size or 4).key
        if isinstance(row, EvaluationRow) and row.status == "done":
            arm = arms[row.arm]
            draft = trained[arm.draft] if arm.draft else None
            assert row.key == Cells(run)._key(arm, row.benchmark, plan.questions, row.checkpoint, draft)
            checked += 1
    assert checked >= 6
