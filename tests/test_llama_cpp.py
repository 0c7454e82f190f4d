"""llama.cpp as a contender: the same weights, so the same tokens; and what is said where it cannot be had."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from marsbench.decoding.engine import decode
from marsbench.decoding.generation import Generation, Request
from marsbench.errors import UserError
from marsbench.methods import METHODS, Options, build_method, check_installed

PEERS = [name for name, info in METHODS.items() if info.package == "llama_cpp"]
installed = pytest.mark.skipif(
    not all(map(find_spec, ("llama_cpp", "gguf"))), reason="needs `pip install 'marsbench[peers]'`"
)
SHAPE: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.3, "rope_theta": 20_000.0,
}  # fmt: skip
PROMPTS = [[5 + (7 * row + place) % 80 for place in range(4 + 3 * row)] for row in range(4)]


def model(kind: str, **options: Any) -> Any:
    torch.manual_seed(0)
    made: Any = {"llama": (LlamaForCausalLM, LlamaConfig), "qwen2": (Qwen2ForCausalLM, Qwen2Config)}[kind]
    return made[0](made[1](**SHAPE, **options)).eval()


def answers(of: Any, name: str, **options: Any) -> list[Generation]:
    method = build_method(name, Options(**options))
    return decode(of, method, [Request(one, 40) for one in PROMPTS], eos_id=2, pad_id=0, batch_size=1)


@installed
@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize(("kind", "tied"), [("llama", True), ("llama", False), ("qwen2", False)])
def test_it_decodes_the_same_weights(name: str, kind: str, tied: bool) -> None:
    """Guards against turned queries, biases and heads that are left out, and ends that are not heeded: all tokens
    are those of `ar`."""
    of = model(kind, tie_word_embeddings=tied)
    assert answers(of, name) == answers(of, name), "the second time it began with what it still held"
    assert [one.tokens for one in answers(of, name)] == [one.tokens for one in answers(of, "ar")]


@installed
def test_it_follows_the_weights() -> None:
    """Guards against answers of a model as it was before it learned more."""
    of = model("llama")
    before = answers(of, "llama-cpp")
    with torch.no_grad():
        of.lm_head.weight.mul_(-1)
    assert [one.tokens for one in answers(of, "llama-cpp")] == [one.tokens for one in answers(of, "ar")]
    assert answers(of, "llama-cpp") != before


@installed
def test_quantised_weights_are_near(tmp_path: Path) -> None:
    """Guards against a type that is asked for and not written."""
    from gguf import GGUFReader

    from marsbench.methods.llama_cpp import write_gguf

    of = model("llama")
    for quantised, called in (("none", "F32"), ("q8_0", "Q8_0"), ("q4_1", "Q4_1")):
        write_gguf(of, tmp_path / "model.gguf", quantised)  # type: ignore[arg-type]
        kinds = {one.name: one.tensor_type.name for one in GGUFReader(tmp_path / "model.gguf").tensors}
        assert kinds["blk.1.ffn_up.weight"] == kinds["token_embd.weight"] == called
        assert kinds["output_norm.weight"] == "F32"


@installed
def test_other_models_are_refused(tmp_path: Path) -> None:
    """Guards against a file of a model whose tensors mean something else."""
    from marsbench.methods.llama_cpp import write_gguf

    of = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64))
    with pytest.raises(UserError, match="of the kind gpt2"):
        write_gguf(of, tmp_path / "model.gguf")


@pytest.mark.parametrize("name", PEERS)
def test_it_says_what_is_missing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an import that fails in the middle of a race."""
    monkeypatch.setattr("marsbench.methods.find_spec", lambda package: None)
    with pytest.raises(UserError, match=r"needs the package llama_cpp") as caught:
        check_installed(name)
    assert "marsbench[peers]" in caught.value.fix
