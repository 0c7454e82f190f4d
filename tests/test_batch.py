"""The running batch: callbacks that do as they like, requests that are refused, noise at large vocabularies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from marsbench.decoding.engine import Batch, decode
from marsbench.decoding.generation import Generation, Request
from marsbench.decoding.sampling import _gumbel, choose
from marsbench.errors import UserError
from marsbench.methods import Options, build_method

EOS, PAD, MASK = 2, 0, 3


class Desk:
    """A batch of the golden MARS checkpoint, and what has come back from it."""

    def __init__(self, model: PreTrainedModel, **callbacks: Any) -> None:
        self.done: dict[int, Generation] = {}
        self.tokens: dict[int, list[int]] = {}
        self.on_finished, self.on_tokens = callbacks.get("on_finished"), callbacks.get("on_tokens")
        method = build_method("mars", Options(mask_id=MASK))
        self.batch = Batch(
            model,
            method,
            eos_id=EOS,
            pad_id=PAD,
            on_finished=self._finished,
            on_tokens=self._tokens,  # type: ignore[arg-type]
        )

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
def alone(golden_models: dict[str, PreTrainedModel], prompts: list[list[int]]) -> list[list[int]]:
    """What every prompt's answer is without company."""
    method = build_method("mars", Options(mask_id=MASK))
    requests = [Request(prompt, 40, 0.7) for prompt in prompts]
    return [one.tokens for one in decode(golden_models["mars"], method, requests, eos_id=EOS, pad_id=PAD, batch_size=1)]


def test_newcomers_may_join_from_within_a_callback(
    golden_models: dict[str, PreTrainedModel], prompts: list[list[int]], alone: list[list[int]]
) -> None:
    """Guards against requests that are lost when a server refills a row the moment it becomes free."""
    waiting = list(range(2, len(prompts)))

    def refill(desk: Desk, index: int) -> None:
        if waiting:
            new = waiting.pop(0)
            desk.batch.join({new: Request(prompts[new], 40, 0.7)})

    desk = Desk(golden_models["mars"], on_finished=refill)
    desk.batch.join({index: Request(prompts[index], 40, 0.7) for index in (0, 1)})
    desk.run()
    assert [desk.done[index].tokens for index in range(len(prompts))] == alone


def test_a_request_may_leave_when_its_tokens_come(
    golden_models: dict[str, PreTrainedModel], prompts: list[list[int]], alone: list[list[int]]
) -> None:
    """Guards against a client that goes away in mid-stream and takes the batch along."""

    def hang_up(desk: Desk, index: int) -> None:
        if index == 1 and len(desk.tokens[1]) >= 3:
            desk.batch.leave(1)

    desk = Desk(golden_models["mars"], on_tokens=hang_up)
    desk.batch.join({index: Request(prompts[index], 40, 0.7) for index in range(3)})
    desk.run()
    assert desk.done[1].finish == "cancelled" and desk.done[1].tokens == alone[1][: len(desk.done[1].tokens)]
    assert [desk.done[index].tokens for index in (0, 2)] == [alone[0], alone[2]]


def test_a_callback_that_raises_harms_nobody_else(
    golden_models: dict[str, PreTrainedModel], prompts: list[list[int]], alone: list[list[int]]
) -> None:
    """Guards against one broken connection that corrupts or loses everybody's answers."""

    def breaks(desk: Desk, index: int) -> None:
        if index == 0:
            raise ConnectionError("gone")

    desk = Desk(golden_models["mars"], on_tokens=breaks)
    with pytest.raises(ConnectionError):
        desk.batch.join({index: Request(prompts[index], 40, 0.7) for index in range(3)})
    for _ in range(200):
        if not len(desk.batch):
            break
        try:
            desk.batch.step()
        except ConnectionError:
            continue
    assert [desk.done[index].tokens for index in range(3)] == alone[:3]
    assert [desk.tokens[index] for index in (1, 2)] == [
        [*alone[index], *([] if desk.done[index].eos_id is None else [EOS])] for index in (1, 2)
    ]


@pytest.mark.parametrize("fails", ["threshold", "model"])
def test_who_is_refused_is_not_counted(
    fails: str, golden_models: dict[str, PreTrainedModel], prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a batch that never becomes empty because of somebody who never got in."""
    desk = Desk(golden_models["mars"])
    if fails == "threshold":
        with pytest.raises(UserError, match="out of range"):
            desk.batch.join({0: Request(prompts[0], 40, 7.0)})
    else:

        def out_of_memory(*_: object) -> None:
            raise MemoryError

        with monkeypatch.context() as patch:
            patch.setattr("marsbench.decoding.step.forward", out_of_memory)
            with pytest.raises(MemoryError):
                desk.batch.join({0: Request(prompts[0], 40, 0.7)})
    assert len(desk.batch) == 0
    desk.batch.join({0: Request(prompts[0], 40, 0.7)})
    desk.run()
    assert set(desk.done) == {0}


def test_a_whole_number_is_a_threshold_like_another(
    golden_models: dict[str, PreTrainedModel], prompts: list[list[int]]
) -> None:
    """Guards against a neighbour's `threshold=1` that makes 0.9 a 0, which accepts everything."""
    method = build_method("mars", Options(mask_id=MASK))
    found = [
        decode(golden_models["mars"], method, [Request(prompts[0], 40, one), Request(prompts[1], 40, 0.9)],
               eos_id=EOS, pad_id=PAD)
        for one in (1, 1.0)
    ]  # fmt: skip
    assert [one.settled_by for one in found[0]] == [one.settled_by for one in found[1]]


# ---- noise ----------------------------------------------------------------------------------------------------------


def test_a_certain_token_is_drawn_always_however_large_the_vocabulary() -> None:
    """Guards against infinite noise, which draws tokens that the model holds for impossible: a million draws."""
    vocabulary, rows, positions = 200_000, 1, 10
    logits = torch.full((rows, positions, vocabulary), -60.0)
    logits[..., 17] = 0.0
    for first in range(0, 1_000_000 // vocabulary):  # as many noise values as tokens: a million draws of noise
        position = torch.arange(first * positions, (first + 1) * positions).unsqueeze(0)
        drawn = choose(logits, position, torch.ones(rows), torch.tensor([first]))
        assert (drawn == 17).all()


def test_noise_is_finite_and_follows_gumbel() -> None:
    """Guards against a tail that ends where fp32 has no numbers left, and one that is too long."""
    noise = torch.cat([_gumbel(torch.tensor([seed]), torch.tensor([[1, 2]]), 200_000).flatten() for seed in range(50)])
    assert noise.isfinite().all()
    for level in (0.0, 2.0, 5.0, 9.0, 12.0):
        expected = 1 - torch.exp(-torch.exp(torch.tensor(-level, dtype=torch.float64))).item()
        found = (noise > level).double().mean().item()
        spread = (expected * (1 - expected) / len(noise)) ** 0.5
        assert abs(found - expected) < 5 * spread, level
