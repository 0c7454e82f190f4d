"""The engine of the server by itself: who gets in, what is reserved, who is told what."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from marsbench.decoding.engine import decode
from marsbench.decoding.generation import Request
from marsbench.methods import Options, build_method
from marsbench.racing.position_law import PositionLaw
from marsbench.serving.controller import Controller, Group, Seen, Targets, Tuning
from marsbench.serving.engine import BEHIND, Engine, Observer, Room
from marsbench.serving.likelihood import likelihood
from marsbench.serving.messages import Ending, Job, MethodName, Speed, Wishes

EOS, PAD, MASK = 2, 0, 3
METHODS: tuple[MethodName, ...] = ("ar", "mars", "mars-verified")


def engine(model: PreTrainedModel, **room: Any) -> Engine:
    return Engine(model, mask_id=MASK, eos_id=EOS, pad_id=PAD, room=Room(**room), speed=Speed(0.5))


def job(number: int, prompt: list[int], limit: int = 12, method: MethodName = "ar", **more: Any) -> Job:
    wishes = {name: more.pop(name) for name in ("threshold", "min_threshold", "window") if name in more}
    return Job(number, prompt, limit, Wishes(method, **wishes), **more)


def bytes_per_slot(model: PreTrainedModel) -> int:
    """What keys and values of one token take, in fp32."""
    config = model.config
    return (
        2
        * 4
        * config.num_hidden_layers
        * config.num_key_value_heads
        * config.hidden_size
        // (config.num_attention_heads)
    )


class Log:
    """What an engine has reported."""

    def __init__(self, of: Engine) -> None:
        self.engine = of
        self.tokens: dict[int, list[int]] = {}
        self.ended: dict[int, Ending] = {}

    def work(self) -> None:
        report = self.engine.work()
        for number, tokens in report.tokens:
            assert number not in self.ended
            self.tokens.setdefault(number, []).extend(tokens)
        for number, ending in report.ended:
            assert number not in self.ended, "told twice"
            self.ended[number] = ending
        self.state = report.state

    def run(self) -> None:
        for _ in range(2000):
            if self.engine.idle:
                return
            self.work()
        raise AssertionError("the engine does not come to an end")


@settings(max_examples=15, deadline=None)
@given(
    asked=st.lists(
        st.tuples(st.integers(0, 7), st.integers(1, 60), st.sampled_from(METHODS), st.integers(0, 9)),
        min_size=1, max_size=12,
    ),
    rows=st.integers(1, 4),
    rooms=st.integers(1, 4),
    gone=st.dictionaries(st.integers(0, 11), st.integers(0, 15)),
)  # fmt: skip
def test_room_is_never_exceeded_and_everybody_is_told(
    asked: list[tuple[int, int, MethodName, int]], rows: int, rooms: int, gone: dict[int, int],
    golden: dict[str, Any], golden_models: dict[str, PreTrainedModel],
) -> None:  # fmt: skip
    """Guards against rows and memory beyond the limits, and requests that wait for ever or leave something behind."""
    prompts = golden["prompts"]
    slots = rooms * -(-(max(map(len, prompts)) + 60 + BEHIND) // 64) * 64
    log = Log(engine(golden_models["mars"], rows=rows, slots=slots))
    for step in range(10):
        for number, (prompt, limit, method, at) in enumerate(asked):
            if at == step:
                log.engine.submit(job(number, prompts[prompt % len(prompts)], limit, method))
        for number, at in gone.items():
            if at == step:
                log.engine.cancel(number)
        log.work()
        assert log.state.running <= rows and log.state.slots <= slots
        # The cache gives memory back when half of it is of no use.
        assert log.engine._batch._cache.bytes() <= 2 * slots * bytes_per_slot(golden_models["mars"])
    log.run()
    assert sorted(log.ended) == list(range(len(asked)))
    assert log.engine.work().state.running == log.engine.work().state.slots == 0
    assert log.engine._batch._cache.bytes() == 0


def test_a_round_is_for_newcomers_or_for_those_in_flight_in_turn(
    golden: dict[str, Any], golden_models: dict[str, PreTrainedModel]
) -> None:
    """Guards against newcomers without end who keep those in flight from their next token."""
    log = Log(engine(golden_models["mars"], rows=16))
    log.engine.submit(job(0, golden["prompts"][0], 30, ignore_eos=True))
    for number in range(1, 12):
        log.engine.submit(job(number, golden["prompts"][0], 30, ignore_eos=True))
        log.work()
    assert len(log.tokens[0]) >= 6 and len(log.tokens) >= 5


@pytest.mark.parametrize("method", METHODS)
def test_tokens_are_those_of_the_method(
    method: MethodName, golden: dict[str, Any], golden_models: dict[str, PreTrainedModel]
) -> None:
    """Guards against a server that decodes otherwise than `marsbench decode`, and an ending that tells other counts."""
    log, tau = Log(engine(golden_models["mars"])), None if method == "ar" else 0.3
    for number, prompt in enumerate(golden["prompts"]):
        log.engine.submit(job(number, prompt, 24, method, threshold=tau))
    log.run()
    chosen = build_method(method, Options(mask_id=MASK, layout="linear"))
    every = decode(
        golden_models["mars"], chosen, [Request(prompt, 24, tau) for prompt in golden["prompts"]], eos_id=EOS,
        pad_id=PAD,
    )  # fmt: skip
    for number, expected in enumerate(every):
        ending = log.ended[number]
        assert log.tokens[number] == expected.tokens
        assert (ending.emitted, ending.forwards, ending.finish) == (
            expected.emitted,
            expected.forwards,
            expected.finish,
        )
        assert ending.thresholds == (None if tau is None else (tau, tau))
        assert ending.windows == ((1, 1) if method == "ar" else (4, 4))


def test_the_knob_is_for_those_who_fixed_none(
    golden: dict[str, Any], golden_models: dict[str, PreTrainedModel]
) -> None:
    """Guards against a knob that turns those who fixed theirs, or that those in flight do not feel at once."""
    log = Log(engine(golden_models["mars"]))
    prompt = golden["prompts"][0]
    log.engine.submit(job(0, prompt, 40, "mars", ignore_eos=True))
    log.engine.submit(job(1, prompt, 40, "mars", ignore_eos=True, threshold=0.99))
    for _ in range(4):
        log.work()
    before = {number: len(tokens) for number, tokens in log.tokens.items()}
    log.engine.speed = Speed(0.0)
    log.work()
    assert len(log.tokens[0]) - before[0] == 4
    log.run()
    assert log.ended[0].thresholds == (0.0, 0.5) and log.ended[1].thresholds == (0.99, 0.99)


def test_a_request_that_cannot_be_run_harms_nobody(
    golden: dict[str, Any], golden_models: dict[str, PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against one request's lack of memory that ends the engine or leaves rows behind."""
    log = Log(engine(golden_models["mars"]))

    def out_of_memory(*_: object) -> None:
        raise RuntimeError("out of memory: tried to allocate\nmore")

    log.engine.submit(job(0, golden["prompts"][0]))
    with monkeypatch.context() as patch:
        patch.setattr("marsbench.decoding.engine.forward", out_of_memory)
        log.work()
    log.engine.submit(job(1, golden["prompts"][1]))
    log.engine.submit(job(2, [10**6]))
    log.run()
    assert "out of memory" in log.ended[0].failure and "vocabulary" in log.ended[2].failure
    assert log.ended[1].failure == "" and log.tokens[1]


@pytest.mark.parametrize("most", [3, 8192])
def test_likelihoods_are_those_of_transformers(
    most: int, golden: dict[str, Any], golden_models: dict[str, PreTrainedModel]
) -> None:
    """Guards against log-probabilities that are one token off, or that change where a long prompt is cut."""
    tokens = golden["prompts"][0] + golden["prompts"][1]
    found = likelihood(golden_models["mars"], tokens, 2, most)
    with torch.inference_mode():
        sure = golden_models["mars"](torch.tensor([tokens])).logits[0, :-1].float().log_softmax(-1)
    expected = sure.gather(1, torch.tensor(tokens[1:]).unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(torch.tensor(found.chosen), expected, atol=1e-4, rtol=1e-4)
    assert [one[0][0] for one in found.best] == sure.argmax(-1).tolist()
    assert {len(one) for one in found.best} == {2} and len(found.best) == len(tokens) - 1


def test_an_eos_has_its_likelihood_too(golden: dict[str, Any], golden_models: dict[str, PreTrainedModel]) -> None:
    """Guards against a likelihood that misses its last token: clients cut the generated one off, an EOS or not."""
    (first,) = decode(golden_models["mars"], build_method("ar", Options()), [Request(golden["prompts"][0], 1)],
                      eos_id=-1, pad_id=PAD)  # fmt: skip
    log = Log(Engine(
        golden_models["mars"], mask_id=MASK, eos_id=first.tokens[0], pad_id=PAD, room=Room(), speed=Speed()
    ))  # fmt: skip
    log.engine.submit(job(0, golden["prompts"][0], 1, likelihood=0))
    log.run()
    found = log.ended[0].likelihood
    assert log.ended[0].finish == "eos" and found is not None
    assert found.tokens == [*golden["prompts"][0], first.tokens[0]]


def test_a_knob_turned_and_turned_back_reaches_who_joined_between(
    golden: dict[str, Any], golden_models: dict[str, PreTrainedModel]
) -> None:
    """Guards against a newcomer who keeps a tau that counted only while its prompt was read."""
    log = Log(engine(golden_models["mars"], rows=4))
    usual = log.engine.speed
    for number, speed in enumerate((usual, Speed(0.9))):
        log.engine.submit(job(number, golden["prompts"][number], 40, "mars", threshold=None, ignore_eos=True))
        log.engine.speed = speed
        log.work()  # reads the prompt
        log.engine.speed = usual
        log.work()  # a step
    log.run()
    assert log.ended[1].thresholds == (0.5, 0.9)  # it was let in at .9, and is turned from the first step on
    counted = Log(engine(golden_models["mars"], rows=4))
    counted.engine.submit(job(1, golden["prompts"][1], 40, "mars", ignore_eos=True, threshold=0.5))
    counted.run()
    assert log.ended[1].forwards <= counted.ended[1].forwards + 1


def adapting(model: PreTrainedModel, law: PositionLaw) -> Engine:
    """An engine whose controller lowers tau at every chance."""
    controller = Controller(law, Targets(per_token_s=1e-9))
    controller.tuning = Tuning(every=2, up_s=0.0, trial_share=1.0)
    return Engine(
        model, mask_id=MASK, eos_id=EOS, pad_id=PAD, room=Room(rows=8), speed=Speed(0.9), controller=controller
    )


def test_verified_answers_are_those_of_ar_whatever_the_controller_does(
    golden: dict[str, Any], golden_models: dict[str, PreTrainedModel]
) -> None:
    """Guards against windows and pruning that change a lossless answer, and tau lowered for who has not allowed it."""
    prompts = golden["prompts"] * 2
    for law in (PositionLaw([1, 256], [0.01, 0.011]), PositionLaw([1, 256], [0.001, 0.256])):
        log = Log(adapting(golden_models["mars"], law))
        for number, prompt in enumerate(prompts):
            log.engine.submit(job(number, prompt, 24, METHODS[number % 3], threshold=None))
            log.work()
        log.run()
        ar = build_method("ar", Options())
        every = decode(golden_models["mars"], ar, [Request(prompt, 24) for prompt in prompts], eos_id=EOS, pad_id=PAD)
        for number, expected in enumerate(every):
            if METHODS[number % 3] == "mars":
                assert log.ended[number].thresholds == (0.9, 0.9) and not log.ended[number].lossless
            else:
                assert log.tokens[number] == expected.tokens and log.ended[number].lossless


def test_nobody_waits_while_nobody_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a tau that is lowered because an hour without requests counts as an hour for a token."""
    clock = 0.0
    monkeypatch.setattr("marsbench.serving.engine.time.perf_counter", lambda: clock)
    controller, seen = Controller(PositionLaw([1, 256], [0.001, 0.002]), Targets(per_token_s=0.01)), list[Seen]()
    monkeypatch.setattr(controller, "decide", seen.append)
    observer = Observer(controller)
    for answer in range(3):
        clock += 3600
        observer.joined(alone=True)
        for _ in range(20):
            if observer.due(frozenset({Group("mars", 0.9, None, 4 + answer, 1)})):
                observer.decide(0, 0.0)
            clock += 0.004
            observer.note("ar", 1, 2)
            observer.stepped(clock - 0.004, 5, 2)
    assert len(seen) == 9 and max(one.per_token_s for one in seen) == pytest.approx(0.002)
    assert seen[-1].steps == [(True, pytest.approx(0.004), 5)]


def test_who_allows_it_is_lowered_and_told(golden: dict[str, Any], golden_models: dict[str, PreTrainedModel]) -> None:
    """Guards against a usage that calls an answer lossless which is not, or tells pruning for tau."""
    log = Log(adapting(golden_models["mars"], PositionLaw([1, 256], [0.01, 0.011])))
    prompt = golden["prompts"][0]
    log.engine.submit(job(0, prompt, 60, "mars-verified", min_threshold=0.6, ignore_eos=True))
    log.engine.submit(job(1, prompt, 60, "mars", min_threshold=0.4, ignore_eos=True))
    log.run()
    verified, mars = log.ended[0], log.ended[1]
    assert not verified.lossless and verified.thresholds is not None and verified.thresholds[0] >= 0.6
    assert mars.thresholds is not None and 0.4 <= mars.thresholds[0] < 0.9 == mars.thresholds[1]
