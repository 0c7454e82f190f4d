"""Rows that decode each in its own way: nobody's tokens depend on the neighbours' methods, thresholds and windows."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from marsbench.decoding.engine import Batch, decode
from marsbench.decoding.generation import Generation, Request
from marsbench.errors import UserError
from marsbench.methods import Options, build_method
from marsbench.methods.mixed import Mixed

EOS, PAD, MASK = 2, 0, 3
LIMIT = 24
WAYS = [("ar", None, 1), *[(name, tau, window) for name in ("mars", "mars-verified")
                           for tau in (0.0, 0.3, 0.7) for window in (2, 4, 6)]]  # fmt: skip
Way = tuple[str, "float | None", int]


def request(prompt: list[int], way: Way, **more: Any) -> Request:
    """A request that decodes in such a way among others."""
    name, tau, window = way
    return Request(prompt, LIMIT, tau, window=window, verified=name == "mars-verified", **more)


@pytest.fixture(scope="module")
def alone(golden: dict[str, Any], golden_models: dict[str, PreTrainedModel]) -> dict[tuple[int, Way], Generation]:
    """Every prompt decoded in every way by the methods themselves."""
    found = {}
    for way in WAYS:
        name, tau, window = way
        method = build_method(name, Options(mask_id=MASK, window=window, layout="linear"))
        requests = [Request(prompt, LIMIT, tau) for prompt in golden["prompts"]]
        every = decode(golden_models["mars"], method, requests, eos_id=EOS, pad_id=PAD)
        found |= {(number, way): generation for number, generation in enumerate(every)}
    return found


@settings(max_examples=15, deadline=None)
@given(
    chosen=st.lists(st.tuples(st.integers(0, 7), st.sampled_from(WAYS), st.integers(0, 12)), min_size=1, max_size=12)
)
def test_a_row_decodes_as_if_it_were_alone(
    chosen: list[tuple[int, Way, int]], golden: dict[str, Any], golden_models: dict[str, PreTrainedModel],
    alone: dict[tuple[int, Way], Generation],
) -> None:  # fmt: skip
    """Guards against rows that get masks, drafts or bars of their neighbours, whoever joins when."""
    done: dict[int, Generation] = {}
    batch = Batch(golden_models["mars"], Mixed(MASK), eos_id=EOS, pad_id=PAD, on_finished=done.__setitem__)
    prompts = golden["prompts"]
    for step in range(200):
        batch.join({
            index: request(prompts[number % len(prompts)], way)
            for index, (number, way, joins) in enumerate(chosen) if joins == step
        })  # fmt: skip
        batch.step()
        if len(done) == len(chosen):
            break
    for index, (number, way, _) in enumerate(chosen):
        assert done[index] == alone[number % len(prompts), way]


def test_a_window_turns_in_mid_stream(
    golden: dict[str, Any], golden_models: dict[str, PreTrainedModel], alone: dict[tuple[int, Way], Generation]
) -> None:
    """Guards against a knob that loses drafts or tokens: verified rows give the tokens of `ar`, whatever is turned."""
    done: dict[int, Generation] = {}
    batch = Batch(golden_models["mars"], Mixed(MASK), eos_id=EOS, pad_id=PAD, on_finished=done.__setitem__)
    batch.join({number: request(prompt, ("mars-verified", 0.0, 4)) for number, prompt in enumerate(golden["prompts"])})
    for step in range(100):
        batch.turn({number: (0.0, 1 + (step + number) % 6, True) for number in range(len(golden["prompts"]))})
        batch.step()
    assert [done[number].tokens for number in sorted(done)] == [
        alone[number, ("ar", None, 1)].tokens for number in range(len(golden["prompts"]))
    ]
    assert max(max(one.accepted) for one in done.values()) > 1


def test_a_row_may_leave_checking_out_and_take_it_up_again(
    golden: dict[str, Any], golden_models: dict[str, PreTrainedModel], alone: dict[tuple[int, Way], Generation]
) -> None:
    """Guards against drafts that count unchecked when a row is turned, and against neighbours that are turned along."""
    prompts, done = golden["prompts"], dict[int, Generation]()
    batch = Batch(golden_models["mars"], Mixed(MASK), eos_id=EOS, pad_id=PAD, on_finished=done.__setitem__)
    batch.join({number: request(prompt, ("mars-verified", 0.0, 4)) for number, prompt in enumerate(prompts)})
    for step in range(60):
        batch.turn({number: (1.0, 4, step % 3 == 0) for number in range(0, len(prompts), 2)})
        batch.step()
    for number in range(len(prompts)):  # at tau 1 nothing unchecked passes, so it is `ar` all the same
        assert done[number].tokens == alone[number, ("ar", None, 1)].tokens


def test_who_ignores_eos_runs_to_the_limit(golden: dict[str, Any], golden_models: dict[str, PreTrainedModel]) -> None:
    """Guards against an EOS that ends a row which asked to go on, and against neighbours that go on with it."""
    prompts = golden["prompts"]
    requests = [request(prompt, ("ar", None, 1), ignore_eos=number % 2 == 0) for number, prompt in enumerate(prompts)]
    found = decode(golden_models["mars"], Mixed(MASK), requests, eos_id=[EOS, *range(5, 20)], pad_id=PAD)
    assert {(one.finish, one.emitted) for one in found[::2]} == {("length", LIMIT)}
    assert "eos" in {one.finish for one in found[1::2]}


def test_a_window_of_nothing_is_refused(golden_models: dict[str, PreTrainedModel]) -> None:
    """Guards against a window that no token fits into."""
    with pytest.raises(UserError, match="at least 1 token"):
        decode(golden_models["mars"], Mixed(MASK), [Request([5], window=0)], eos_id=EOS, pad_id=PAD)
