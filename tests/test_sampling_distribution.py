"""Lossless methods must sample from the distribution of plain sampling, also with other seeds.

With the seeds of `ar` they draw the tokens of `ar` (`test_decoding`). That does not show noise that is wrong for both,
or that is right for these seeds only. A permutation test asks whether two arms that answer the same prompts can be
told apart.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import tools
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from marsbench.decoding.engine import decode
from marsbench.decoding.generation import Generation, Request
from marsbench.decoding.rows import Accepted, Rows
from marsbench.decoding.sampling import choose, cut_off
from marsbench.forward.window import Answer, Window
from marsbench.methods import METHODS, Options, build_method
from marsbench.methods.mars_verified import MarsVerified
from marsbench.methods.mixed import Mixed
from marsbench.training.medusa import MedusaHeads

MASK, VOCABULARY, PROMPTS, LENGTH, SHUFFLES = 3, 12, 256, 6, 999
LOSSLESS = [name for name, info in METHODS.items() if info.lossless and not info.own_loop and name != "ar"]
BAR = 0.05 / (len(LOSSLESS) + 1)  # one in twenty such modules would fail by chance; seeds are fixed


def llama() -> Any:
    return tools.llama(5, vocab_size=VOCABULARY, **tools.SMALLEST)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return llama()


def answers(model: Any, method: Any, seed: int, temperature: float = 1.0) -> list[Generation]:
    """One answer to each prompt, all of equal length; each draws with a seed of its own."""
    requests = [
        Request([number % VOCABULARY, number // VOCABULARY % VOCABULARY, 7], LENGTH, temperature=temperature,
                seed=seed + number, ignore_eos=True)
        for number in range(PROMPTS)
    ]  # fmt: skip
    return decode(model, method, requests, eos_id=2, pad_id=0, batch_size=64)


def told_apart(*arms: Sequence[Generation]) -> float:
    """The p-value of "both arms are alike": the two answers to a prompt are swapped or not, by chance.

    The test compares how often each token stands at each place, and how often each follows another.
    """
    first, second = (torch.tensor([answer.tokens for answer in arm]) for arm in arms)
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
    """Guards against a test that tells equal arms apart."""
    assert told_apart(plain, answers(model, build_method("ar", Options()), seed=10_000)) > BAR


@pytest.mark.parametrize("name", LOSSLESS)
def test_verified_drafts_are_sampled_as_without(name: str, model: LlamaForCausalLM, plain: list[Generation]) -> None:
    """Guards against drafts that are kept too often, which makes likely tokens likelier."""
    torch.manual_seed(1)
    options: Any = {"mask_id": MASK, "draft": llama(), "heads": MedusaHeads(16, 3)}
    sampled = answers(model, build_method(name, Options(**options)), seed=10_000)
    assert sum(answer.forwards for answer in sampled) < PROMPTS * LENGTH, "some drafts must be right"
    assert told_apart(plain, sampled) > BAR


class Trusting(MarsVerified):
    """Keeps the first draft, also where the model draws another token."""

    def accept(self, rows: Rows, window: Window, answer: Answer) -> Accepted:
        drafts, drafted = rows.drafts, rows.drafted
        accepted = super().accept(rows, window, answer)
        if not drafts.shape[1]:
            return accepted
        kept = torch.cat([drafts[:, :1], accepted.ids[:, 1:]], dim=1)
        return accepted._replace(ids=torch.where((drafted > 0).unsqueeze(1), kept, accepted.ids))


@pytest.mark.parametrize("wrong", ["a draft that is kept", "another temperature"])
def test_what_is_wrong_is_told_apart(wrong: str, model: LlamaForCausalLM, plain: list[Generation]) -> None:
    """Guards against a test that lets everything pass: these two arms are wrong on purpose."""
    if wrong == "another temperature":
        sampled = answers(model, build_method("mars-verified", Options(mask_id=MASK)), seed=10_000, temperature=0.7)
    else:
        sampled = answers(model, Trusting(MASK), seed=10_000)
    assert told_apart(plain, sampled) <= 0.01


CUTS = st.tuples(st.sampled_from([0, 1, 2, 3, 9]), st.sampled_from([1.0, 0.9, 0.5, 0.01]),
                 st.sampled_from([0.0, 0.1, 0.5, 1.0]))  # fmt: skip


def left(logits: list[float], top_k: int, top_p: float, min_p: float) -> dict[int, float]:
    """The tokens that may be sampled and their probabilities, token by token."""
    weights = torch.tensor(logits, dtype=torch.float64).exp()
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    ranked = ranked[:top_k] if top_k else ranked
    total = sum(float(weights[token]) for token in ranked)
    kept, reached = dict[int, float](), 0.0
    for token in ranked:
        share = float(weights[token]) / total
        if kept and ((top_p < 1 and reached >= top_p) or share < min_p * float(weights[ranked[0]]) / total):
            break
        kept[token] = share
        reached += share
    return {token: share / sum(kept.values()) for token, share in kept.items()}


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(-60, 60).map(lambda tenths: tenths / 10), min_size=4, max_size=12, unique=True), CUTS)
def test_what_is_left_is_what_the_names_say(logits: list[float], cut: tuple[int, float, float]) -> None:
    """Guards against a token too many or too few, and a wrong order of the three cuts."""
    rows = torch.tensor([[logits]])
    kept = cut_off(rows, *(torch.tensor([float(bound)]) for bound in cut))[0, 0]
    expected = left(logits, *cut)
    assert {int(token) for token in kept.isfinite().nonzero()} == expected.keys()
    assert torch.equal(kept[kept.isfinite()], rows[0, 0][kept.isfinite()])


@pytest.mark.parametrize("by", ["seed", "position"])
@pytest.mark.parametrize("cut", [(0, 1.0, 0.0), (3, 1.0, 0.0), (0, 0.8, 0.0), (0, 1.0, 0.2), (4, 0.9, 0.05)])
def test_draws_follow_what_is_left(cut: tuple[int, float, float], by: str) -> None:
    """Guards against draws of cut tokens, temperature on the wrong side, noise with patterns, wrong shares."""
    logits, many, temperature = [2.0, 1.5, 1.0, 0.5, 0.0, -1.0], 6000, 0.7
    each, same = torch.arange(many), torch.zeros(many, dtype=torch.long)
    seed, position = (each, same) if by == "seed" else (same, each)
    drawn = choose(
        torch.tensor([[logits]]).expand(many, 1, -1), position.unsqueeze(1), torch.full((many,), temperature), seed,
        torch.tensor([cut]).float().expand(many, 3),
    )  # fmt: skip
    shares = torch.bincount(drawn.flatten(), minlength=len(logits)) / many
    expected = left([logit / temperature for logit in logits], *cut)
    for token in range(len(logits)):
        share = expected.get(token, 0.0)
        assert abs(float(shares[token]) - share) < 4 * (share * (1 - share) / many) ** 0.5 + 1e-9


def test_verified_guesses_give_the_tokens_of_ar(golden: dict[str, Any], golden_models: tools.Models) -> None:
    """Guards against guesses checked against another distribution than AR's, and cuts of neighbouring rows."""
    requests = [
        Request(prompt, 24, 0.2, temperature=1.2, seed=number, window=4, verified=True, ignore_eos=True, **cut)
        for number, (prompt, cut) in enumerate(
            zip(golden["prompts"], [{"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {}] * 9, strict=False)
        )
    ]
    model, ids = golden_models["mars"], {"eos_id": 2, "pad_id": 0}
    together = decode(model, Mixed(3), requests, **ids)
    ar = build_method("ar", Options())
    for request, answer in zip(requests, together, strict=True):
        cut = {"top_k": request.top_k, "top_p": request.top_p, "min_p": request.min_p}
        alone = Request(request.prompt_ids, 24, temperature=1.2, seed=request.seed, ignore_eos=True, **cut)
        assert answer.tokens == decode(model, ar, [alone], **ids)[0].tokens
    assert sum(answer.forwards for answer in together) < 24 * len(together), "some guesses were right"
    free = [Request(row.prompt_ids, 24, 0.2, temperature=1.2, seed=row.seed, ignore_eos=True) for row in requests]
    assert [row.tokens for row in decode(model, Mixed(3), free, **ids)] != [row.tokens for row in together]
