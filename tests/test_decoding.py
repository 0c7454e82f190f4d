"""The decode loop and every method in it, held to the golden vectors and to their contracts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from marsbench.decoding.acceptance import bar, confidence, leading_run
from marsbench.decoding.engine import decode
from marsbench.decoding.generation import Generation, Request
from marsbench.errors import UserError
from marsbench.methods import METHODS, build_method

EOS, PAD, MASK = 2, 0, 3
SAMPLERS = {
    "sliding_window": ("mars", "mars-no-cache"),
    "sliding_window_cached": ("mars",),
    "greedy_ar": ("ar",),
}


def run(
    model: PreTrainedModel,
    method: str,
    prompts: list[list[int]],
    *,
    batch_size: int = 8,
    limit: int = 96,
    threshold: float | None = None,
    **options: Any,
) -> list[Generation]:
    """Decode prompts with a method of the registry."""
    requests = [Request(prompt, limit, threshold) for prompt in prompts]
    chosen = build_method(method, mask_id=MASK, **options)
    return decode(model, chosen, requests, eos_id=EOS, pad_id=PAD, batch_size=batch_size)


def golden_cases() -> list[tuple[int, str]]:
    """(index of a recorded decoding, method that must equal it); indices 0 to 20 and the last two are ours."""
    indices = [*range(21), 45, 46]
    return [(i, method) for i in indices for method in (("ar",) if i >= 45 else ("mars", "mars-no-cache"))]


@pytest.mark.parametrize(("index", "method"), golden_cases())
@pytest.mark.parametrize("batch_size", [1, 7])
def test_golden_decodings(
    index: int,
    method: str,
    batch_size: int,
    golden: dict[str, Any],
    golden_models: dict[str, PreTrainedModel],
) -> None:
    """Guards against any token or forward count that differs from the authors' sampler, alone or in a ragged batch."""
    recorded = golden["decoding"][index]
    assert method in SAMPLERS[recorded["sampler"]] or recorded["sampler"] == "sliding_window_cached"
    options = {} if method == "ar" else {"block_size": recorded["block_size"], "metric": recorded["metric"]}
    generations = run(
        golden_models[recorded.get("checkpoint", "mars")],
        method,
        golden["prompts"][: 24 if batch_size > 1 else 8],
        batch_size=batch_size,
        limit=golden["max_new_tokens"],
        threshold=recorded.get("threshold"),
        **options,
    )
    for generation, row in zip(generations, recorded["rows"], strict=False):
        assert generation.tokens == row["tokens"]
        assert generation.forwards == row.get("forwards", generation.forwards)


def test_ar_equals_generate(golden: dict[str, Any], golden_models: dict[str, PreTrainedModel]) -> None:
    """Guards against a baseline that is not the model's own greedy decoding."""
    model = golden_models["ar"]
    for prompt, ours in zip(golden["prompts"][:6], run(model, "ar", golden["prompts"][:6]), strict=True):
        ids = torch.tensor([prompt])
        theirs = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=96,
            do_sample=False,
            eos_token_id=EOS,
            pad_token_id=PAD,
        )
        assert ours.tokens == [token for token in theirs[0, len(prompt) :].tolist() if token != EOS]
        assert ours.emitted == ours.forwards


@pytest.fixture(scope="module")
def random_models() -> dict[str, PreTrainedModel]:
    """Untrained models: their outputs end early, late or never, and nothing about them is smooth."""
    torch.manual_seed(0)
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shape = {
        "vocab_size": 24, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.5,
    }  # fmt: skip
    return {
        "qwen2": Qwen2ForCausalLM(Qwen2Config(**shape)).eval(),
        "llama": LlamaForCausalLM(LlamaConfig(**shape)).eval(),
    }


PROMPTS = st.lists(st.lists(st.integers(4, 23), min_size=1, max_size=14), min_size=1, max_size=6)


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=25, deadline=None)
@given(
    prompts=PROMPTS,
    limit=st.integers(1, 17),
    threshold=st.sampled_from([None, 0.0, 0.2, 0.5, 0.9]),
    block_size=st.integers(1, 6),
    family=st.sampled_from(["qwen2", "llama"]),
)
def test_every_method_keeps_the_contract(
    method: str,
    prompts: list[list[int]],
    limit: int,
    threshold: float | None,
    block_size: int,
    family: str,
    random_models: dict[str, PreTrainedModel],
) -> None:
    """Guards against lost, double or late-counted tokens, rows that disturb each other, and limits overrun."""
    options: dict[str, Any] = {} if method == "ar" else {"threshold": threshold, "block_size": block_size}
    model = random_models[family]
    batched = run(model, method, prompts, limit=limit, batch_size=len(prompts), **options)
    for prompt, generation in zip(prompts, batched, strict=True):
        assert run(model, method, [prompt], limit=limit, **options) == [generation]
        ended = generation.finish == "eos"
        assert generation.emitted == len(generation.tokens) + ended <= limit
        assert ended or generation.emitted == limit
        assert EOS not in generation.tokens
        assert generation.forwards >= 1
        if threshold is None:
            assert max(generation.accepted) <= 1


@settings(max_examples=25, deadline=None)
@given(prompts=PROMPTS, block_size=st.integers(1, 6), threshold=st.sampled_from([0.0, 0.3, 0.8]))
def test_mars_without_cache_equals_mars(
    prompts: list[list[int]], block_size: int, threshold: float, random_models: dict[str, PreTrainedModel]
) -> None:
    """Guards against stale cache entries: masks of an earlier step that a later one can see."""
    options: dict[str, Any] = {"limit": 15, "threshold": threshold, "block_size": block_size}
    model = random_models["qwen2"]
    assert run(model, "mars", prompts, **options) == run(model, "mars-no-cache", prompts, **options)


@pytest.mark.parametrize("method", ["mars", "mars-no-cache"])
def test_one_token_mode_equals_ar(
    method: str, golden: dict[str, Any], golden_models: dict[str, PreTrainedModel]
) -> None:
    """Guards against masks that change candidate 0, which must be the AR prediction."""
    prompts, model = golden["prompts"], golden_models["mars"]
    assert run(model, method, prompts) == run(model, "ar", prompts)
    # A threshold that nothing but the first candidate passes takes the other path, with masks, to the same end.
    assert [g.tokens for g in run(model, method, prompts, threshold=0.0, metric="entropy")] == [
        g.tokens for g in run(model, "ar", prompts)
    ]


def test_rows_may_carry_different_limits_and_thresholds(
    golden: dict[str, Any], golden_models: dict[str, PreTrainedModel]
) -> None:
    """Guards against one row's options applied to the whole batch."""
    model, method = golden_models["mars"], build_method("mars", mask_id=MASK)
    requests = [
        Request(prompt, limit, threshold)
        for prompt, limit, threshold in zip(golden["prompts"], [96, 3, 11, 96], [None, 0.9, 0.5, 0.7], strict=False)
    ]
    together = decode(model, method, requests, eos_id=EOS, pad_id=PAD)
    alone = [decode(model, method, [request], eos_id=EOS, pad_id=PAD)[0] for request in requests]
    assert together == alone


def test_confidence_by_hand() -> None:
    """Guards against a metric on the wrong scale or in the model's dtype."""
    logits = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    assert confidence(logits, "probability").item() == pytest.approx(0.5)
    assert confidence(logits, "margin").item() == pytest.approx(0.2)
    assert -confidence(logits, "entropy").item() == pytest.approx(1.0297, abs=1e-4)
    assert confidence(logits.bfloat16(), "probability").dtype == torch.float32


def test_leading_run_stops_at_the_first_failure() -> None:
    """Guards against tokens accepted to the right of a rejected one, and against a first token rejected."""
    passes = torch.tensor([[False, True, False, True], [True, False, True, True]])
    assert leading_run(passes).int().tolist() == [[1, 1, 0, 0], [1, 0, 0, 0]]


@pytest.mark.parametrize(
    ("threshold", "metric"), [(1.5, "probability"), (-0.1, "margin"), (-1.0, "entropy"), (0.5, "hope")]
)
def test_bad_thresholds_are_refused(threshold: float, metric: Any) -> None:
    """Guards against a threshold that silently accepts everything or nothing."""
    with pytest.raises(UserError):
        bar(threshold, metric)


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (Request([]), "empty"),
        (Request([4, 99]), "vocabulary"),
        (Request([-1]), "vocabulary"),
        (Request([4], 0), "max_new_tokens"),
        (Request([4] * 100, 60), "context"),
    ],
)
def test_bad_requests_are_refused(request_: Request, said: str, random_models: dict[str, PreTrainedModel]) -> None:
    """Guards against an index error from deep inside the model where a plain word would do."""
    with pytest.raises(UserError, match=said):
        decode(random_models["qwen2"], build_method("ar", mask_id=None), [request_], eos_id=EOS, pad_id=PAD)


def test_methods_that_cannot_run_say_why() -> None:
    """Guards against masks made of token -1."""
    for name, wrong in (
        ("mars", {"mask_id": None}),
        ("mars", {"mask_id": 3, "block_size": 0}),
        ("magic", {"mask_id": 3}),
    ):
        with pytest.raises(UserError):
            build_method(name, **wrong)
    with pytest.raises(UserError, match="no threshold"):
        build_method("ar", mask_id=None).bar(0.5)
