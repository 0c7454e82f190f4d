"""The training stages at micro scale: what tells them apart, their data, and training that is interrupted."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerControl, TrainerState, TrainingArguments

from marsbench.presets import Preset, preset
from marsbench.running.training_cost import _memory
from marsbench.training import records
from marsbench.training.data import Collator, TrainingData, timestep_weights
from marsbench.training.records import TrainingRecord
from marsbench.training.stages import STAGES, MarsVariant, recipe
from marsbench.training.trainer import _Restart, rate_in_cycle, train

# From one start: what differs from `mars` by its parent alone is left out.
MARS_STAGES = [
    name for name, stage in STAGES.items() if stage.objective == "mars" and stage.parent == "ar_sft" and not stage.draft
]
MICRO = preset("micro").adapted(steps=6)


def trained(stage: str, folder: Path, parent: Path | None, until: Callable[[int], None] = lambda step: None) -> Path:
    """A few steps of a stage at scale micro; `until` may interrupt them."""
    chosen = recipe(MICRO, stage)
    train(chosen, folder / chosen.name, parent, lambda step, *_: until(step), lambda line: None)
    return folder / chosen.name


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint to continue from."""
    return trained("base", tmp_path_factory.mktemp("start"), None)


def record(folder: Path) -> TrainingRecord:
    found = records.finished(folder)
    assert found is not None
    return found


def test_every_stage_has_a_key_of_its_own() -> None:
    """Guards against a variant that is taken for another stage's checkpoint, and a `mars` that is not the released."""
    recipes = [asdict(recipe(MICRO, stage)) | {"stage": ""} for stage in MARS_STAGES]
    assert all(recipes.count(one) == 1 for one in recipes)
    assert len({recipe(MICRO, stage).key for stage in STAGES}) == len(STAGES)
    assert STAGES["mars"].variant == STAGES["mars_no_sft"].variant == STAGES["draft_mars"].variant == MarsVariant()


def test_every_mars_stage_trains_in_its_own_way(start: Path, tmp_path: Path) -> None:
    """Guards against an option of a stage that never reaches its training."""
    weights = {stage: record(trained(stage, tmp_path, start)).weights for stage in MARS_STAGES}
    assert len(set(weights.values())) == len(weights), weights


def test_random_weights_are_the_same_after_a_resumption(start: Path, tmp_path: Path) -> None:
    """Guards against sequences whose weights are drawn anew when an interrupted training goes on."""

    def kill(step: int) -> None:
        if step == 4:
            raise KeyboardInterrupt

    stage = "mars_no_sft_released"
    whole = record(trained(stage, tmp_path / "whole", start))
    with pytest.raises(KeyboardInterrupt):
        trained(stage, tmp_path / "killed", start, kill)
    assert list((tmp_path / "killed").glob("*.partial/checkpoint-3"))
    resumed = record(trained(stage, tmp_path / "killed", start))
    assert (resumed.losses, resumed.weights) == (whole.losses, whole.weights)


def test_timestep_weights_are_those_of_uniform_timesteps() -> None:
    """Guards against weights of another law, of another seed, or the same ones in every pass over the data."""
    weights = torch.tensor(timestep_weights(20_000, seed=0))
    timesteps = 1 / weights
    assert timesteps.min() >= 1e-3 and timesteps.max() <= 1
    assert torch.histc(timesteps, 4, 0, 1) == pytest.approx(torch.full((4,), 5000.0), rel=0.05)
    assert timestep_weights(5, seed=0) == pytest.approx(weights[:5].tolist())
    assert timestep_weights(5, seed=1) != timestep_weights(5, seed=0)


def test_a_weight_stays_with_its_place_in_the_order() -> None:
    """Guards against weights that are mixed up in a batch, or that belong to a sequence in every pass."""
    sequence = {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}
    data = TrainingData([sequence], [0, 0, 0], 9, [2.0, 3.0, 5.0])  # type: ignore[list-item]
    assert Collator(0, 2)([data[2], data[0], data[1]])["weight"].tolist() == [5.0, 2.0, 3.0]
    assert "weight" not in Collator(0, 2)([TrainingData([sequence], [0], 3)[0]])  # type: ignore[list-item]


@pytest.mark.parametrize(("block_size", "filled"), [(4, [5, 6, 7, 8, 9, 2, 2, 2]), (None, [5, 6, 7, 8, 9, 0])])
def test_only_whole_blocks_are_filled_with_eos(block_size: int | None, filled: list[int]) -> None:
    """Guards against EOS learned where it was to be left out, and padding learned as if it were EOS."""
    short, long = [5, 6, 7, 8, 9], [5, 6, 7, 8, 9, 10]
    batch = Collator(0, 2, block_size)([{"input_ids": ids, "labels": [-100, -100, *ids[2:]]} for ids in (short, long)])
    assert batch["input_ids"][0].tolist() == filled
    assert batch["labels"][0].tolist() == [-100, -100, *(token or -100 for token in filled[2:])]


def test_memory_of_a_step_counts_what_the_backward_pass_needs() -> None:
    """Guards against storages counted twice or freed in between, and weights counted as activations."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh())

    def loss(inputs: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = model(inputs).sum()
        return total

    weights = 4 * (3 * 5 + 5)
    saved = 4 * (7 * 3 + 7 * 5)  # the input of the linear map, and the output of tanh
    assert _memory(model, loss, {"inputs": torch.rand(7, 3)}) == 4 * weights + saved


def test_counting_the_memory_of_a_step_holds_none() -> None:
    """Guards against gigabytes that stay behind, and slow down whatever is timed later."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh())

    def tensors() -> int:
        gc.collect()
        return sum(type(one) is torch.Tensor for one in gc.get_objects())

    before = tensors()
    for _ in range(3):
        _memory(model, lambda inputs: model(inputs).sum(), {"inputs": torch.rand(7, 3)})
    assert tensors() == before


# ---- cycles ----


def test_the_rate_rises_stays_and_falls_in_every_cycle() -> None:
    """Guards against a rate that falls once, at the end of all cycles, or never comes to its peak."""
    for begun in (0, 12_000, 24_000):
        rates = [rate_in_cycle(begun + step, 12_000) for step in (0, 150, 300, 9_600, 10_800, 11_999)]
        assert rates == pytest.approx([0, 0.5, 1, 1, 0.5, 1 / 2_400])


def in_cycles(steps: int) -> Preset:
    """Scale micro with a base of so many steps, in cycles of 200."""
    assert MICRO.world is not None
    return replace(
        MICRO, world=replace(MICRO.world, pretraining=replace(MICRO.world.pretraining, steps=steps, cycle=200))
    )


def test_a_longer_base_begins_as_a_shorter_one(tmp_path: Path) -> None:
    """Guards against a short base that is not the long one's first part: another rate, other data, another order."""
    short, long = (recipe(in_cycles(steps), "base") for steps in (200, 400))
    train(short, tmp_path / short.name, None, lambda *_: None, lambda line: None)

    def stop(step: int, *_: Any) -> None:
        if step >= 225:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(long, tmp_path / long.name, None, stop, lambda line: None)
    state = tmp_path / f"{long.name}.partial" / "checkpoint-200"
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / short.name, state))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert short.key != long.key


def test_a_cycle_begins_with_an_empty_optimizer() -> None:
    """Guards against moments of the last cycle's end in a cycle that is to be a training of its own."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight])
    arguments, control = TrainingArguments(use_cpu=True), TrainerControl()
    for step, moments in ((4, 1), (6, 0)):
        weight.sum().backward()
        optimizer.step()
        _Restart(3).on_step_begin(arguments, TrainerState(global_step=step), control, optimizer=optimizer)
        assert len(optimizer.state) == moments
