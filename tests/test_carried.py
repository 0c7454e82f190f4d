"""Acceptance that is carried over: as many tokens a step as were said, whatever a model of random weights says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from test_static import MASK, PAD, llama

from marsbench.compiled.fixed import Steps
from marsbench.decoding.engine import Batch, decode
from marsbench.decoding.generation import Request
from marsbench.errors import UserError
from marsbench.findings.sweep import SweepCells
from marsbench.methods import Options, build_method
from marsbench.methods.carried import carried_over
from marsbench.racing.carried import carried_of, draws_of, write_table
from marsbench.racing.grid import read_grid
from marsbench.rows.kinds import SweepRow


@pytest.mark.parametrize("fixed", [False, True], ids=["eager", "fixed"])
@pytest.mark.parametrize(
    ("name", "mean"), [("mars", 1.79), ("mars-verified", 2.6), ("mars-verified", 4.0), ("mars", 1.0)]
)
def test_a_step_settles_as_much_as_was_said(name: str, mean: float, fixed: bool) -> None:
    """Guards against random weights that accept nothing, or everything, where a trained model's acceptance is said."""
    model, carried = llama(0), carried_of({"mean": mean}, 3)
    method = carried_over(build_method(name, Options(mask_id=MASK)), draws_of(carried.rates, 1), torch.device("cpu"))
    requests = [Request([4 + row, 5, 6], 300, 0.99 if name == "mars" else None, ignore_eos=True) for row in range(4)]
    kind = (lambda *given, **more: Batch(*given, shapes=Steps(), **more)) if fixed else Batch
    done = decode(model, method, requests, eos_id=-1, pad_id=PAD, kind=kind)
    emitted, forwards = sum(one.emitted for one in done), sum(one.forwards for one in done)
    assert 1 + sum(carried.rates) == pytest.approx(mean) and emitted / forwards == pytest.approx(mean, rel=0.06)
    assert decode(model, method, requests, eos_id=-1, pad_id=PAD, kind=kind) == done, "the draw has a seed"


def test_other_methods_cannot_be_told() -> None:
    """Guards against a race of numbers that no method has produced."""
    with pytest.raises(UserError, match="cannot be carried over to 'ar'"):
        carried_over(build_method("ar", Options()), [1], torch.device("cpu"))


def test_a_table_is_written_and_read(tmp_path: Path) -> None:
    """Guards against tables that other suites cannot read, or theirs that we cannot."""
    file = write_table(tmp_path / "mars.yaml", "mars-7b", {3: 2.4, 1: 1.7})
    assert yaml.safe_load(file.read_text()) == {"mars-7b": {"thinking_off": {1: 1.7, 3: 2.4}}}
    assert sum(carried_of({"file": str(file)}, 3).rates) == pytest.approx(1.4)
    (tmp_path / "theirs.yaml").write_text("their-model:\n  thinking_on: {3: '2.5', 1: 1.4}\n")
    theirs = carried_of({"file": str(tmp_path / "theirs.yaml")}, 1)
    assert theirs.rates == pytest.approx((0.4,)) and "theirs.yaml" in theirs.source
    with pytest.raises(UserError, match="nothing for 2 drafts"):
        carried_of({"file": str(file)}, 2)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"mean": 5}, "cannot settle 5"), ({"mean": 0.5}, "cannot settle"), ({"rates": [0.9, 0.95, 0.1]}, "no rates"),
        ({"rates": [0.9]}, "no rates of 3"), ({"mean": 2, "rates": [1]}, "not understood"), ("often", "not understood"),
        ({"published": "chess"}, "no tokens per forward of chess"), ({"file": "/nowhere.yaml"}, "no table"),
        ({"mean": 2, "scale": "7b"}, "not understood"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_refused(said: Any, why: str) -> None:
    """Guards against a grid whose mistake shows as a speed."""
    with pytest.raises(UserError, match=why):
        carried_of(said, 3)


def test_a_grid_says_it_and_rows_tell(tmp_path: Path) -> None:
    """Guards against a forced speed that goes for a measured one, or as a trained checkpoint's."""
    grid = {
        "batch_sizes": [1], "prompts": 6, "repeats": 2,
        "contenders": [
            {"method": "ar", "stage": "mars", "name": "ar"},
            {"method": "mars", "stage": "mars", "threshold": 0.95, "acceptance": {"published": "gsm8k", "scale": "7b"}},
        ],
    }  # fmt: skip
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(grid))
    plain, contender = read_grid(tmp_path / "grid.yaml").contenders
    assert sum(contender.carried) == pytest.approx(0.79) and not contender.of_method
    assert contender.shown["acceptance"] == (
        "carried over from the paper's Table 4, gsm8k, 7b, B = 4, tau = 0.95"
    )  # fmt: skip
    assert "acceptance" not in contender.typed and "carried" not in plain.keyed and "carried" in contender.keyed
    rows = [
        SweepRow(
            key, "done", "", "7b", contender=one.name, stage="mars", draft="", method=one.method, options=one.shown,
            batch_size=1, benchmarks=[], prompts=0, max_new_tokens=9,
        )
        for key, one in (("a", plain), ("b", contender))
    ]  # fmt: skip
    assert [row.key for row in SweepCells.of(rows).rows] == ["a"], "no claim stands on it"
