"""Checkpoints as other engines load them: the folders are read here as those read them; no engine is run."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_adapter import noisy
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from marsbench.decoding.engine import decode
from marsbench.decoding.generation import Request
from marsbench.errors import UserError
from marsbench.forward.draft_head import Network
from marsbench.methods.mars import Mars
from marsbench.presets import preset
from marsbench.training.adapter_files import write_adapter
from marsbench.training.checkpoints import load
from marsbench.training.for_engines import export
from marsbench.training.records import TrainingRecord, publish, weights_hash
from marsbench.training.stages import recipe

MASK, B, PROMPT = 3, 4, [7, 8, 9, 10]


def recorded(folder: Path, stage: str, base: str | None = None) -> Path:
    """A folder with the record of a stage."""
    facts = asdict(recipe(preset("micro"), stage, block_size=B))
    record = TrainingRecord("", facts, {}, weights_hash(folder), 0, 0, 0, 0.0, 0.0, base_weights=base)
    publish(record, folder, folder.with_name(stage))
    return folder.with_name(stage)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A model that has seen masks, with its tokenizer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, intermediate_size=24, num_attention_heads=2,
        num_key_value_heads=1, initializer_range=0.3, tie_word_embeddings=True,
    )  # fmt: skip
    words = {**{f"w{number}": number for number in range(40) if number != MASK}, "<|mask|>": MASK}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")), mask_token="<|mask|>", eos_token="w2"
    )  # type: ignore[no-untyped-call]
    for part in (LlamaForCausalLM(config), tokenizer):
        part.save_pretrained(tmp_path / "making")
    return recorded(tmp_path / "making", "mars")


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    """An adapter on it, with a head."""
    loaded = load(base)
    head = Network(*(torch.randn(16, 16) for _ in range(3)))
    write_adapter(replace(noisy(loaded.model, 0.3), head=head), loaded.model, tmp_path / "making", "../mars")
    return recorded(tmp_path / "making", "mars_gated_network", loaded.weights)


def window(model: Any) -> list[int]:
    """What this package says behind the prompt in one forward, the masks' guesses among it."""
    (found,) = decode(model, Mars(MASK, B), [Request(PROMPT, B, 0.0, ignore_eos=True)], eos_id=2, pad_id=0)
    assert found.forwards == 1
    return found.tokens


def options_in(command: str, word: str) -> dict[str, Any]:
    words = shlex.split(command)
    found: dict[str, Any] = json.loads(words[words.index(word) + 1])
    return found


def token_for_drafts(config: dict[str, Any]) -> int:
    """As vLLM's `get_parallel_drafting_token_id` goes through a draft model's configuration."""
    if "mask_token_id" in (config.get("dflash_config") or {}):
        return int(config["dflash_config"]["mask_token_id"])
    order = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
    return next(int(config[key]) for key in order if config.get(key) is not None)


def test_a_mars_checkpoint_is_a_parallel_draft_model(base: Path, tmp_path: Path) -> None:
    """Guards against a key that the loader does not ask for, one before it that says otherwise, and files of our own
    that a loader of all weights would take for the model's.
    """
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"ptd_token_id": 5, "dflash_config": {"mask_token_id": 6}}))
    options = options_in(export(str(base), "pard", tmp_path / "out"), "--speculative-config")
    assert options == {
        "method": "draft_model", "parallel_drafting": True, "model": str(tmp_path / "out"), "num_speculative_tokens": B,
    }  # fmt: skip
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    token = token_for_drafts(config)
    assert token == MASK == config["pard_token"] and not {"ptd_token_id", "dflash_config"} & {*config}
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    rows = torch.tensor([PROMPT + [token] * (options["num_speculative_tokens"] - 1)])
    assert model(rows).logits[0, -B:].argmax(-1).tolist() == window(load(base).model)
    assert [file.name for file in (tmp_path / "out").glob("*.safetensors")] == ["model.safetensors"]


def with_lora(model: Any, folder: Path, drafted: Tensor) -> None:
    """Put an adapter's maps on a model as engines do: by peft's names, on the rows [N, L] that are drafted."""
    config = json.loads((folder / "adapter_config.json").read_text())
    scale, gate, weights = (
        config["lora_alpha"] / config["r"], drafted.unsqueeze(-1), load_file(folder / "adapter_model.safetensors"),
    )  # fmt: skip
    for name in {key.split(".lora_")[0] for key in weights}:
        inside = name.removeprefix("base_model.model.")
        assert inside.rpartition(".")[2] in config["target_modules"]
        of_ids = inside.endswith("embed_tokens")
        names = (f"{name}.lora_embedding_{which}" if of_ids else f"{name}.lora_{which}.weight" for which in "AB")
        down, up = (weights[one] for one in names)
        assert len(down) == config["r"] == up.shape[1]

        def add(_: Any, given: Any, out: Tensor, down: Tensor = down, up: Tensor = up, of_ids: bool = of_ids) -> Tensor:
            return out + gate * scale * ((down.T[given[0]] if of_ids else given[0] @ down.T) @ up.T)

        model.get_submodule(inside).register_forward_hook(add)


def test_an_adapter_is_one_of_unos(adapter: Path, base: Path, tmp_path: Path) -> None:
    """Guards against names and shapes that peft's readers do not know, a range of ids that is not the mask alone, and
    the mask's vector left behind: drafts would be worse, and nothing would say so.
    """
    command = export(str(adapter), "uno", tmp_path / "out")
    options = options_in(command, "--speculative-config")
    low, high = options["uno_noise_low"], options["uno_mask_token_id"]
    assert [*range(low, high)] == [MASK] and options["num_speculative_tokens"] == B
    assert options["uno_lora_path"] == str(tmp_path / "out") and "--max-lora-rank 3 " in command
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors",
    ]  # fmt: skip
    model: Any = AutoModelForCausalLM.from_pretrained(base).eval()
    rows = torch.tensor([PROMPT + [low] * (B - 1)])
    with_lora(model, tmp_path / "out", rows == low)
    ours = load(adapter).model
    bare = type(ours)(ours.model, replace(ours.adapter, head=None))
    assert model(rows).logits[0, -B:].argmax(-1).tolist() == window(bare)


@pytest.mark.parametrize(("to", "which"), [("pard", "adapter"), ("uno", "base")])
def test_the_wrong_kind_is_refused(to: Any, which: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Guards against half a folder for an engine that cannot load it, and a folder written over."""
    folder = str(request.getfixturevalue(which))
    with pytest.raises(UserError, match="cannot be written for"):
        export(folder, to, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="there already"):
        export(folder, to, tmp_path / "out")
