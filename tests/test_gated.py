"""Gated adapters in training and on disk: what is learned, what stays as it was, and what is refused."""

import copy
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from test_adapter import noisy
from test_host_reads import Operations
from tools import Models, invoke
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import marsbench
from marsbench.answering import default_ids, fit
from marsbench.commands.shared import Start
from marsbench.decoding.engine import decode
from marsbench.decoding.generation import Generation, Request
from marsbench.errors import UserError
from marsbench.fetching.models import MODELS, cache_folder, is_known
from marsbench.forward.adapter import Adapted, hooked
from marsbench.forward.draft_head import Markov, Network
from marsbench.presets import HeadKind, preset
from marsbench.training import objectives, records
from marsbench.training.adapter_files import CONFIG, SHIPPED, base_of, is_adapter, read_adapter, write_adapter
from marsbench.training.checkpoints import Loaded, checked_base, load, with_adapter
from marsbench.training.data import chat_prompt
from marsbench.training.gated import GatedAdapter, HeadToTrain, cast_once, gated_loss
from marsbench.training.objectives import IGNORED, mars_loss
from marsbench.training.stages import recipe, stage
from marsbench.training.trainer import train
from marsbench.world import test_set as questions_of

MASK, B = 3, 4
MICRO = preset("micro").adapted(steps=6)
HEADS = get_args(HeadKind)


def batch(golden_models: Models) -> tuple[Tensor, Tensor]:
    """Three sequences: two turns, a response that ends in the middle of a block, and padding."""
    torch.manual_seed(3)
    ids = torch.randint(4, golden_models["ar"].config.vocab_size, (3, 17))
    labels = ids.clone()
    for row, unlabelled in enumerate((range(5), [*range(3), *range(9, 12)], range(8))):
        labels[row, list(unlabelled)] = IGNORED
    labels[2, 14:] = IGNORED
    return ids, labels


def noisy_adapter(model: Any, head: HeadKind) -> GatedAdapter:
    torch.manual_seed(1)
    adapter = GatedAdapter(model, 2, head)
    for parameter in adapter.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return adapter


@torch.no_grad()
def by_decoding(adapted: Adapted, ids: Tensor, labels: Tensor, ahead: list[int]) -> Tensor:
    """The loss mask by mask: each by a forward pass of its own, after the clean tokens before its block."""
    means = []
    for row, labelled, first in zip(ids, labels != IGNORED, ahead, strict=True):
        losses, place = [], -1
        for at in range(len(row)):
            begins = labelled[at] and (at == 0 or not labelled[at - 1])
            place = (first if begins else place + 1) if labelled[at] else -1
            if not labelled[at] or at + 1 == len(row) or not labelled[at + 1] or (place + 1) % B == 0:
                continue
            start = at - min(place % B, at - int(_begin(labelled, at)))
            tokens = torch.cat([row[:start], torch.full((at - start + 1,), MASK)]).unsqueeze(0)
            masked = torch.arange(at + 1).unsqueeze(0) >= start
            with hooked(adapted.model, adapted.adapter, masked):
                state = adapted.model.get_decoder()(input_ids=tokens).last_hidden_state[0, -1]
            losses.append(F.cross_entropy(behind(row[at], state, adapted), row[at + 1]))
        means.append(torch.stack(losses).mean())
    return torch.stack(means).mean()


def behind(before: Tensor, state: Tensor, adapted: Adapted) -> Tensor:
    """Logits [V] of a mask with this state, where `before` is the token at its own place."""
    model, head = adapted.model, adapted.adapter.head
    if isinstance(head, Markov):
        return model.lm_head(state) + head.before[before] @ head.after.T
    if isinstance(head, Network):
        state = state + head.change(head.seen(state), model.get_input_embeddings()(before))
    return model.lm_head(state)


def _begin(labelled: Tensor, at: int) -> int:
    """Where the response that holds a token begins."""
    while at and labelled[at - 1]:
        at -= 1
    return at


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize(("ahead", "most_logits"), [([0, 0, 0], 1 << 24), ([1, 2, 3], 1 << 24), ([3, 0, 1], 200)])
def test_the_loss_is_that_of_masks_as_decoding_puts_them(
    ahead: list[int], most_logits: int, head: HeadKind, golden_models: Models,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Guards against masks that see their answer, another block's masks or too little, and a shift; also in chunks."""
    monkeypatch.setattr(objectives, "MOST_LOGITS", most_logits)
    monkeypatch.setattr(objectives, "ALONE", 0.0)
    model = copy.deepcopy(golden_models["ar"]).requires_grad_(False)
    adapter, (ids, labels) = noisy_adapter(model, head), batch(golden_models)
    monkeypatch.setattr(torch, "randint", lambda *_, **__: torch.tensor(ahead).unsqueeze(1))
    loss = gated_loss(adapter, ids, labels, model=model, block_size=B, mask_token_id=MASK)
    expected = by_decoding(Adapted(model, adapter.adapter), ids, labels, ahead)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)


def test_frozen_weights_and_fresh_heads_change_no_loss(golden_models: Models) -> None:
    """Guards against casts of frozen weights at every pass, and a fresh head that changes the loss."""
    results, casts = [], []
    for once in (False, True):
        torch.manual_seed(0)
        model = copy.deepcopy(golden_models["ar"]).requires_grad_(False)
        adapter = GatedAdapter(model, 4)
        ids = torch.randint(4, 90, (3, 20))
        if once:
            cast_once(model)
        with Operations() as seen, torch.autocast("cpu", torch.bfloat16):
            loss = gated_loss(adapter, ids, ids, model=model, block_size=4, mask_token_id=3)
        loss.backward()
        results.append([loss, *[weight.grad for weight in adapter.parameters() if weight.grad is not None]])
        casts.append(seen.count["_to_copy"])
    assert all(map(torch.equal, *results)) and len(results[0]) == len(results[1]) > 5
    layers = sum(isinstance(part, nn.Linear) for part in model.get_decoder().modules())
    assert casts[1] <= casts[0] - 2 * layers, "of both passes: over the clean tokens, and over masks"
    model, (ids, labels) = copy.deepcopy(golden_models["mars"]).requires_grad_(False), batch(golden_models)
    losses = []
    for head in HEADS:
        torch.manual_seed(0)
        adapter = GatedAdapter(model, 2, head)
        torch.manual_seed(0)
        losses.append(gated_loss(adapter, ids, labels, model=model, block_size=B, mask_token_id=MASK))
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.parametrize("head", HEADS)
def test_only_the_adapter_learns(head: HeadKind, golden_models: Models) -> None:
    """Guards against gradients into the model, and against an adapter whose parts get none."""
    model = copy.deepcopy(golden_models["mars"]).requires_grad_(False)
    before = {name: values.clone() for name, values in model.state_dict().items()}
    adapter = GatedAdapter(model, 2, head)
    learns = [adapter.vector, *adapter.ups, *adapter.of_head.values()]
    begun = [weight.detach().clone() for weight in learns]
    ids, labels = batch(golden_models)
    step = torch.optim.AdamW(adapter.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        torch.manual_seed(0)
        loss = gated_loss(adapter, ids, labels, model=model, block_size=B, mask_token_id=MASK)
        loss.backward()
        losses.append(loss.item())
        step.step()
        step.zero_grad()
    assert losses[-1] < 0.7 * losses[0]
    assert all((now - then).abs().max() > 1e-3 for now, then in zip(learns, begun, strict=True))
    assert all(torch.equal(values, before[name]) for name, values in model.state_dict().items())
    assert not any(name.startswith("_model") for name in adapter.state_dict())


@pytest.mark.parametrize("head", HEADS[1:])
def test_a_part_of_the_masks_learns_without_the_head(
    head: HeadKind, golden_models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against masks that learn nothing without their head, which only ranks their likeliest tokens."""
    model, (ids, labels) = copy.deepcopy(golden_models["mars"]).requires_grad_(False), batch(golden_models)
    adapter, losses = noisy_adapter(model, head), []
    for part in (0.0, 0.5, 1.0):
        monkeypatch.setattr(objectives, "ALONE", part)
        torch.manual_seed(0)
        losses.append(gated_loss(adapter, ids, labels, model=model, block_size=B, mask_token_id=MASK).item())
    assert len({*losses}) == 3
    monkeypatch.setattr(adapter.of_head, "_kind", None)
    torch.manual_seed(0)
    assert losses[-1] == gated_loss(adapter, ids, labels, model=model, block_size=B, mask_token_id=MASK).item()


def test_a_stronger_adapter_acts_as_it_is_written(golden_models: Models, tmp_path: Path) -> None:
    """Guards against a strength that is lost on disk, or that renames older checkpoints."""
    model = copy.deepcopy(golden_models["ar"]).requires_grad_(False)
    adapter = GatedAdapter(model, 2, strength=16.0)
    for up in adapter.ups:
        torch.nn.init.normal_(up)
    write_adapter(adapter.adapter, model, tmp_path, "")
    kept = read_adapter(tmp_path, model).maps
    assert all(torch.equal(kept[name].up, 16 * up) for name, up in zip(adapter._names, adapter.ups, strict=True))
    usual, strong = (recipe(MICRO, name) for name in ("mars_gated_network", "mars_gated_network_strong"))
    assert strong.strength == 16 and usual.strength == 1 and usual.key != strong.key
    assert usual.key == replace(usual, strength=1.0).key != replace(usual, strength=2.0).key


@pytest.mark.parametrize("head", HEADS)
def test_a_response_without_masks_gives_no_loss(head: HeadKind, golden_models: Models) -> None:
    """Guards against a mean over nothing, and weights without a gradient, for which other devices wait."""
    model = copy.deepcopy(golden_models["mars"]).requires_grad_(False)
    ids = torch.tensor([[5, 6, 7]])
    adapter, passes = GatedAdapter(model, 2, head), list[int]()
    adapter.register_forward_hook(lambda *_: passes.append(1))
    labels = torch.tensor([[IGNORED, IGNORED, 7]])
    loss = gated_loss(adapter, ids, labels, model=model, block_size=B, mask_token_id=MASK)
    loss.backward()
    assert loss.item() == 0 and passes == [1], "a wrapper of several processes waits for the others in this pass"
    assert all(weight.grad is not None and not weight.grad.any() for weight in adapter.parameters())


def trained(name: str, where: Path, parent: Path) -> Path:
    """An adapter of a few steps, beside the AR checkpoint of scale micro that it was trained on."""
    chosen = recipe(MICRO, name)
    train(chosen, where / chosen.name, parent, lambda *_: None, lambda line: None)
    return where / chosen.name


@pytest.fixture(scope="module")
def parent(micro_checkpoints: Path) -> Path:
    return next(micro_checkpoints.glob("ar_sft-*"))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, parent: Path) -> Path:
    return trained("mars_gated_network", tmp_path_factory.mktemp("adapter"), parent)


def answers(loaded: Loaded, method: str, **options: Any) -> list[Generation]:
    eos, pad = default_ids(loaded)
    prompts = [chat_prompt(loaded.tokenizer, question.prompt) for question in questions_of("mini_gsm8k", 6)]
    ids = loaded.tokenizer(prompts, add_special_tokens=False).input_ids
    chosen = fit(method, loaded, **options)
    return decode(loaded.model, chosen, [Request(prompt, 24) for prompt in ids], eos_id=eos, pad_id=pad)


def verify(loaded: Loaded, alone: Loaded) -> None:
    """Every way to decode gives the answers of the model alone."""
    expected = [answer.tokens for answer in answers(alone, "ar")]
    assert [answer.tokens for answer in answers(loaded, "ar")] == expected
    for layout in ("groups", "linear"):
        assert [answer.tokens for answer in answers(loaded, "mars-verified", layout=layout)] == expected, layout


@pytest.mark.parametrize("kind", ["", "_markov", "_network"])
def test_a_trained_adapter_leaves_every_answer_as_it_was(kind: str, shared: Path, parent: Path, tmp_path: Path) -> None:
    """Guards against an adapter merged into the model on disk or in decoding, a lost head, an unclear record."""
    folder = shared if kind == "_network" else trained(f"mars_gated{kind}", tmp_path, parent)
    base, adapted, record, of_base = load(parent), load(folder), records.finished(folder), records.finished(parent)
    assert isinstance(adapted.model, Adapted) and record is not None and of_base is not None
    verify(adapted, base)
    assert adapted.knows_masks and adapted.stage == f"mars_gated{kind}" and adapted.weights != base.weights
    plain = AutoModelForCausalLM.from_pretrained(parent).state_dict()
    assert all(torch.equal(values, plain[name]) for name, values in adapted.model.state_dict().items())
    assert not (folder / "model.safetensors").exists() and record.base_weights == of_base.weights
    assert (record.recipe["rank"], record.recipe["block_size"], record.steps) == (16, 4, 6)
    assert json.loads((folder / CONFIG).read_text())["base_model_name_or_path"].endswith(f"ar_sft-{of_base.key}")
    adapter = adapted.model.adapter
    sizes = [values.numel() for file in folder.glob("*.safetensors") for values in load_file(file).values()]
    halves = adapter.like(torch.zeros(1, dtype=torch.bfloat16))
    for held, each in ((adapter, 4), (halves, 2)):
        parts = [tensor for part in (*held.maps.values(), held.head or ()) for tensor in part]
        assert held.vector.nbytes + sum(tensor.nbytes for tensor in parts) == each * sum(sizes)
    assert record.parameters == sum(sizes)
    assert type(adapter.head) is {"": type(None), "_markov": Markov, "_network": Network}[kind]
    if adapter.head is not None:
        kept = load_file(folder / "draft_head.safetensors")
        assert all(torch.equal(values, kept[name]) for name, values in adapter.head._asdict().items())
        assert all(values.any() for values in kept.values()), "it has learned"


def test_a_head_trained_with_mars_comes_with_its_model(parent: Path, tmp_path: Path) -> None:
    """Guards against a head that is lost or does not learn, lies among the model's weights or changes its tokens."""
    folder = trained("mars_network", tmp_path, parent)
    loaded, record = load(folder), records.finished(folder)
    assert isinstance(loaded.model, Adapted) and record is not None
    head, kept = loaded.model.adapter.head, load_file(folder / "draft_head.safetensors")
    assert isinstance(head, Network) and all(torch.equal(values, kept[name]) for name, values in head._asdict().items())
    assert all(values.any() for values in kept.values()), "it has learned"
    plain = AutoModelForCausalLM.from_pretrained(folder)
    assert load_file(folder / "model.safetensors").keys() <= plain.state_dict().keys()
    assert record.parameters == sum(values.numel() for values in (*plain.parameters(), *kept.values()))
    verify(loaded, replace(loaded, model=plain.eval()))


@pytest.mark.parametrize("kind", ["markov", "network"])
def test_a_head_acts_on_masks_of_mars_alone(kind: HeadKind, golden_models: Models) -> None:
    """Guards against a fresh head that changes a loss, and a head that changes the AR term."""
    model = copy.deepcopy(golden_models["mars"])
    to_train = HeadToTrain(model, kind)
    loss = partial(mars_loss, model, *batch(golden_models), block_size=B, mask_token_id=MASK)
    alone, fresh = (loss(head=head) for head in (None, to_train.head))
    assert torch.equal(alone.total, fresh.total)
    for values in to_train.values():
        nn.init.normal_(values)
    noisy = loss(head=to_train.head)
    assert torch.equal(noisy.ar, alone.ar) and not torch.isclose(noisy.mask, alone.mask)
    noisy.mask.backward()
    assert all(values.grad is not None and values.grad.any() for values in to_train.values())


@pytest.mark.parametrize(("settings", "times"), [({}, 1), ({"lora_alpha": 6}, 2), ({"use_rslora": True}, 3**0.5)])
def test_maps_are_named_and_scaled_as_peft_does_it(
    settings: dict[str, Any], times: float, golden_models: Models, tmp_path: Path
) -> None:
    """Guards against maps of another scale than peft's, which would not show: every answer stays as it was."""
    model, written = golden_models["ar"], noisy(golden_models["ar"], 0.3, rank=3)
    write_adapter(written, model, tmp_path, "")
    config = json.loads((tmp_path / CONFIG).read_text()) | settings
    (tmp_path / CONFIG).write_text(json.dumps(config))
    kept, names = read_adapter(tmp_path, model).maps, [*load_file(tmp_path / "adapter_model.safetensors")]
    assert config["peft_type"] == "LORA" and config["r"] == 3 and kept.keys() == written.maps.keys()
    expected = [f"base_model.model.model.{name}.lora_{part}.weight" for name in kept for part in "AB"]
    assert sorted(names) == sorted(expected)
    for name, (down, up) in written.maps.items():
        torch.testing.assert_close(kept[name].up @ kept[name].down, times * up @ down)
    (tmp_path / CONFIG).write_text(json.dumps(config | {"use_dora": True}))
    with pytest.raises(UserError, match="no plain LoRA adapter"):
        read_adapter(tmp_path, model)


def test_commands_take_an_adapter(shared: Path, parent: Path, tmp_path: Path) -> None:
    """Guards against a command that ignores the adapter, or needs the base model as well."""
    prompts, base = tmp_path / "in.jsonl", str(parent)
    prompts.write_text(json.dumps({"prompt_ids": [5, 6, 7, 8, 9]}) + "\n")
    rows = {}
    for name, place in {
        "base": ["--model", base, "--method", "ar"],
        "alone": ["--model", str(shared), "--method", "mars-verified"],
        "both": ["--model", base, "--adapter", str(shared), "--method", "mars-verified"],
    }.items():
        out = tmp_path / f"{name}.jsonl"
        invoke("decode", *place, "--prompt-ids", prompts, "--out", out, "--max-new-tokens", "12")
        rows[name] = json.loads(out.read_text())
    assert rows["alone"] == rows["both"]
    assert rows["alone"]["tokens"] == rows["base"]["tokens"]


def test_adapters_share_a_loaded_model(shared: Path, parent: Path) -> None:
    """Guards against a model loaded for each adapter, an adapter put on another, and `custom_generate` without it."""
    base = load(parent)
    first, second = with_adapter(base, shared), with_adapter(base, shared)
    assert all(
        values.data_ptr() == base.model.state_dict()[name].data_ptr()
        for name, values in {**first.model.state_dict(), **second.model.state_dict()}.items()
    )
    assert answers(first, "mars-verified") == answers(load(shared), "mars-verified")
    assert [answer.tokens for answer in answers(base, "ar")] == [answer.tokens for answer in answers(second, "ar")]
    with pytest.raises(UserError, match="already"):
        with_adapter(first, shared)
    model = AutoModelForCausalLM.from_pretrained(parent).eval()
    inputs = {"input_ids": torch.tensor([[5, 6, 7, 8, 9, 10]]), "max_new_tokens": 16, "do_sample": False}
    alone = model.generate(**inputs)
    ours = {"custom_generate": marsbench.generate, "method": "mars-verified"}
    assert torch.equal(model.generate(**inputs, **ours, adapter=shared), alone)
    next(shared.glob("*.safetensors")).touch()  # written again
    with pytest.raises(MemoryError), patch("marsbench.transformers_generate.read_adapter", side_effect=MemoryError):
        model.generate(**inputs, **ours, adapter=shared)
    with pytest.raises(UserError, match="graphs are kept"):
        model.generate(**inputs, **ours, adapter=shared, compiled=True)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-9])


def changed(file: Path) -> None:
    save_file({name: values + 1 for name, values in load_file(file).items()}, file)


@pytest.mark.parametrize("damage", [cut, Path.unlink, changed])
@pytest.mark.parametrize("file", ["adapter_model", "mask_vector", "draft_head"])
def test_a_damaged_adapter_is_refused(
    file: str, damage: Callable[[Path], None], shared: Path, parent: Path, tmp_path: Path
) -> None:
    """Guards against a file cut short, gone or changed that shows as a traceback or not at all."""
    folder = shutil.copytree(shared, tmp_path / "copy")
    damage(folder / f"{file}.safetensors")
    with pytest.raises(UserError, match="damaged"):
        load(parent, adapter=folder)
    if damage is not changed:
        with pytest.raises(UserError, match="cannot be loaded"):  # where the hash is not checked
            read_adapter(folder, load(parent).model)


def test_what_fits_no_model_is_refused(shared: Path, parent: Path, micro_checkpoints: Path, tmp_path: Path) -> None:
    """Guards against other folders taken for adapters, parts silently left out, masks that the gate does not know."""
    with pytest.raises(UserError, match="trained on other weights"):
        load(next(micro_checkpoints.glob("mars-*")), adapter=shared)
    for folder in (parent, tmp_path / "nowhere"):
        with pytest.raises(UserError, match="no gated adapter"):
            load(parent, adapter=folder)
    (tmp_path / "far" / "away").mkdir(parents=True)
    with pytest.raises(UserError, match=r"no such (folder|checkpoint)"):
        load(shutil.copytree(shared, tmp_path / "far" / "away" / "alone"))
    unknown = shutil.copytree(shared, tmp_path / "unknown")
    record = json.loads((unknown / records.RECORD).read_text())
    record["recipe"]["head"] = "tree"
    (unknown / records.RECORD).write_text(json.dumps(record))
    with pytest.raises(UserError, match="the tree draft head cannot be loaded: 'tree'"):
        load(parent, adapter=unknown)
    with pytest.raises(UserError, match="stand among tokens"):
        fit("block-diffusion", load(shared))


SHIPPED_FOLDER = SHIPPED["smollm2-135m-adapter"]


def test_the_shipped_adapter_is_whole_and_decodes() -> None:
    """Guards against a file cut or left out, a path of another computer, and masks that a user must train first."""
    assert is_adapter(SHIPPED_FOLDER) and checked_base(str(SHIPPED_FOLDER)) == SHIPPED_FOLDER
    assert sum(file.stat().st_size for file in SHIPPED_FOLDER.iterdir()) < 22e6
    assert is_known(base_of(SHIPPED_FOLDER)) and base_of(SHIPPED_FOLDER).removesuffix("-gguf") in MODELS
    record = records.finished(SHIPPED_FOLDER)
    assert record is not None and record.base_weights and record.recipe["head"] == "network"
    assert not Path(record.recipe["pretrained"]["chat_data"]).is_absolute()
    scale = preset("135m")
    name, size = Start("135m").own
    assert scale.ready_checkpoint(name, size) == str(SHIPPED_FOLDER) and scale.ships(str(SHIPPED_FOLDER))
    assert (record.recipe["stage"], record.recipe["block_size"]) == (name, size)
    assert stage(name).objective == "gated"
    assert Start("135m", stage="mars").own_stage == "mars" and Start("mini").own == ("mars", 4)


@pytest.mark.slow
@pytest.mark.skipif(not (cache_folder() / "smollm2-135m-gguf").is_dir(), reason="its model has not been fetched")
@pytest.mark.parametrize("where", [["--scale", "135m"], ["--checkpoint", "smollm2-135m-adapter"]])
def test_a_question_is_answered_with_it(where: list[str], tmp_path: Path) -> None:
    """Guards against an adapter that does not fit its model, or changes its answers."""
    arguments = ["show", "What is 2 + 3?", "--method", "ar", "--method", "mars-verified", "--max-new-tokens", "24"]
    done = invoke(*arguments, *where, "--output", str(tmp_path))
    tokens, forwards = (
        [int(count) for count in re.findall(rf"(\d+) {what}", done.output)] for what in ("tokens", "forward passes")
    )
    assert tokens[0] == tokens[1] == forwards[0] > forwards[1]
