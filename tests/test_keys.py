"""The keys of rows and checkpoints: today's code must find what was measured, or it is measured again.

`python tests/test_keys.py` renews what `tests/code_behind_versions.json` says of the code of today.
"""

from __future__ import annotations

import hashlib
import json
from importlib import metadata
from pathlib import Path
from typing import Any, get_args

import pytest

from marsbench.keys import HISTORY, Work, versions
from marsbench.line import TrainedStage
from marsbench.paths import PACKAGE
from marsbench.presets import preset
from marsbench.rows.kinds import EvaluationRow, TrainingRow
from marsbench.rows.store import read_rows
from marsbench.rows.workspace import Workspace
from marsbench.running.cells import Cells
from marsbench.running.plans import Asked
from marsbench.running.run import Run
from marsbench.studies import studies
from marsbench.training.stages import recipe

ROOT = Path(__file__).resolve().parent.parent
SEEN = Path(__file__).parent / "code_behind_versions.json"
SAME_VERSIONS = {name: metadata.version(name) for name in ("torch", "transformers")}
# The code behind each kind of work, as patterns of files of the package.
CODE: dict[Work, tuple[str, ...]] = {
    "training": (
        *(f"training/{name}.py" for name in ("adapter_files", "chat_data", "data", "gated", "learners", "medusa")),
        *(f"training/{name}.py" for name in ("memory", "objectives", "starting", "tokenizer")),
        *(f"training/{name}.py" for name in ("trainer", "visibility")),
        "forward/adapter.py",
    ),
    "decoding": ("forward/*.py", "decoding/*.py", "compiled/*.py", "methods/*.py"),
    "scoring": ("evaluation/*.py", "studies/gains/word_classes.py"),
    "timing": ("racing/race.py", "racing/step_time.py", "running/training_cost.py", "serving/engine.py"),
    "world": ("world/*.py",),
}
ROWS = [
    (scale, seed, key)
    for scale, seed in (("mini", 0), ("mini", 1))
    for key, study in studies().items()
    if study.cells and (ROOT / f"results/{scale}/{f'seed{seed}' if seed else ''}/{key}.jsonl").exists()
]


def code_today(work: Work) -> dict[str, Any]:
    """What is recorded of a kind of work: its version, and a hash of the files behind it."""
    files = sorted(file for pattern in CODE[work] for file in PACKAGE.glob(pattern))
    content = b"\0".join(file.read_bytes() for file in files)
    return {"version": versions(work)[work], "code": hashlib.sha256(content).hexdigest()[:16]}


@pytest.mark.parametrize("work", get_args(Work))
def test_whoever_changes_what_makes_numbers_is_asked_whether_they_change(work: Work) -> None:
    """Guards against numbers of old code that pass for those of new code, because nobody thought of the version."""
    seen = json.loads(SEEN.read_text(encoding="utf-8"))[work]
    assert code_today(work) == seen, (
        f"the code of {work} has changed. Does a number come out otherwise? Then add a line to its HISTORY in "
        "marsbench/keys.py. In either case `python tests/test_keys.py` writes down what was looked at."
    )


def test_a_version_is_the_length_of_its_history(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a new line of history that leaves keys as they were."""
    before = recipe(preset("micro"), "base").key
    monkeypatch.setitem(HISTORY, "world", (*HISTORY["world"], "another world"))
    assert versions("world") == {"world": len(HISTORY["world"])}
    assert recipe(preset("micro"), "base").key != before


@pytest.mark.parametrize(("scale", "seed", "table"), ROWS)
def test_committed_cells_and_checkpoints_are_found_again(scale: str, seed: int, table: str, tmp_path: Path) -> None:
    """Guards against a run that trains and measures again what the committed rows hold."""
    rows, plan = (
        read_rows(ROOT / f"results/{scale}/{f'seed{seed}' if seed else ''}/{table}.jsonl"),
        studies()[table].plan,
    )
    assert plan is not None
    seed = int(rows[0].provenance["seed"]) if plan.apart else seed
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


if __name__ == "__main__":
    SEEN.write_text(json.dumps({work: code_today(work) for work in get_args(Work)}, indent=1) + "\n", encoding="utf-8")
