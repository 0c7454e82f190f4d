"""The training stages at micro scale: what tells them apart, their data, and training that is interrupted."""

import copy
import gc
import json
import platform
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_scales import TALK, save_base, save_chat
from tools import FORKED, Models
from torch import Tensor
from transformers import TrainingArguments

from marsbench.presets import Preset, preset
from marsbench.running import training_cost as training_speed_module
from marsbench.running.training_cost import _memory, training_speed
from marsbench.training import memory, records, trainer
from marsbench.training.data import Collator, TrainingData, timestep_weights
from marsbench.training.gated import GatedAdapter, gated_loss
from marsbench.training.memory import Batch, Fitting, bytes_kept, pieces, row_sizes
from marsbench.training.objectives import IGNORED, ar_loss, mars_loss
from marsbench.training.records import TrainingRecord
from marsbench.training.stages import STAGES, MarsVariant, recipe
from marsbench.training.trainer import _StageTrainer, rate_in_cycle, train

# Without the stages that differ from `mars` only by their parent.
MARS_STAGES = [
    name for name, stage in STAGES.items() if stage.objective == "mars" and stage.parent == "ar_sft" and not stage.draft
]
MICRO = preset("micro").adapted(steps=6)


def trained(stage: str, folder: Path, parent: Path | None, scale: Preset = MICRO, until: int | None = None) -> Path:
    """A few steps of a stage, interrupted at the first logged step from `until` on."""
    chosen = recipe(scale, stage)

    def stop(step: int, *_: Any) -> None:
        if until is not None and step >= until:
            raise KeyboardInterrupt

    train(chosen, folder / chosen.name, parent, stop, lambda line: None)
    return folder / chosen.name


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained("base", tmp_path_factory.mktemp("start"), None)


def record(folder: Path) -> TrainingRecord:
    finished = records.finished(folder)
    assert finished is not None
    return finished


def test_every_stage_has_a_key_of_its_own() -> None:
    """Guards against a variant taken for another stage's checkpoint, and a `mars` other than the released one."""
    recipes = [asdict(recipe(MICRO, stage)) | {"stage": ""} for stage in MARS_STAGES]
    assert all(recipes.count(stage) == 1 for stage in recipes)
    assert len({recipe(MICRO, stage).key for stage in STAGES}) == len(STAGES)
    assert STAGES["mars"].variant == STAGES["mars_no_sft"].variant == STAGES["draft_mars"].variant == MarsVariant()


def test_every_mars_stage_trains_in_its_own_way(start: Path, tmp_path: Path) -> None:
    """Guards against an option of a stage that never reaches its training."""
    two = preset("micro").adapted(steps=2)
    weights = {stage: record(trained(stage, tmp_path, start, two)).weights for stage in MARS_STAGES}
    assert len(set(weights.values())) == len(weights), weights


def test_random_weights_are_the_same_after_a_resumption(start: Path, tmp_path: Path) -> None:
    """Guards against sequences whose weights are drawn anew when an interrupted training goes on."""
    stage = "mars_no_sft_released"
    undisturbed = record(trained(stage, tmp_path / "whole", start))
    with pytest.raises(KeyboardInterrupt):
        trained(stage, tmp_path / "killed", start, until=4)
    assert list((tmp_path / "killed").glob("*.partial/checkpoint-3"))
    resumed = record(trained(stage, tmp_path / "killed", start))
    assert (resumed.losses, resumed.weights) == (undisturbed.losses, undisturbed.weights)


def test_timestep_weights_are_those_of_uniform_timesteps() -> None:
    """Guards against weights of another law or seed, equal in every pass, or mixed up in a batch."""
    weights = torch.tensor(timestep_weights(20_000, seed=0))
    timesteps = 1 / weights
    assert timesteps.min() >= 1e-3 and timesteps.max() <= 1
    assert torch.histc(timesteps, 4, 0, 1) == pytest.approx(torch.full((4,), 5000.0), rel=0.05)
    assert timestep_weights(5, seed=0) == pytest.approx(weights[:5].tolist())
    assert timestep_weights(5, seed=1) != timestep_weights(5, seed=0)
    sequence = {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}
    data = TrainingData([sequence], [0, 0, 0], 9, [2.0, 3.0, 5.0])  # type: ignore[list-item]
    assert Collator(0, 2)([data[2], data[0], data[1]])["weight"].tolist() == [5.0, 2.0, 3.0]
    assert "weight" not in Collator(0, 2)([TrainingData([sequence], [0], 3)[0]])  # type: ignore[list-item]


@pytest.mark.parametrize(("block_size", "filled"), [(4, [5, 6, 7, 8, 9, 2, 2, 2]), (None, [5, 6, 7, 8, 9, 0])])
def test_only_whole_blocks_are_filled_with_eos(block_size: int | None, filled: list[int]) -> None:
    """Guards against EOS learned where it should be left out, and padding learned as EOS."""
    short, long = [5, 6, 7, 8, 9], [5, 6, 7, 8, 9, 10]
    batch = Collator(0, 2, block_size)([{"input_ids": ids, "labels": [-100, -100, *ids[2:]]} for ids in (short, long)])
    assert batch["input_ids"][0].tolist() == filled
    assert batch["labels"][0].tolist() == [-100, -100, *(token or -100 for token in filled[2:])]


def test_memory_of_a_step_counts_what_the_backward_pass_needs() -> None:
    """Guards against storages counted twice or freed in between, weights counted as activations, memory that leaks."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh())

    def loss(inputs: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = model(inputs).sum()
        return total

    weights = 4 * (3 * 5 + 5)
    saved = 4 * (7 * 3 + 7 * 5)  # the input of the linear map, and the output of tanh
    assert _memory(model, loss, {"inputs": torch.rand(7, 3)}) == 4 * weights + saved
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh())

    def tensors() -> int:
        gc.collect()
        return sum(type(held) is torch.Tensor for held in gc.get_objects())

    before = tensors()
    for _ in range(3):
        _memory(model, lambda inputs: model(inputs).sum(), {"inputs": torch.rand(7, 3)})
    assert tensors() == before


def test_the_rate_rises_stays_and_falls_in_every_cycle() -> None:
    """Guards against a rate that falls only at the end or misses its peak, and moments kept from the last cycle."""
    for begun in (0, 12_000, 24_000):
        rates = [rate_in_cycle(begun + step, 12_000) for step in (0, 150, 300, 9_600, 10_800, 11_999)]
        assert rates == pytest.approx([0, 0.5, 1, 1, 0.5, 1 / 2_400])
    model, batch = torch.nn.Linear(1, 1, bias=False), {"input": torch.ones(1, 1)}
    learning = _StageTrainer(
        lambda model, input: model(input).sum(), 3, None, model=model, args=TrainingArguments(use_cpu=True)
    )
    optimizer = learning.create_optimizer()
    learning.current_gradient_accumulation_steps = 1
    for step, moments in ((4, 1), (6, 0)):
        model(**batch).sum().backward()
        optimizer.step()
        learning.state.global_step = step
        learning.training_step(model, batch)
        assert len(optimizer.state) == moments


def in_cycles(steps: int) -> Preset:
    """Scale micro with a small base that trains for `steps` steps, in cycles of 50."""
    assert MICRO.world is not None
    budget = replace(MICRO.world.pretraining, steps=steps, cycle=50, batch_size=2)
    return replace(MICRO, world=replace(MICRO.world, model=MICRO.world.draft_model, pretraining=budget))


def test_a_longer_base_begins_as_a_shorter_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a short base that is not the long one's first part: another rate, other data, another order."""
    monkeypatch.setattr(trainer, "_SAVES", 5)  # also at the end of a cycle
    short = trained("base", tmp_path / "short", None, in_cycles(50))
    with pytest.raises(KeyboardInterrupt):
        trained("base", tmp_path / "long", None, in_cycles(100), until=55)
    (state,) = (tmp_path / "long").glob("*.partial/checkpoint-50")
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (short, state))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert state.parent.stem != short.name, "each has a key of its own"


MASK_ID = 3
CPU = torch.device("cpu")
GIB = 2**30


def four_rows() -> Batch:
    """Four sequences, shortest first: two turns, an end in mid-block, padding behind all but the last."""
    torch.manual_seed(3)
    ids = torch.randint(4, 900, (4, 23))
    labels = torch.full_like(ids, IGNORED)
    for row, (first, end) in enumerate([(3, 9), (5, 13), (2, 14), (8, 21)]):
        labels[row, first:end] = ids[row, first:end]
    labels[2, 6:9] = IGNORED
    return {"input_ids": ids, "labels": labels, "weight": torch.tensor([1.0, 0.5, 2.0, 3.0])}


def test_pieces_hold_all_rows_in_order_and_no_more_than_fits() -> None:
    """Guards against rows lost, repeated or out of order, labels cut off, and padding that fills the memory."""
    rows = four_rows()
    assert row_sizes(rows["labels"], noisy=True).tolist() == [9 + 6, 13 + 8, 14 + 9, 21 + 13]
    cut = pieces(rows, 45, noisy=True)
    assert [tuple(piece["labels"].shape) for piece in cut] == [(2, 13), (1, 14), (1, 21)]
    assert torch.equal(torch.cat([piece["weight"] for piece in cut]), rows["weight"])
    learned = [piece["labels"][piece["labels"] != IGNORED] for piece in cut]
    assert torch.equal(torch.cat(learned), rows["labels"][rows["labels"] != IGNORED])
    assert [len(piece["labels"]) for piece in pieces(rows, 1, noisy=True)] == [1, 1, 1, 1], "a row is never cut"
    assert [len(piece["labels"]) for piece in pieces(rows, 10_000, noisy=True)] == [4]


@pytest.mark.parametrize("name", ["ar", "mars", "mars weighed, as the paper aligns it", "gated"])
def test_pieces_teach_what_the_whole_batch_does(name: str, golden_models: Models) -> None:
    """Guards against a piece that counts for more than its rows, a loss that sees other pieces, and other draws."""
    model, rows = copy.deepcopy(golden_models["mars"]).train(), four_rows()
    weight = rows.pop("weight")
    learner: torch.nn.Module = model
    if name == "gated":
        learner = GatedAdapter(model.requires_grad_(False), 2)
        torch.nn.init.normal_(learner.ups[0])  # type: ignore[arg-type]
    if "weighed" in name:
        rows["weight"] = weight

    def loss(part: Batch) -> Tensor:
        if name == "ar":
            return ar_loss(model, **part)
        if name == "gated":
            return gated_loss(learner, **part, model=model, block_size=4, mask_token_id=MASK_ID)
        alignment: Any = "paper" if "paper" in name else "released"
        return mars_loss(model, **part, block_size=4, mask_token_id=MASK_ID, alignment=alignment).total

    def learned(parts: list[Batch]) -> tuple[float, list[Tensor]]:
        learner.zero_grad()
        torch.manual_seed(7)
        losses = [loss(part) * (len(part["labels"]) / 4) for part in parts]
        total = torch.stack(losses).sum()
        total.backward()  # type: ignore[no-untyped-call]
        return total.item(), [p.grad.clone() for p in learner.parameters() if p.grad is not None]

    at_once, expected = learned([rows])
    in_pieces, gradients = learned(pieces(rows, 45, noisy=name != "ar"))
    assert in_pieces == pytest.approx(at_once, rel=1e-5)
    assert len(expected) > 2
    torch.testing.assert_close(gradients, expected, atol=1e-5, rtol=1e-3)


def test_what_fits_is_measured(golden_models: Models, scale: Preset, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against more at once than there is memory for, a limit without effect, and a changed random state."""
    model = copy.deepcopy(golden_models["ar"]).train()
    monkeypatch.setattr("marsbench.training.memory.resident", lambda: 2 * GIB)

    fitting = Fitting(recipe(scale, "ar_sft"), CPU)
    fitting.longest = 64

    def fits(free: int, limit: int | None) -> int:
        fitting.limit = limit
        monkeypatch.setattr("marsbench.training.memory.at_hand", lambda _: free)
        loss = lambda **batch: ar_loss(model, **batch)  # noqa: E731
        return fitting.room(loss, [*model.parameters()])

    before = torch.get_rng_state()
    most = fits(4 * GIB, None)
    assert torch.equal(torch.get_rng_state(), before)
    assert fits(64 * GIB, 6 * GIB) == most == fits(4 * GIB, 64 * GIB)
    ids = torch.ones(4, 64, dtype=torch.long)
    each = bytes_kept(lambda: ar_loss(model, ids, ids), model.parameters()) / ids.numel()
    assert GIB < most * each < 3 * GIB
    assert fits(64 * GIB, 2 * GIB) == 1, "without room, one row at a time"


def keeping(pipe: Connection) -> None:
    """Frees 400 MiB below a tensor that lives; sends how much goes at once, and when it is given back."""
    memory.keep_freed_memory()
    tensors = [torch.ones(2**20) for _ in range(100)]
    last, full = tensors[-1], memory.resident()
    del tensors
    kept = memory.resident()
    memory.give_back_freed_memory()
    pipe.send((full - kept, kept - memory.resident(), float(last.sum())))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator has rules of its own")
def test_freed_memory_is_kept_until_it_is_given_back() -> None:
    """Guards against a process that grows at each step, by freed gaps below a tensor that lives."""
    receiver, sender = FORKED.Pipe(duplex=False)
    FORKED.Process(target=keeping, args=(sender,)).start()
    sender.close()
    gone, given_back, last = receiver.recv()
    assert gone < 100 * 2**20 < 300 * 2**20 < given_back and last == 2**20


@pytest.mark.parametrize(("held", "times"), [(4, 0), (7, 1)])
def test_a_process_near_its_limit_makes_room(
    held: float, times: int, scale: Preset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a limit that only the first step keeps to, and memory allocated anew in every step."""
    calls: list[None] = []
    monkeypatch.setattr(memory, "resident", lambda: int(held * GIB))
    monkeypatch.setattr(memory, "give_back_freed_memory", lambda: calls.append(None))
    fitting = Fitting(recipe(scale, "base_mars"), CPU)
    fitting.limit = 8 * GIB
    fitting.make_room()
    assert len(calls) == times


def test_a_containers_limit_counts(tmp_path: Path) -> None:
    """Guards against a limit read from the computer, where a container may take only a part."""
    for name, text in {"max": "1000\n", "current": "700", "stat": "file 9\ninactive_file 50"}.items():
        (tmp_path / f"memory.{name}").write_text(text)
    assert memory._left_in_container(tmp_path) == 350
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._left_in_container(tmp_path) is None is memory._left_in_container(tmp_path / "nowhere")


@pytest.fixture(scope="module")
def scale(tmp_path_factory: pytest.TempPathFactory) -> Preset:
    """Scale 135m with a base of toy size."""
    folder = tmp_path_factory.mktemp("scale")
    base = save_base(folder / "base", spare_rows=5)
    data = save_chat(folder / "chat.jsonl", *[TALK, TALK[1:3], TALK[:3]] * 5)
    return preset("135m").adapted(base=str(base), chat_data=str(data), steps=8, batch_size=6)


def test_a_training_in_pieces_learns_the_same_and_resumes_so(
    scale: Preset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against losses, or weights after a resumption, that depend on how much memory was free."""
    curves = {}
    for most in (10_000, 150, None):
        monkeypatch.setattr(Fitting, "room", lambda *_, most=most, **__: most)
        monkeypatch.setattr(trainer, "at_hand", lambda _, most=most: most)
        finished = record(trained("mars", tmp_path / str(most), None, scale))
        assert finished.steps == 8 and finished.provenance.get("entries_at_once") == most
        curves[most] = finished.losses
    assert curves[150] == pytest.approx(curves[10_000], rel=1e-2)  # bf16, where the CPU has it
    assert curves[None] == pytest.approx(curves[10_000], rel=1e-2)
    monkeypatch.undo()
    monkeypatch.setattr(Fitting, "room", lambda *_, **__: 150)
    undisturbed = record(trained("mars", tmp_path / "whole", None, scale))
    with pytest.raises(KeyboardInterrupt):
        trained("mars", tmp_path / "cut", None, scale, until=5)
    (state,) = (tmp_path / "cut").glob("*.partial/checkpoint-4/resumable.json")
    assert json.loads(state.read_text())["entries_at_once"] == 150
    monkeypatch.setattr(Fitting, "room", lambda *_, **__: 10_000)
    resumed = record(trained("mars", tmp_path / "cut", None, scale))
    assert (resumed.weights, resumed.losses) == (undisturbed.weights, undisturbed.losses)


def test_the_speed_of_a_training_is_that_of_its_own_steps(scale: Preset) -> None:
    """Guards against steps that are counted but not timed, tokens of other steps, and a peak without the training."""
    speed = training_speed(recipe(scale, training_speed_module.STAGES[0]), steps=2)
    assert speed.stage == "ar_sft" and len(speed.tokens) == len(speed.seconds) == 2
    assert all(count >= 6 * 20 for count in speed.tokens) and all(took > 0 for took in speed.seconds)
    assert speed.peak_bytes is None or speed.peak_bytes > GIB / 8
