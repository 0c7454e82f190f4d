"""Every architecture by our windows against its own forward pass: attention, positions and what follows the LM head."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf

from marsbench.decoding import step
from marsbench.decoding.engine import decode
from marsbench.decoding.generation import Generation, Request
from marsbench.errors import UserError
from marsbench.forward.decoder import LeanDecoder, decoder_of
from marsbench.methods import Options, build_method

EOS, PAD, MASK = -1, 0, 3  # no token ends a sequence: all positions are compared
NEW = 14
WINDOW = 8
SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "initializer_range": 0.3,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
GRANITE = {"logits_scaling": 8.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2}
TIGHT = 27 + NEW  # as many positions as the longest prompt and its answer take
ROPE: dict[str, Any] = {"rope_theta": 10000.0, "factor": 4.0}
LONG = ROPE | {
    "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
    "original_max_position_embeddings": TIGHT,
}  # fmt: skip
SLIDING: dict[str, Any] = {"sliding_window": WINDOW}

KNOWN: dict[str, Callable[[], hf.PreTrainedModel]] = {
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**SHAPE)),
    "qwen2-sliding": lambda: hf.Qwen2ForCausalLM(
        hf.Qwen2Config(**SHAPE, **SLIDING, use_sliding_window=True, max_window_layers=2)
    ),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**SHAPE)),
    "llama3": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SHAPE, rope_parameters=LLAMA3)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**SHAPE, **SLIDING)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(
        hf.Gemma2Config(**SHAPE, **SLIDING, final_logit_softcapping=2.0, attn_logit_softcapping=5.0)
    ),
    "gemma3": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**SHAPE, **SLIDING, sliding_window_pattern=2)),
    "granite": lambda: hf.GraniteForCausalLM(hf.GraniteConfig(**SHAPE, **GRANITE)),
    "phi3": lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**SHAPE, **SLIDING)),
    "olmo2": lambda: hf.Olmo2ForCausalLM(hf.Olmo2Config(**SHAPE)),
    "smollm3": lambda: hf.SmolLM3ForCausalLM(hf.SmolLM3Config(**SHAPE)),
    "cohere": lambda: hf.CohereForCausalLM(hf.CohereConfig(**SHAPE, logit_scale=0.1)),
    **{
        f"{rope}-llama": lambda rope=rope: hf.LlamaForCausalLM(
            hf.LlamaConfig(**SHAPE | {"max_position_embeddings": TIGHT}, rope_parameters=ROPE | {"rope_type": rope})
        )
        for rope in ("linear", "dynamic", "yarn")
    },
    "longrope-llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SHAPE, rope_parameters=LONG)),
    "longrope-phi3": lambda: hf.Phi3ForCausalLM(
        hf.Phi3Config(**SHAPE, rope_parameters=LONG, original_max_position_embeddings=TIGHT)
    ),
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=64, n_positions=128, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3)
    ),
}
REFUSED: dict[str, tuple[Callable[[], hf.PreTrainedModel], str]] = {
    "bloom": (lambda: hf.BloomForCausalLM(hf.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)),
              "position_ids"),
    "mamba": (lambda: hf.MambaForCausalLM(hf.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2)),
              "MambaForCausalLM"),
    "recurrent-gemma": (lambda: hf.RecurrentGemmaForCausalLM(hf.RecurrentGemmaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, lru_width=32,
        attention_window_size=WINDOW)), "linear_attention"),
    "jamba": (lambda: hf.JambaForCausalLM(hf.JambaConfig(
        **SHAPE, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=8, use_mamba_kernels=False)),
        "linear_attention"),
    "t5": (lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=64, d_model=32, d_ff=48, d_kv=8, num_layers=2, num_heads=4)), "encoder-decoder"),
}  # fmt: skip


def prompts() -> list[list[int]]:
    """Prompts shorter than the sliding window, and several times as long."""
    torch.manual_seed(5)
    return [torch.randint(4, 64, (length,)).tolist() for length in (3, 9, 27, 14)]


def run(model: hf.PreTrainedModel, method: str, **options: Any) -> list[Generation]:
    """All prompts in one batch."""
    chosen = build_method(method, Options(mask_id=MASK, window=3, **options))
    requests = [Request(prompt, NEW) for prompt in prompts()]
    return decode(model, chosen, requests, eos_id=EOS, pad_id=PAD)


@torch.inference_mode()
def own_greedy(model: hf.PreTrainedModel, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens by the model's own full forward passes, without a cache, and their logits [NEW, V]."""
    ids, rows = list(prompt), []
    for _ in range(NEW):
        rows.append(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1])
        ids.append(int(rows[-1].argmax()))
    return ids[len(prompt) :], torch.stack(rows)


@pytest.mark.parametrize("name", KNOWN)
def test_architectures_run_as_their_own_forward_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a sliding window that is not kept to, logits that are not scaled or capped, and lost positions."""
    torch.manual_seed(0)
    model = KNOWN[name]().eval()
    heard: list[torch.Tensor] = []
    original = step.forward

    def listening(*arguments: Any) -> Any:
        answer = original(*arguments)
        heard.append(answer.logits(slice(-1, None))[:, 0])
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(step, "forward", listening)
        ar = run(model, "ar")
    theirs = [own_greedy(model, prompt) for prompt in prompts()]
    assert [answer.tokens for answer in ar] == [tokens for tokens, _ in theirs]
    by_length = sorted(range(4), key=lambda row: len(prompts()[row]))  # in the order in which they joined
    ours = torch.stack(heard, 1)  # [N, NEW, V]
    for row, request in enumerate(by_length):
        torch.testing.assert_close(ours[row], theirs[request][1], rtol=1e-3, atol=1e-4)
    for method in ("mars", "mars-verified", "jacobi"):
        assert [answer.tokens for answer in run(model, method)] == [answer.tokens for answer in ar], method


def test_llamas_of_any_rope_run_lean_within_its_factors() -> None:
    """Guards against tests that no longer take the lean path, and factors that change within an answer."""
    assert isinstance(decoder_of(KNOWN["llama3"]().eval()), LeanDecoder)
    assert not isinstance(decoder_of(KNOWN["qwen2-sliding"]().eval()), LeanDecoder)
    model, ar = KNOWN["longrope-phi3"]().eval(), build_method("ar", Options())
    with pytest.raises(UserError, match=rf"context of {TIGHT}"):
        decode(model, ar, [Request([5], TIGHT)], eos_id=EOS, pad_id=PAD)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_is_refused_by_name(name: str) -> None:
    """Guards against an architecture that is decoded, but wrongly."""
    make, why = REFUSED[name]
    with pytest.raises(UserError, match=why) as raised:
        run(make().eval(), "ar")
    assert name.split("-")[0] in str(raised.value).lower()


def test_what_only_the_class_does_is_found_out() -> None:
    """Guards against a class that changes its logits by itself, and attention that ignores the mask."""

    class Tempered(hf.Qwen3ForCausalLM):
        def forward(self, *arguments: Any, **named: Any) -> Any:
            output = super().forward(*arguments, **named)
            output.logits = output.logits * 1.5 - 1
            return output

    model = Tempered(hf.Qwen3Config(**SHAPE)).eval()
    for _ in range(2):
        with pytest.raises(UserError, match="Tempered"):
            run(model, "ar")
    model = KNOWN["qwen3"]().eval()
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UserError, match="sdpa"):
        run(model, "ar")
