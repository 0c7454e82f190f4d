"""Bases that are shipped: stages start from them, and a missing or damaged one is said in one clear line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch
from safetensors.torch import load_file, save_file

from marsbench import presets
from marsbench.errors import UserError
from marsbench.line import TrainedStage
from marsbench.paths import PACKAGE
from marsbench.presets import Preset, preset
from marsbench.rows.workspace import Workspace
from marsbench.running.checkpoints import Checkpoints
from marsbench.running.run import Run
from marsbench.training import checkpoints, records
from marsbench.training.bases import ship
from marsbench.training.stages import lineage, recipe

WEIGHTS = "model.safetensors"


@pytest.fixture
def shipping(tmp_path: Path, micro_checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> Preset:
    """Scale micro with a base that is shipped with the package."""
    (trained,) = micro_checkpoints.glob("base-*")
    ship(trained, tmp_path / "bases" / "base")
    monkeypatch.setattr(presets, "_beside", lambda place: str(tmp_path / "bases" / place.removeprefix("./")))
    return replace(preset("micro"), published={"base": presets._beside("./base")})


def of(scale: Preset, folder: Path) -> Checkpoints:
    """The checkpoints of a run at a scale."""
    return Checkpoints(Run(scale, Workspace(folder / "out", "micro")))


def test_a_shipped_base_is_the_trained_one_in_bf16(shipping: Preset, micro_checkpoints: Path) -> None:
    """Guards against a base that is shipped from elsewhere, in full width, or without its tokenizer."""
    (trained,) = micro_checkpoints.glob("base-*")
    folder = Path(shipping.published["base"])
    full, half = load_file(trained / WEIGHTS), load_file(folder / WEIGHTS)
    assert {name: tensor.bfloat16() for name, tensor in full.items()}.keys() == half.keys()
    assert all(torch.equal(half[name], tensor.bfloat16()) for name, tensor in full.items())
    record = records.finished(folder)
    assert record is not None and record.recipe["stage"] == "base" and record.weights == records.weights_hash(folder)
    assert checkpoints.load(folder).mask_id == checkpoints.load(trained).mask_id


def test_stages_start_from_the_shipped_base(shipping: Preset, tmp_path: Path) -> None:
    """Guards against a base trained anew although it is there, and against one key for two bases."""
    assert lineage(shipping, "mars") == ["ar_sft", "mars"] and lineage(preset("micro"), "mars")[0] == "base"
    assert recipe(shipping, "ar_sft").key != recipe(preset("micro"), "ar_sft").key
    found, short = of(shipping, tmp_path), replace(shipping.finetuning, steps=1)
    assert found.path(TrainedStage("base", None)) == shipping.published["base"]
    folder = Path(of(replace(shipping, finetuning=short), tmp_path).path(TrainedStage("ar_sft", None)))
    started, ended = (load_file(Path(one) / WEIGHTS) for one in (shipping.published["base"], folder))
    assert all((ended[name] - tensor.float()).abs().max() < 0.02 for name, tensor in started.items()), "not its child"
    assert not list(folder.parent.glob("base-*"))


def test_from_scratch_trains_the_base_too(shipping: Preset) -> None:
    """Guards against a run "from nothing" that starts from what was shipped."""
    anew = shipping.with_checkpoints([], train_all=True)
    assert lineage(anew, "ar_sft") == ["base", "ar_sft"] and anew.ready_checkpoint("base", None) is None


def test_a_missing_or_damaged_base_is_one_clear_line(shipping: Preset, tmp_path: Path) -> None:
    """Guards against a traceback from a loader, and against training from weights that are not the record's."""
    folder = Path(shipping.published["base"])
    weights = load_file(folder / WEIGHTS)
    name = next(iter(weights))
    save_file({**weights, name: weights[name] + 1}, folder / WEIGHTS, metadata={"format": "pt"})
    for stage in ("base", "ar_sft"):
        with pytest.raises(UserError, match="the shipped base is damaged"):
            of(shipping, tmp_path).path(TrainedStage(stage, None))
    (folder / records.RECORD).write_text("{")
    with pytest.raises(UserError, match="the shipped base cannot be read"):
        of(shipping, tmp_path).path(TrainedStage("base", None))
    shutil.rmtree(folder)
    with pytest.raises(UserError, match=r"(?s)the shipped base is missing.*--from-scratch"):
        of(shipping, tmp_path).path(TrainedStage("base", None))


@pytest.mark.slow
def test_a_wheel_brings_the_bases_and_decodes(tmp_path: Path) -> None:
    """Guards against bases that lie in a checkout and in no wheel: a user's first command would train for an hour."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=PACKAGE.parent, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert sum(one.compress_size for one in ZipFile(wheel).infolist() if "/bases/" in one.filename) < 8 * 2**20
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--target",
        str(tmp_path / "site"),
        str(wheel),
    ]
    subprocess.run(install, check=True, capture_output=True)
    (tmp_path / "in.jsonl").write_text('{"prompt_ids": [5, 6, 7]}\n')
    decoding = "from marsbench.cli import app\nfor stage in ('base', 'short_base'):\n    app(['decode', '--model', "
    decoding += "f'site/marsbench/presets/bases/mini/{stage}', '--method', 'ar', '--max-new-tokens', '8', "
    decoding += "'--prompt-ids', 'in.jsonl', '--out', f'{stage}.jsonl'], standalone_mode=False)"
    alone = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    subprocess.run([sys.executable, "-c", decoding], cwd=tmp_path, env=alone, check=True)
    for stage in ("base", "short_base"):
        assert json.loads((tmp_path / f"{stage}.jsonl").read_text())["forwards"] >= 1
