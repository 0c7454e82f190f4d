"""Sampling by lossless methods is held to plain sampling as a distribution, with seeds that have nothing in common.

By the seeds of `ar` they draw the tokens of `ar` (`test_decoding`). That says nothing about a noise that is wrong for
both, or that is right for no other seed. A permutation test asks whether two arms that answer the same prompts could
be told apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from marsbench.decoding.engine import decode
from marsbench.decoding.generation import Generation, Request
from marsbench.decoding.rows import Accepted, Rows
from marsbench.forward.window import Answer, Window
from marsbench.methods import METHODS, Options, build_method
from marsbench.methods.mars_verified import MarsVerified
from marsbench.training.medusa import MedusaHeads

MASK, VOCABULARY, PROMPTS, LENGTH, SHUFFLES = 3, 12, 256, 6, 999
LOSSLESS = [name for name, info in METHODS.items() if info.lossless and not info.own_loop and name != "ar"]
BAR = 0.05 / (len(LOSSLESS) + 1)  # one test in twenty such modules would fail by bad luck; seeds are fixed


def llama() -> LlamaForCausalLM:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, intermediate_size=24, num_attention_heads=2,
        num_key_value_heads=1, initializer_range=0.5,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return llama()


def answers(model: Any, method: Any, seed: int, temperature: float = 1.0) -> list[Generation]:
    """One answer to each of the prompts, all of a length; each draws with a seed of its own."""
    requests = [
        Request([number % VOCABULARY, number // VOCABULARY % VOCABULARY, 7], LENGTH, temperature=temperature,
                seed=seed + number, ignore_eos=True)
        for number in range(PROMPTS)
    ]  # fmt: skip
    return decode(model, method, requests, eos_id=2, pad_id=0, batch_size=64)


def told_apart(one: Sequence[Generation], other: Sequence[Generation]) -> float:
    """The p-value of "they are alike": who gave which answer to a prompt is shuffled, prompt by prompt.

    What is compared is how often each token stands at each place, and which follows which.
    """
    first, second = (torch.tensor([answer.tokens for answer in arm]) for arm in (one, other))
    difference = _facts(first) - _facts(second)  # [N, facts]
    signs = torch.randint(2, (SHUFFLES, PROMPTS), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
    seen, shuffled = difference.sum(0).abs().sum(), (signs @ difference).abs().sum(1)
    return float((1 + (shuffled >= seen).sum()) / (1 + SHUFFLES))


def _facts(tokens: torch.Tensor) -> torch.Tensor:
    pairs = tokens[:, :-1] * VOCABULARY + tokens[:, 1:]
    places = torch.nn.functional.one_hot(tokens, VOCABULARY).flatten(1)
    return torch.cat([places, torch.nn.functional.one_hot(pairs, VOCABULARY**2).sum(1)], dim=1).float()


@pytest.fixture(scope="module")
def plain(model: LlamaForCausalLM) -> list[Generation]:
    return answers(model, build_method("ar", Options()), seed=0)


def test_plain_sampling_is_like_itself(model: LlamaForCausalLM, plain: list[Generation]) -> None:
    """Guards against a test that tells alike things apart."""
    assert told_apart(plain, answers(model, build_method("ar", Options()), seed=10_000)) > BAR


@pytest.mark.parametrize("name", LOSSLESS)
def test_verified_drafts_are_sampled_as_without(name: str, model: LlamaForCausalLM, plain: list[Generation]) -> None:
    """Guards against drafts that are kept too often: what is likely would become likelier."""
    torch.manual_seed(1)
    given = {"mask_id": MASK, "draft": llama(), "heads": MedusaHeads(16, 3)}
    found = answers(model, build_method(name, Options(**given)), seed=10_000)
    assert sum(one.forwards for one in found) < PROMPTS * LENGTH, "drafts are right now and then, or nothing is tested"
    assert told_apart(plain, found) > BAR


class Trusting(MarsVerified):
    """Keeps the first draft whatever the model has drawn in its place."""

    def accept(self, rows: Rows, window: Window, answer: Answer) -> Accepted:
        drafts, drafted = rows.drafts, rows.drafted
        accepted = super().accept(rows, window, answer)
        if not drafts.shape[1]:
            return accepted
        return accepted._replace(ids=torch.where((drafted > 0).unsqueeze(1), _kept(accepted.ids, drafts), accepted.ids))


def _kept(ids: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
    return torch.cat([drafts[:, :1], ids[:, 1:]], dim=1)


@pytest.mark.parametrize("wrong", ["a draft that is kept", "another temperature"])
def test_what_is_wrong_is_told_apart(wrong: str, model: LlamaForCausalLM, plain: list[Generation]) -> None:
    """Guards against a test that lets everything through: these two arms are wrong on purpose."""
    if wrong == "another temperature":
        found = answers(model, build_method("mars-verified", Options(mask_id=MASK)), seed=10_000, temperature=0.7)
    else:
        found = answers(model, Trusting(MASK), seed=10_000)
    assert told_apart(plain, found) <= 0.01
