"""Checkpoints as other engines load them: the folders are read here as those read them; no engine is run."""

import json
import shlex
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file
from test_adapter import noisy, tokens
from tokenizers import Tokenizer, models
from torch import Tensor

from marsbench.decoding.engine import decode
from marsbench.decoding.generation import Generation, Request
from marsbench.errors import UserError
from marsbench.forward.draft_head import Network
from marsbench.methods import METHODS, Options, build_method, check_installed
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
    config = hf.LlamaConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, intermediate_size=24, num_attention_heads=2,
        num_key_value_heads=1, initializer_range=0.3, tie_word_embeddings=True,
    )  # fmt: skip
    words = {**{f"w{number}": number for number in range(40) if number != MASK}, "<|mask|>": MASK}
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")), mask_token="<|mask|>", eos_token="w2"
    )  # type: ignore[no-untyped-call]
    for part in (hf.LlamaForCausalLM(config), tokenizer):
        part.save_pretrained(tmp_path / "making")
    return recorded(tmp_path / "making", "mars")


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    """An adapter on the base, with a head."""
    loaded = load(base)
    head = Network(*(torch.randn(16, 16) for _ in range(3)))
    write_adapter(replace(noisy(loaded.model, 0.3), head=head), loaded.model, tmp_path / "making", "../mars")
    return recorded(tmp_path / "making", "mars_gated_network", loaded.weights)


def window(model: Any) -> list[int]:
    """The tokens that this package emits after the prompt in one forward, the masks' guesses included."""
    (generation,) = decode(model, Mars(MASK, B), [Request(PROMPT, B, 0.0, ignore_eos=True)], eos_id=2, pad_id=0)
    assert generation.forwards == 1
    return generation.tokens


def options_in(command: str, word: str) -> dict[str, Any]:
    words = shlex.split(command)
    options: dict[str, Any] = json.loads(words[words.index(word) + 1])
    return options


def token_for_drafts(config: dict[str, Any]) -> int:
    """The mask token, as vLLM's `get_parallel_drafting_token_id` searches a draft model's configuration."""
    if "mask_token_id" in (config.get("dflash_config") or {}):
        return int(config["dflash_config"]["mask_token_id"])
    order = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
    return next(int(config[key]) for key in order if config.get(key) is not None)


def test_a_mars_checkpoint_is_a_parallel_draft_model(base: Path, tmp_path: Path) -> None:
    """Guards against a key that no loader reads, another key that overrides it, and files of ours taken for weights."""
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"ptd_token_id": 5, "dflash_config": {"mask_token_id": 6}}))
    options = options_in(export(str(base), "pard", tmp_path / "out"), "--speculative-config")
    assert options == {
        "method": "draft_model", "parallel_drafting": True, "model": str(tmp_path / "out"), "num_speculative_tokens": B,
    }  # fmt: skip
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    token = token_for_drafts(config)
    assert token == MASK == config["pard_token"] and not {"ptd_token_id", "dflash_config"} & {*config}
    model: Any = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    rows = torch.tensor([PROMPT + [token] * (options["num_speculative_tokens"] - 1)])
    assert model(rows).logits[0, -B:].argmax(-1).tolist() == window(load(base).model)
    assert [file.name for file in (tmp_path / "out").glob("*.safetensors")] == ["model.safetensors"]


def with_lora(model: Any, folder: Path, drafted: Tensor) -> None:
    """Put an adapter's maps on a model as engines do: by peft's names, on the rows [N, L] that are drafted."""
    config = json.loads((folder / "adapter_config.json").read_text())
    scale, gate = config["lora_alpha"] / config["r"], drafted.unsqueeze(-1)
    weights = load_file(folder / "adapter_model.safetensors")
    for name in {key.split(".lora_")[0] for key in weights}:
        inside = name.removeprefix("base_model.model.")
        assert inside.rpartition(".")[2] in config["target_modules"]
        of_ids = inside.endswith("embed_tokens")
        names = (f"{name}.lora_embedding_{which}" if of_ids else f"{name}.lora_{which}.weight" for which in "AB")
        down, up = (weights[key] for key in names)
        assert len(down) == config["r"] == up.shape[1]

        def add(_: Any, args: Any, out: Tensor, down: Tensor = down, up: Tensor = up, of_ids: bool = of_ids) -> Tensor:
            return out + gate * scale * ((down.T[args[0]] if of_ids else args[0] @ down.T) @ up.T)

        model.get_submodule(inside).register_forward_hook(add)


def test_an_adapter_is_one_of_unos(adapter: Path, base: Path, tmp_path: Path) -> None:
    """Guards against names, shapes and a range of ids that readers do not know, and a mask vector left out."""
    command = export(str(adapter), "uno", tmp_path / "out")
    options = options_in(command, "--speculative-config")
    low, high = options["uno_noise_low"], options["uno_mask_token_id"]
    assert [*range(low, high)] == [MASK] and options["num_speculative_tokens"] == B
    assert options["uno_lora_path"] == str(tmp_path / "out") and "--max-lora-rank 3 " in command
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    model: Any = hf.AutoModelForCausalLM.from_pretrained(base).eval()
    rows = torch.tensor([PROMPT + [low] * (B - 1)])
    with_lora(model, tmp_path / "out", rows == low)
    ours = load(adapter).model
    bare = type(ours)(ours.model, replace(ours.adapter, head=None))
    assert model(rows).logits[0, -B:].argmax(-1).tolist() == window(bare)


@pytest.mark.parametrize(("to", "which"), [("pard", "adapter"), ("uno", "base")])
def test_the_wrong_kind_is_refused(to: Any, which: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Guards against half a folder for an engine that cannot load it, and against a folder overwritten."""
    folder = str(request.getfixturevalue(which))
    with pytest.raises(UserError, match="cannot be written for"):
        export(folder, to, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="already exists"):
        export(folder, to, tmp_path / "out")


PEERS = [name for name, info in METHODS.items() if info.package == "llama_cpp"]
needs = "needs `pip install 'marsbench[peers]'`"
installed = pytest.mark.skipif(not all(map(find_spec, ("llama_cpp", "gguf"))), reason=needs)
PEERS_SHAPE: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.3, "rope_theta": 20_000.0,
}  # fmt: skip
ROWS_OF_PROMPTS = [[5 + (7 * row + place) % 80 for place in range(4 + 3 * row)] for row in range(4)]


def of_kind(kind: str, **options: Any) -> Any:
    torch.manual_seed(0)
    pair: Any = {"llama": (hf.LlamaForCausalLM, hf.LlamaConfig), "qwen2": (hf.Qwen2ForCausalLM, hf.Qwen2Config)}[kind]
    return pair[0](pair[1](**PEERS_SHAPE, **options)).eval()


def peer_answers(of: Any, name: str, **options: Any) -> list[Generation]:
    method = build_method(name, Options(**options))
    return decode(of, method, [Request(prompt, 40) for prompt in ROWS_OF_PROMPTS], eos_id=2, pad_id=0, batch_size=1)


@installed
@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize(("kind", "tied"), [("llama", True), ("llama", False), ("qwen2", False)])
def test_it_decodes_the_same_weights(name: str, kind: str, tied: bool) -> None:
    """Guards against turned queries, missing biases or heads, and ignored ends: all tokens are those of `ar`."""
    of = of_kind(kind, tie_word_embeddings=tied)
    assert peer_answers(of, name) == peer_answers(of, name), "the second run starts with a filled cache"
    assert tokens(peer_answers(of, name)) == tokens(peer_answers(of, "ar"))


@installed
def test_it_follows_the_weights() -> None:
    """Guards against answers of a model as it was before it learned more."""
    of = of_kind("llama")
    before = peer_answers(of, "llama-cpp")
    with torch.no_grad():
        of.lm_head.weight.mul_(-1)
    assert tokens(peer_answers(of, "llama-cpp")) == tokens(peer_answers(of, "ar"))
    assert peer_answers(of, "llama-cpp") != before


@installed
def test_quantised_weights_are_near(tmp_path: Path) -> None:
    """Guards against a requested type that is not written, and a file whose tensors mean something else."""
    from gguf import GGUFReader

    from marsbench.methods.llama_cpp import write_gguf

    of = of_kind("llama")
    for quantised, called in (("none", "F32"), ("q8_0", "Q8_0"), ("q4_1", "Q4_1")):
        write_gguf(of, tmp_path / "model.gguf", quantised)  # type: ignore[arg-type]
        kinds = {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(tmp_path / "model.gguf").tensors}
        assert kinds["blk.1.ffn_up.weight"] == kinds["token_embd.weight"] == called
        assert kinds["output_norm.weight"] == "F32"
    of = hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64))
    with pytest.raises(UserError, match="of the kind gpt2"):
        write_gguf(of, tmp_path / "model.gguf")


@pytest.mark.parametrize("name", PEERS)
def test_it_says_what_is_missing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an import that fails in the middle of a race."""
    monkeypatch.setattr("marsbench.methods.find_spec", lambda package: None)
    with pytest.raises(UserError, match=r"needs the package llama_cpp") as caught:
        check_installed(name)
    assert "marsbench[peers]" in caught.value.fix
