"""The adapter that comes with the package: whole, small, and what decodes at its scale where nobody names another."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from marsbench.cli import app
from marsbench.commands.shared import Start
from marsbench.fetching.models import MODELS, cache_folder, is_known
from marsbench.presets import preset
from marsbench.training import records
from marsbench.training.adapter_files import SHIPPED, base_of, is_adapter
from marsbench.training.bases import checked_base
from marsbench.training.stages import stage

FOLDER = SHIPPED["smollm2-135m-adapter"]
MOST_BYTES = 22e6


def test_it_is_whole_and_small() -> None:
    """Guards against a file that is cut short or forgotten in the package, and a path of the machine it was made on."""
    assert is_adapter(FOLDER) and checked_base(str(FOLDER)) == FOLDER
    files = [*FOLDER.iterdir()]
    assert sum(file.stat().st_size for file in files) < MOST_BYTES
    assert is_known(base_of(FOLDER)) and base_of(FOLDER).removesuffix("-gguf") in MODELS
    record = records.finished(FOLDER)
    assert record is not None and record.base_weights and record.recipe["head"] == "network"
    assert not Path(record.recipe["pretrained"]["chat_data"]).is_absolute()


def test_it_is_what_decodes_at_its_scale() -> None:
    """Guards against a user who asks for masks at that scale, and is told to train for hours first."""
    scale = preset("135m")
    name, size = Start("135m").own
    assert scale.ready_checkpoint(name, size) == str(FOLDER) and scale.ships(str(FOLDER))
    record = records.finished(FOLDER)
    assert record is not None and (record.recipe["stage"], record.recipe["block_size"]) == (name, size)
    assert stage(name).objective == "gated"
    assert Start("135m", stage="mars").own_stage == "mars" and Start("mini").own == ("mars", 4)


@pytest.mark.slow
@pytest.mark.skipif(not (cache_folder() / "smollm2-135m-gguf").is_dir(), reason="its model has not been fetched")
@pytest.mark.parametrize("where", [["--scale", "135m"], ["--checkpoint", "smollm2-135m-adapter"]])
def test_a_question_is_answered_with_it(where: list[str], tmp_path: Path) -> None:
    """Guards against an adapter that does not fit its model, or changes what it says."""
    asked = ["show", "What is 2 + 3?", "--method", "ar", "--method", "mars-verified", "--max-new-tokens", "24"]
    done = CliRunner().invoke(app, [*asked, *where, "--output", str(tmp_path)])
    assert done.exit_code == 0, done.output
    tokens, forwards = (
        [int(count) for count in re.findall(rf"(\d+) {what}", done.output)] for what in ("tokens", "forward passes")
    )
    assert tokens[0] == tokens[1] == forwards[0] > forwards[1]
