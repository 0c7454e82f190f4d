"""The running batch: callbacks that change it, requests that are refused, noise at large vocabularies."""

from contextlib import suppress
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tools import Models
from transformers import PreTrainedModel

from marsbench.decoding.engine import Batch, decode
from marsbench.decoding.generation import Generation, Request
from marsbench.decoding.sampling import _gumbel, choose
from marsbench.errors import UserError
from marsbench.methods import Options, build_method
from marsbench.methods.mixed import Mixed

EOS, PAD, MASK = 2, 0, 3


class Desk:
    """A batch of the golden MARS checkpoint, and the generations that have come back from it."""

    def __init__(self, model: PreTrainedModel, **callbacks: Any) -> None:
        self.done: dict[int, Generation] = {}
        self.tokens: dict[int, list[int]] = {}
        self.on_finished, self.on_tokens = callbacks.get("on_finished"), callbacks.get("on_tokens")
        method = build_method("mars", Options(mask_id=MASK))
        hooks: dict[str, Any] = {"on_finished": self._finished, "on_tokens": self._tokens}
        self.batch = Batch(model, method, eos_id=EOS, pad_id=PAD, **hooks)

    def _finished(self, index: int, generation: Generation) -> None:
        self.done[index] = generation
        if self.on_finished:
            self.on_finished(self, index)

    def _tokens(self, index: int, tokens: list[int]) -> None:
        self.tokens.setdefault(index, []).extend(tokens)
        if self.on_tokens:
            self.on_tokens(self, index)

    def run(self) -> None:
        for _ in range(2000):
            if not len(self.batch):
                return
            self.batch.step()
        raise AssertionError("the batch does not end")


@pytest.fixture
def prompts(golden: dict[str, Any]) -> list[list[int]]:
    return list(golden["prompts"])


@pytest.fixture
def alone(golden_models: Models, prompts: list[list[int]]) -> list[list[int]]:
    """The answer to every prompt without neighbours."""
    method, requests = build_method("mars", Options(mask_id=MASK)), [Request(prompt, 40, 0.7) for prompt in prompts]
    generations = decode(golden_models["mars"], method, requests, eos_id=EOS, pad_id=PAD, batch_size=1)
    return [generation.tokens for generation in generations]


def test_callbacks_may_do_as_they_like(golden_models: Models, prompts: list[list[int]], alone: list[list[int]]) -> None:
    """Guards against requests lost when a row is refilled, or when another client goes or fails."""
    waiting = list(range(2, len(prompts)))

    def refill(desk: Desk, index: int) -> None:
        if waiting:
            new = waiting.pop(0)
            desk.batch.join({new: Request(prompts[new], 40, 0.7)})

    desk = Desk(golden_models["mars"], on_finished=refill)
    desk.batch.join({index: Request(prompts[index], 40, 0.7) for index in (0, 1)})
    desk.run()
    assert [desk.done[index].tokens for index in range(len(prompts))] == alone

    def hang_up(desk: Desk, index: int) -> None:
        if index == 1 and len(desk.tokens[1]) >= 3:
            desk.batch.leave(1)

    desk = Desk(golden_models["mars"], on_tokens=hang_up)
    desk.batch.join({index: Request(prompts[index], 40, 0.7) for index in range(3)})
    with pytest.raises(UserError, match="in flight"):
        desk.batch.join({2: Request([4], 5)})
    desk.run()
    assert desk.done[1].finish == "cancelled" and desk.done[1].tokens == alone[1][: len(desk.done[1].tokens)]
    assert [desk.done[index].tokens for index in (0, 2)] == [alone[0], alone[2]]

    def breaks(desk: Desk, index: int) -> None:
        if index == 0:
            raise ConnectionError("gone")

    desk = Desk(golden_models["mars"], on_tokens=breaks)
    with pytest.raises(ConnectionError):
        desk.batch.join({index: Request(prompts[index], 40, 0.7) for index in range(3)})
    for _ in range(200):
        if not len(desk.batch):
            break
        with suppress(ConnectionError):
            desk.batch.step()
    assert [desk.done[index].tokens for index in range(3)] == alone[:3]
    assert [desk.tokens[index] for index in (1, 2)] == [
        [*alone[index], *([] if desk.done[index].eos_id is None else [EOS])] for index in (1, 2)
    ]


def test_a_whole_number_is_a_threshold_like_another(golden_models: Models, prompts: list[list[int]]) -> None:
    """Guards against a neighbour's `threshold=1` that makes 0.9 a 0, which accepts everything."""
    method = build_method("mars", Options(mask_id=MASK))
    first, second = [
        decode(golden_models["mars"], method, [Request(prompts[0], 40, threshold), Request(prompts[1], 40, 0.9)],
               eos_id=EOS, pad_id=PAD)
        for threshold in (1, 1.0)
    ]  # fmt: skip
    assert [generation.settled_by for generation in first] == [generation.settled_by for generation in second]


def test_noise_is_finite_and_follows_gumbel() -> None:
    """Guards against infinite noise, which draws impossible tokens, and a tail that is too short or too long."""
    vocabulary, rows, positions = 200_000, 1, 10
    logits = torch.full((rows, positions, vocabulary), -60.0)
    logits[..., 17] = 0.0
    for first in range(0, 1_000_000 // vocabulary):  # as many noise values as tokens: a million draws of noise
        position = torch.arange(first * positions, (first + 1) * positions).unsqueeze(0)
        drawn = choose(logits, position, torch.ones(rows), torch.tensor([first]))
        assert (drawn == 17).all()
    noise = torch.cat([_gumbel(torch.tensor([seed]), torch.tensor([[1, 2]]), 200_000).flatten() for seed in range(50)])
    assert noise.isfinite().all()
    for level in (0.0, 2.0, 5.0, 9.0, 12.0):
        expected = 1 - torch.exp(-torch.exp(torch.tensor(-level, dtype=torch.float64))).item()
        share = (noise > level).double().mean().item()
        spread = (expected * (1 - expected) / len(noise)) ** 0.5
        assert abs(share - expected) < 5 * spread, level


LIMIT = 24
WAYS = [("ar", None, 1), *[(name, tau, window) for name in ("mars", "mars-verified")
                           for tau in (0.0, 0.3, 0.7) for window in (2, 4, 6)]]  # fmt: skip
Way = tuple[str, "float | None", int]


def asking(prompt: list[int], way: Way, **more: Any) -> Request:
    """A request that decodes in such a way among others."""
    name, tau, window = way
    return Request(prompt, LIMIT, tau, window=window, verified=name == "mars-verified", **more)


@pytest.fixture(scope="module")
def every_way(golden: dict[str, Any], golden_models: Models) -> dict[tuple[int, Way], Generation]:
    """Every prompt decoded in every way by the methods themselves."""
    generations = {}
    for way in WAYS:
        name, tau, window = way
        method = build_method(name, Options(mask_id=MASK, window=window, layout="linear"))
        requests = [Request(prompt, LIMIT, tau) for prompt in golden["prompts"]]
        every = decode(golden_models["mars"], method, requests, eos_id=EOS, pad_id=PAD)
        generations |= {(number, way): generation for number, generation in enumerate(every)}
    return generations


CHOSEN = st.tuples(st.integers(0, 7), st.sampled_from(WAYS), st.integers(0, 12))


@settings(max_examples=15, deadline=None)
@given(chosen=st.lists(CHOSEN, min_size=1, max_size=12))
def test_a_row_decodes_as_if_it_were_alone(
    chosen: list[tuple[int, Way, int]], golden: dict[str, Any], golden_models: Models,
    every_way: dict[tuple[int, Way], Generation],
) -> None:  # fmt: skip
    """Guards against rows that get masks, drafts or bars of their neighbours, in whatever order rows join."""
    done: dict[int, Generation] = {}
    batch = Batch(golden_models["mars"], Mixed(MASK), eos_id=EOS, pad_id=PAD, on_finished=done.__setitem__)
    prompts = golden["prompts"]
    for step in range(200):
        batch.join({
            index: asking(prompts[number % len(prompts)], way)
            for index, (number, way, joins) in enumerate(chosen) if joins == step
        })  # fmt: skip
        batch.step()
        if len(done) == len(chosen):
            break
    for index, (number, way, _) in enumerate(chosen):
        assert done[index] == every_way[number % len(prompts), way]


def test_a_row_may_be_turned_in_mid_stream(
    golden: dict[str, Any], golden_models: Models, every_way: dict[tuple[int, Way], Generation]
) -> None:
    """Guards against a knob that loses drafts or tokens, unchecked drafts, and neighbours that are turned as well."""
    numbers = range(len(golden["prompts"]))
    ar = {number: every_way[number, ("ar", None, 1)].tokens for number in numbers}
    for turned in (
        lambda step: {number: (0.0, 1 + (step + number) % 6, True) for number in numbers},
        lambda step: {number: (1.0, 4, step % 3 == 0) for number in numbers[::2]},  # nothing unchecked passes at tau 1
    ):
        done: dict[int, Generation] = {}
        batch = Batch(golden_models["mars"], Mixed(MASK), eos_id=EOS, pad_id=PAD, on_finished=done.__setitem__)
        batch.join({number: asking(golden["prompts"][number], ("mars-verified", 0.0, 4)) for number in numbers})
        for step in range(100):
            batch.turn(turned(step))
            batch.step()
        assert {number: generation.tokens for number, generation in done.items()} == ar
        assert max(max(generation.accepted) for generation in done.values()) > 1


def test_a_failed_call_leaves_no_trace(golden_models: Models, prompts: list[list[int]]) -> None:
    """Guards against a forward counted that has failed, and a row turned although another cannot be."""
    desk, requests = Desk(golden_models["mars"]), [Request(prompt, 20, 0.7) for prompt in prompts[:2]]
    desk.batch.join(dict(enumerate(requests)))
    with patch("marsbench.decoding.step.forward", side_effect=MemoryError), suppress(MemoryError):
        desk.batch.step()
    with pytest.raises(UserError, match="window 0 is below 1"):
        desk.batch.turn({0: (0.0, 1, False), 1: (0.7, 0, False)})
    assert {seat.needed for seat in desk.batch._running.seats.values()} == {0.7}
    desk.run()
    assert [*desk.done.values()] == decode(desk.batch.model, desk.batch.method, requests, eos_id=EOS, pad_id=PAD)


def test_who_ignores_eos_runs_to_the_limit(golden: dict[str, Any], golden_models: Models) -> None:
    """Guards against an EOS that ends a row which ignores it or not its neighbour, and against windows of 0 tokens."""
    prompts = golden["prompts"]
    requests = [asking(prompt, ("ar", None, 1), ignore_eos=number % 2 == 0) for number, prompt in enumerate(prompts)]
    generations = decode(golden_models["mars"], Mixed(MASK), requests, eos_id=[EOS, *range(5, 20)], pad_id=PAD)
    assert {(generation.finish, generation.emitted) for generation in generations[::2]} == {("length", LIMIT)}
    assert "eos" in {generation.finish for generation in generations[1::2]}
    theirs = build_method("hf-generate", Options())
    assert generations == decode(golden_models["mars"], theirs, requests, eos_id=[EOS, *range(5, 20)], pad_id=PAD)
    with pytest.raises(UserError, match="at least 1 token"):
        decode(golden_models["mars"], Mixed(MASK), [Request([5], window=0)], eos_id=EOS, pad_id=PAD)
