"""Batches cut by the memory at hand: the same loss and gradient, within the limit, and as before when resumed."""

from __future__ import annotations

import copy
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_scales import TALK, save_base, save_chat
from torch import Tensor
from transformers import PreTrainedModel

from marsbench.presets import Preset, preset
from marsbench.running.training_cost import STAGES, training_speed
from marsbench.training import memory, records, trainer
from marsbench.training.gated import GatedAdapter, gated_loss
from marsbench.training.memory import Batch, Fitting, bytes_kept, pieces, row_sizes
from marsbench.training.objectives import IGNORED, ar_loss, mars_loss
from marsbench.training.records import TrainingRecord
from marsbench.training.stages import recipe
from marsbench.training.trainer import train

MASK = 3
CPU = torch.device("cpu")
GIB = 2**30


def batch() -> Batch:
    """Four sequences, shortest first: two turns, an end in mid-block, padding behind all but the last."""
    torch.manual_seed(3)
    ids = torch.randint(4, 900, (4, 23))
    labels = torch.full_like(ids, IGNORED)
    for row, (first, end) in enumerate([(3, 9), (5, 13), (2, 14), (8, 21)]):
        labels[row, first:end] = ids[row, first:end]
    labels[2, 6:9] = IGNORED
    return {"input_ids": ids, "labels": labels, "weight": torch.tensor([1.0, 0.5, 2.0, 3.0])}


def test_pieces_hold_all_rows_in_order_and_no_more_than_fits() -> None:
    """Guards against rows lost, met twice or out of order, labels cut off, and padding that takes the room."""
    whole = batch()
    assert row_sizes(whole["labels"], noisy=True).tolist() == [9 + 6, 13 + 8, 14 + 9, 21 + 13]
    cut = pieces(whole, 45, noisy=True)
    assert [tuple(piece["labels"].shape) for piece in cut] == [(2, 13), (1, 14), (1, 21)]
    assert torch.equal(torch.cat([piece["weight"] for piece in cut]), whole["weight"])
    learned = [piece["labels"][piece["labels"] != IGNORED] for piece in cut]
    assert torch.equal(torch.cat(learned), whole["labels"][whole["labels"] != IGNORED])
    assert [len(piece["labels"]) for piece in pieces(whole, 1, noisy=True)] == [1, 1, 1, 1], "a row must go somehow"
    assert [len(piece["labels"]) for piece in pieces(whole, 10_000, noisy=True)] == [4]


@pytest.mark.parametrize("name", ["ar", "mars", "mars weighed, as the paper aligns it", "gated"])
def test_pieces_teach_what_the_whole_batch_does(name: str, golden_models: dict[str, PreTrainedModel]) -> None:
    """Guards against a piece that counts for more than its rows, a loss that sees what was cut, and other draws."""
    model, whole = copy.deepcopy(golden_models["mars"]).train(), batch()
    weight = whole.pop("weight")
    learner: torch.nn.Module = model
    if name == "gated":
        learner = GatedAdapter(model.requires_grad_(False), 2)
        torch.nn.init.normal_(learner.ups[0])  # type: ignore[arg-type]
    if "weighed" in name:
        whole["weight"] = weight

    def loss(part: Batch) -> Tensor:
        if name == "ar":
            return ar_loss(model, **part)
        if name == "gated":
            return gated_loss(learner, **part, model=model, block_size=4, mask_token_id=MASK)
        alignment: Any = "paper" if "paper" in name else "released"
        return mars_loss(model, **part, block_size=4, mask_token_id=MASK, alignment=alignment).total

    def learned(parts: list[Batch]) -> tuple[float, list[Tensor]]:
        learner.zero_grad()
        torch.manual_seed(7)
        losses = [loss(part) * (len(part["labels"]) / 4) for part in parts]
        for one in losses:
            one.backward()  # type: ignore[no-untyped-call]
        return sum(one.item() for one in losses), [p.grad.clone() for p in learner.parameters() if p.grad is not None]

    at_once, gradients = learned([whole])
    in_pieces, found = learned(pieces(whole, 45, noisy=name != "ar"))
    assert in_pieces == pytest.approx(at_once, rel=1e-5)
    assert len(gradients) > 2
    for ours, theirs in zip(found, gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-3)


def test_what_fits_is_measured(
    golden_models: dict[str, PreTrainedModel], scale: Preset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against more at once than there is room for, a limit that nobody heeds, and numbers drawn on the way."""
    model = copy.deepcopy(golden_models["ar"]).train()
    monkeypatch.setattr("marsbench.training.memory.resident", lambda _: 2 * GIB)

    fitting = Fitting(recipe(scale, "ar_sft"), CPU)
    fitting.longest = 64

    def fits(free: int, limit: int | None) -> int:
        fitting.limit = limit
        monkeypatch.setattr("marsbench.training.memory.at_hand", lambda _: free)
        loss = lambda **given: ar_loss(model, **given)  # noqa: E731
        return fitting.room(loss, [*model.parameters()])

    before = torch.get_rng_state()
    most = fits(4 * GIB, None)
    assert torch.equal(torch.get_rng_state(), before)
    assert fits(64 * GIB, 6 * GIB) == most == fits(4 * GIB, 64 * GIB)
    ids = torch.ones(4, 64, dtype=torch.long)
    each = bytes_kept(lambda: ar_loss(model, ids, ids), model.parameters()) / ids.numel()
    assert GIB < most * each < 3 * GIB
    assert fits(64 * GIB, 2 * GIB) == 1, "without room, one row at a time"


KEEPING = """
import torch
from marsbench.training.memory import give_back_freed_memory, keep_freed_memory, resident
cpu = torch.device("cpu")
keep_freed_memory()
tensors = [torch.ones(2**20) for _ in range(100)]
last, full = tensors[-1], resident(cpu)
del tensors
kept = resident(cpu)
give_back_freed_memory()
print(full - kept, kept - resident(cpu), float(last.sum()))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator keeps what it likes")
def test_freed_memory_is_kept_until_it_is_given_back() -> None:
    """Guards against a process that grows from step to step by gaps that no tensor fits in, below one that lives."""
    done = subprocess.run([sys.executable, "-c", KEEPING], capture_output=True, text=True, check=True)
    gone, given_back, whole = map(float, done.stdout.split())
    assert gone < 100 * 2**20 < 300 * 2**20 < given_back and whole == 2**20


@pytest.mark.parametrize(("held", "times"), [(4, 0), (7, 1)])
def test_a_process_near_its_limit_makes_room(
    held: float, times: int, scale: Preset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a limit that only the first step keeps to, and memory fetched anew in every step."""
    given: list[None] = []
    monkeypatch.setattr(memory, "resident", lambda device: int(held * GIB))
    monkeypatch.setattr(memory, "give_back_freed_memory", lambda: given.append(None))
    fitting = Fitting(recipe(scale, "base_mars"), CPU)
    fitting.limit = 8 * GIB
    fitting.make_room()
    assert len(given) == times


def test_a_containers_limit_counts(tmp_path: Path) -> None:
    """Guards against the memory of a whole machine, of which a container may take a part."""
    for name, text in (
        ("memory.max", "1000\n"),
        ("memory.current", "700"),
        ("memory.stat", "file 9\ninactive_file 50"),
    ):
        (tmp_path / name).write_text(text)
    assert memory._left_in_container(tmp_path) == 350
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._left_in_container(tmp_path) is None is memory._left_in_container(tmp_path / "nowhere")


# ---- whole trainings ----


@pytest.fixture(scope="module")
def scale(tmp_path_factory: pytest.TempPathFactory) -> Preset:
    """Scale 135m with a base of toy size."""
    folder = tmp_path_factory.mktemp("scale")
    base = save_base(folder / "base", spare_rows=5)
    data = save_chat(folder / "chat.jsonl", *[TALK, TALK[1:3], TALK[:3]] * 5)
    return preset("135m").adapted(base=str(base), chat_data=str(data), steps=8, batch_size=6)


def trained(scale: Preset, folder: Path, until: int | None = None) -> TrainingRecord | None:
    """A training of stage mars from the base; interrupted at a step."""
    chosen = recipe(scale, "mars")

    def stop(step: int, *_: Any) -> None:
        if step == until:
            raise KeyboardInterrupt

    try:
        train(chosen, folder / chosen.name, None, stop, lambda line: None)
    except KeyboardInterrupt:
        return None
    return records.finished(folder / chosen.name)


def test_a_training_in_pieces_learns_the_same(scale: Preset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a logged loss, or steps, that depend on how much memory is free; also where nobody tells."""
    records = {}
    for most in (10_000, 150, None):
        monkeypatch.setattr(Fitting, "room", lambda *_, most=most, **__: most)
        monkeypatch.setattr(trainer, "at_hand", lambda _, most=most: most)
        found = trained(scale, tmp_path / str(most))
        assert found is not None and found.steps == 8
        assert found.provenance.get("entries_at_once") == most
        records[most] = found.losses
    assert records[150] == pytest.approx(records[10_000], rel=1e-2)  # bf16, where the CPU has it
    assert records[None] == pytest.approx(records[10_000], rel=1e-2)


def test_a_resumed_training_cuts_as_it_did(scale: Preset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against weights that depend on how much memory was free when an interrupted training went on."""
    monkeypatch.setattr(Fitting, "room", lambda *_, **__: 150)
    whole = trained(scale, tmp_path / "whole")
    assert trained(scale, tmp_path / "cut", until=5) is None
    (state,) = (tmp_path / "cut").glob("*.partial/checkpoint-4/resumable.json")
    assert json.loads(state.read_text())["entries_at_once"] == 150
    monkeypatch.setattr(Fitting, "room", lambda *_, **__: 10_000)
    resumed = trained(scale, tmp_path / "cut")
    assert whole is not None and resumed is not None
    assert (resumed.weights, resumed.losses) == (whole.weights, whole.losses)


# ---- how fast it is ----


def test_the_speed_of_a_training_is_that_of_its_own_steps(scale: Preset) -> None:
    """Guards against steps that are counted but not timed, tokens of other steps, and a peak without the training."""
    found = training_speed(recipe(scale, STAGES[0]), steps=2)
    assert found.stage == "ar_sft" and len(found.tokens) == len(found.seconds) == 2
    assert all(count >= 6 * 20 for count in found.tokens) and all(took > 0 for took in found.seconds)
    assert found.peak_bytes is None or found.peak_bytes > GIB / 8
