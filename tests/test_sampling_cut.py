"""Sampling from a part of the tokens: the distribution that is left, and verified guesses as without them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from marsbench.decoding.engine import decode
from marsbench.decoding.generation import Request
from marsbench.decoding.sampling import choose, cut_off
from marsbench.errors import UserError
from marsbench.methods import Options, build_method
from marsbench.methods.mixed import Mixed

CUTS = st.tuples(st.sampled_from([0, 1, 2, 3, 9]), st.sampled_from([1.0, 0.9, 0.5, 0.01]),
                 st.sampled_from([0.0, 0.1, 0.5, 1.0]))  # fmt: skip


def left(logits: list[float], top_k: int, top_p: float, min_p: float) -> dict[int, float]:
    """What may be sampled and how probable it is, one token after the other."""
    weights = torch.tensor(logits, dtype=torch.float64).exp()
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    ranked = ranked[:top_k] if top_k else ranked
    total = sum(float(weights[token]) for token in ranked)
    found, reached = dict[int, float](), 0.0
    for token in ranked:
        share = float(weights[token]) / total
        if found and ((top_p < 1 and reached >= top_p) or share < min_p * float(weights[ranked[0]]) / total):
            break
        found[token] = share
        reached += share
    return {token: share / sum(found.values()) for token, share in found.items()}


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(-60, 60).map(lambda one: one / 10), min_size=4, max_size=12, unique=True), CUTS)
def test_what_is_left_is_what_the_names_say(logits: list[float], cut: tuple[int, float, float]) -> None:
    """Guards against a token too many or too few, and the wrong order of three cuts."""
    rows = torch.tensor([[logits]])
    kept = cut_off(rows, *(torch.tensor([float(one)]) for one in cut))[0, 0]
    expected = left(logits, *cut)
    assert {int(token) for token in kept.isfinite().nonzero()} == expected.keys()
    assert torch.equal(kept[kept.isfinite()], rows[0, 0][kept.isfinite()])


@pytest.mark.parametrize("by", ["seed", "position"])
@pytest.mark.parametrize("cut", [(0, 1.0, 0.0), (3, 1.0, 0.0), (0, 0.8, 0.0), (0, 1.0, 0.2), (4, 0.9, 0.05)])
def test_draws_follow_what_is_left(cut: tuple[int, float, float], by: str) -> None:
    """Guards against draws that are cut off, a temperature on the wrong side of the fraction, noise with a pattern, and
    shares that are not those of the softmax.
    """
    logits, many, temperature = [2.0, 1.5, 1.0, 0.5, 0.0, -1.0], 6000, 0.7
    each, same = torch.arange(many), torch.zeros(many, dtype=torch.long)
    seed, position = (each, same) if by == "seed" else (same, each)
    drawn = choose(
        torch.tensor([[logits]]).expand(many, 1, -1), position.unsqueeze(1), torch.full((many,), temperature), seed,
        torch.tensor([cut]).float().expand(many, 3),
    )  # fmt: skip
    shares = torch.bincount(drawn.flatten(), minlength=len(logits)) / many
    expected = left([one / temperature for one in logits], *cut)
    for token in range(len(logits)):
        share = expected.get(token, 0.0)
        assert abs(float(shares[token]) - share) < 4 * (share * (1 - share) / many) ** 0.5 + 1e-9


def test_verified_guesses_give_the_tokens_of_ar(
    golden: dict[str, Any], golden_models: dict[str, PreTrainedModel]
) -> None:
    """Guards against guesses that are checked against another distribution than that of AR, and cuts of neighbours."""
    requests = [
        Request(prompt, 24, 0.2, temperature=1.2, seed=number, window=4, verified=True, ignore_eos=True, **cut)
        for number, (prompt, cut) in enumerate(
            zip(golden["prompts"], [{"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {}] * 9, strict=False)
        )
    ]
    model, ids = golden_models["mars"], {"eos_id": 2, "pad_id": 0}
    together = decode(model, Mixed(3), requests, **ids)
    ar = build_method("ar", Options())
    for request, found in zip(requests, together, strict=True):
        cut = {"top_k": request.top_k, "top_p": request.top_p, "min_p": request.min_p}
        (alone,) = decode(
            model, ar, [Request(request.prompt_ids, 24, temperature=1.2, seed=request.seed, ignore_eos=True, **cut)],
            **ids,
        )  # fmt: skip
        assert found.tokens == alone.tokens
    assert sum(one.forwards for one in together) < 24 * len(together), "some guesses were right"
    free = [Request(one.prompt_ids, 24, 0.2, temperature=1.2, seed=one.seed, ignore_eos=True) for one in requests]
    assert [one.tokens for one in decode(model, Mixed(3), free, **ids)] != [one.tokens for one in together]


@pytest.mark.parametrize("cut", [{"top_p": 0.0}, {"top_p": 1.5}, {"min_p": -0.1}])
def test_a_cut_that_leaves_nothing_is_refused(cut: dict[str, float], golden_models: dict[str, PreTrainedModel]) -> None:
    """Guards against a request of which no token may be sampled."""
    with pytest.raises(UserError, match="top_p"):
        decode(golden_models["ar"], build_method("ar", Options()), [Request([5], 4, temperature=1.0, **cut)],
               eos_id=2, pad_id=0)  # fmt: skip
