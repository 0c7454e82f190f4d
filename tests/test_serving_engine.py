"""The engine of the server by itself: which requests get in, what is reserved, what is reported."""

import multiprocessing
import types
from collections import Counter
from dataclasses import replace
from itertools import accumulate, chain
from operator import mul
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_graphs import taped
from tools import packing
from transformers import PreTrainedModel as Model

from marsbench.compiled import graphs
from marsbench.compiled.fixed import Steps
from marsbench.decoding.engine import Batch, decode
from marsbench.decoding.generation import Request
from marsbench.errors import UserError
from marsbench.methods import Options, build_method
from marsbench.methods.mixed import Mixed
from marsbench.racing.position_law import PositionLaw, in_words, windows_by_rows
from marsbench.serving import process
from marsbench.serving.engine import BEHIND, Engine, bytes_per_slot
from marsbench.serving.likelihood import likelihood
from marsbench.serving.messages import Ending, Job, MethodName, Settings
from marsbench.serving.process import slots_within, usual_dtype

EOS, PAD, MASK = 2, 0, 3
Prompts = list[list[int]]
METHODS: tuple[MethodName, ...] = ("ar", "mars", "mars-verified")
OUT_OF_MEMORY = Mock(side_effect=RuntimeError("out of memory: tried to allocate\nmore"))


@pytest.fixture(scope="module")
def prompts(golden: dict[str, Any]) -> Prompts:
    return list(golden["prompts"])


@pytest.fixture(scope="module")
def model(golden_models: dict[str, Model]) -> Model:
    return golden_models["mars"]


def engine(model: Model, eos_id: int = EOS, windows: tuple[int, ...] = (), **settings: Any) -> Engine:
    own = Settings("", threshold=0.5, **settings)
    return Engine(model, own, mask_id=MASK, eos_id=eos_id, pad_id=PAD, windows=windows)


def job(number: int, prompt: list[int], limit: int = 12, method: MethodName = "ar", **more: Any) -> Job:
    return Job(prompt, limit, id=number, method=method, **more)


class Log:
    """The reports of an engine, collected."""

    def __init__(self, of: Engine) -> None:
        self.engine = of
        self.tokens: dict[int, list[int]] = {}
        self.ended: dict[int, Ending] = {}
        self.started: list[int] = []
        self.accepted: Counter[int] = Counter()
        self.counted: Counter[str] = Counter()

    def work(self, times: int = 1) -> None:
        for _ in range(times):
            self.engine.work()
            report = self.engine.report()
            self.started += report.started
            for number, pieces in report.tokens.items():
                assert number not in self.ended
                self.tokens.setdefault(number, []).extend(chain.from_iterable(pieces))
            for number, ending in report.ended:
                assert number not in self.ended, "ended twice"
                self.ended[number] = ending
            self.state = report.state
            self.accepted += report.accepted
            self.counted += report.counted

    def run(self) -> None:
        for _ in range(2000):
            if self.engine.idle:
                return
            self.work()
        raise AssertionError("the engine does not come to an end")


def answered(of: Engine, *jobs: Job) -> Log:
    """The log of jobs that come together."""
    log = Log(of)
    for each in jobs:
        of.submit(each)
    log.run()
    return log


@settings(max_examples=15, deadline=None)
@given(
    jobs=st.lists(
        st.tuples(st.integers(0, 7), st.integers(1, 60), st.sampled_from(METHODS), st.integers(0, 9)),
        min_size=1, max_size=12,
    ),
    rows=st.integers(1, 4),
    rooms=st.integers(1, 4),
    gone=st.dictionaries(st.integers(0, 11), st.integers(0, 15)),
)  # fmt: skip
def test_room_is_never_exceeded_and_everybody_is_told(
    jobs: list[tuple[int, int, MethodName, int]], rows: int, rooms: int, gone: dict[int, int],
    prompts: Prompts, model: Model,
) -> None:  # fmt: skip
    """Guards against rows and memory beyond the limits, and requests that wait for ever or leave something behind."""
    slots = rooms * -(-(max(map(len, prompts)) + 60 + BEHIND) // 64) * 64
    log = Log(engine(model, max_rows=rows, kv_slots=slots))
    for step in range(10):
        for number, (prompt, limit, method, at) in enumerate(jobs):
            if at == step:
                log.engine.submit(job(number, prompts[prompt % len(prompts)], limit, method))
        for number, at in gone.items():
            if at == step:
                log.engine.cancel(number)
        log.work()
        assert log.state.running <= rows and log.state.slots <= slots
        # The cache frees memory when half of it is unused.
        assert log.engine._batch._running.bytes() <= 2 * slots * bytes_per_slot(model)
    log.run()
    assert sorted(log.ended) == list(range(len(jobs)))
    log.work()
    assert log.state.running == log.state.slots == 0
    assert log.engine._batch._running.bytes() == 0


def test_a_round_is_for_newcomers_or_for_those_in_flight_in_turn(prompts: Prompts, model: Model) -> None:
    """Guards against new requests without end that keep those in flight from their next token."""
    log = Log(engine(model, max_rows=16))
    log.engine.submit(job(0, prompts[0], 30, ignore_eos=True))
    for number in range(1, 12):
        log.engine.submit(job(number, prompts[0], 30, ignore_eos=True))
        log.work()
    assert len(log.tokens[0]) >= 6 and len(log.tokens) >= 5


@pytest.mark.parametrize("method", METHODS)
def test_tokens_are_those_of_the_method(method: MethodName, prompts: Prompts, model: Model) -> None:
    """Guards against a server that decodes other tokens than `marsbench decode`, and an ending with other counts."""
    tau = None if method == "ar" else 0.3
    jobs = [job(number, prompt, 24, method, threshold=tau) for number, prompt in enumerate(prompts)]
    log = answered(engine(model), *jobs)
    chosen = build_method(method, Options(mask_id=MASK, layout="linear"))
    every = decode(model, chosen, [Request(prompt, 24, tau) for prompt in prompts], eos_id=EOS, pad_id=PAD)
    further = list[int]()
    for number, alone in enumerate(every):
        ending = log.ended[number]
        assert log.tokens[number] == alone.tokens
        assert (ending.emitted, ending.forwards, ending.finish) == (alone.emitted, alone.forwards, alone.finish)
        assert ending.thresholds == (None if tau is None else (tau, tau))
        assert ending.windows == ((1, 1) if method == "ar" else (4, 4))
        drafts = {"ar": [], "mars": [3] * (alone.forwards - 1), "mars-verified": alone.drafted[1:]}[method]
        of_each = [(drafted, count - 1) for drafted, count in zip(drafts, alone.accepted[1:], strict=False) if drafted]
        assert ending.drafted == sum(drafted for drafted, _ in of_each)
        assert ending.accepted == Counter(accepted for _, accepted in of_each)
        further += [accepted for _, accepted in of_each]
    assert log.counted["vllm:generation_tokens"] == sum(alone.emitted for alone in every), "an EOS is one, too"
    assert all(log.accepted[place] == sum(count > place for count in further) for place in range(4))


def test_the_knob_is_for_those_who_fixed_none(prompts: Prompts, model: Model) -> None:
    """Guards against a knob that changes a fixed tau, acts late, or misses requests that join between two turns."""
    log = Log(engine(model))
    prompt = prompts[0]
    log.engine.submit(job(0, prompt, 40, "mars", ignore_eos=True))
    log.engine.submit(job(1, prompt, 40, "mars", ignore_eos=True, threshold=0.99))
    log.work(4)
    before = {number: len(tokens) for number, tokens in log.tokens.items()}
    log.engine.settings = replace(log.engine.settings, threshold=0.0)
    log.work()
    assert len(log.tokens[0]) - before[0] == 4
    log.run()
    assert log.ended[0].thresholds == (0.0, 0.5) and log.ended[1].thresholds == (0.99, 0.99)
    log = Log(engine(model, max_rows=4))
    usual = log.engine.settings
    for number, settings_ in enumerate((usual, replace(usual, threshold=0.9))):
        log.engine.submit(job(number, prompts[number], 40, "mars", threshold=None, ignore_eos=True))
        log.engine.settings = settings_
        log.work()  # reads the prompt
        log.engine.settings = usual
        log.work()  # a step
    log.run()
    assert log.ended[1].thresholds == (0.5, 0.9)  # it joined at .9, and has .5 from its first step on
    counted = answered(engine(model, max_rows=4), job(1, prompts[1], 40, "mars", ignore_eos=True, threshold=0.5))
    assert log.ended[1].forwards <= counted.ended[1].forwards + 1


def test_lack_of_memory_costs_no_other_answer(prompts: Prompts, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a lack of memory that ends the engine, changes other answers, or leaves rows behind."""
    log = Log(engine(model))
    log.engine.submit(job(0, prompts[0]))
    with monkeypatch.context() as patch:
        patch.setattr("marsbench.decoding.step.forward", OUT_OF_MEMORY)
        log.work()
    log.engine.submit(job(1, prompts[1]))
    log.engine.submit(job(2, [10**6]))
    log.run()
    assert "out of memory" in log.ended[0].failure and "vocabulary" in log.ended[2].failure
    assert log.ended[1].failure == "" and log.tokens[1]
    log = Log(engine(model))
    for number, limit in enumerate((20, 200, 20)):
        method: MethodName = "mars-verified" if number == 1 else "mars"
        log.engine.submit(job(number, prompts[number], limit, method, ignore_eos=True))
    log.work(4)
    with monkeypatch.context() as patch:
        patch.setattr("marsbench.decoding.step.forward", OUT_OF_MEMORY)
        log.work()
    log.run()
    assert "out of memory" in log.ended[1].failure and not log.ended[0].failure and not log.ended[2].failure
    for number in (0, 2):
        alone = answered(engine(model), job(number, prompts[number], 20, "mars", ignore_eos=True))
        assert alone.tokens[number] == log.tokens[number]
    log = Log(engine(model))
    for number in range(2):
        log.engine.submit(job(number, prompts[number], ignore_eos=True))
    log.work()
    with monkeypatch.context() as patch:
        patch.setattr("marsbench.decoding.step.forward", OUT_OF_MEMORY)
        patch.setattr("marsbench.decoding.engine.Batch.leave", OUT_OF_MEMORY)
        log.work()
    assert all("out of memory" in log.ended[number].failure for number in range(2))
    log.engine.submit(job(2, prompts[2]))
    log.run()
    assert log.tokens[2] and not log.ended[2].failure
    log.engine.submit(job(3, prompts[2]))
    monkeypatch.setattr("marsbench.decoding.step.forward", Mock(side_effect=torch.AcceleratorError("broken")))
    with pytest.raises(torch.AcceleratorError):  # no request can be answered any more: the process is to end
        log.work()


def test_memory_and_types_are_chosen_by_the_machine() -> None:
    """Guards against more rows than memory holds, a cache that holds no request, and 30 GB where 15 are enough."""
    assert slots_within(Settings("", max_rows=4), 100, 10_000) == (400, "")
    slots, warning = slots_within(Settings("", max_rows=4), 100, 500)
    assert slots == 200 and "room for 200 slots" in warning
    assert slots_within(Settings("", max_rows=4), 100, 10)[0] == 100
    assert slots_within(Settings("", kv_slots=150), 100, 10) == (150, "")
    with pytest.raises(UserError, match="cannot hold one request"):
        slots_within(Settings("", kv_slots=99), 100, 10_000)
    assert Settings("").dtype is None
    assert usual_dtype("cuda") == "bfloat16" and usual_dtype("cpu") == "float32"


@pytest.mark.parametrize("recorded", [False, True])
def test_steps_of_fixed_shape_serve_the_same_answers(
    recorded: bool, prompts: Prompts, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a GPU that waits for the host, and graphs with other answers as requests join, leave and turn."""
    monkeypatch.setattr(graphs, "_compiled", lambda step, _: step)
    monkeypatch.setattr(graphs, "cpp_compiler", lambda: "g++")
    if recorded:
        monkeypatch.setattr(graphs, "records_on", lambda device: True)
        monkeypatch.setattr(graphs, "recorded", taped)
    outcomes = []
    for compiled in (False, True):
        with packing(False):
            log = Log(engine(model, max_rows=5, block_size=4, compile=compiled))
            for number, prompt in enumerate(prompts[:7]):
                method, window = METHODS[number % 3], (2, 3, 4, 4 if not compiled else 9)[number % 4]
                more = {} if method == "ar" else {"widest": window}
                if number % 2:
                    more["threshold"] = 0.3
                log.engine.submit(job(number, prompt, 10 + 3 * number, method, **more))
            log.run()
        ended = {number: (ending.finish, ending.emitted, ending.windows) for number, ending in log.ended.items()}
        outcomes.append((log.tokens, ended))
    assert outcomes[0] == outcomes[1]
    assert len(log.engine._batch._running._steps) > 0, "there are graphs"


def test_what_a_server_needs_is_recorded_before_anybody_waits(
    prompts: Prompts, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a GPU that records graphs only when told to, and first requests that wait for a recording."""
    monkeypatch.setattr(graphs, "records_on", lambda device: True)
    monkeypatch.setattr(graphs, "recorded", taped)
    with packing(False):
        log = Log(engine(model, max_rows=5, block_size=4, max_new_tokens=100))
        log.engine.capture_ahead("mars")
        shapes = log.engine._shapes
        assert shapes is not None
        stands = [stand.shape for stand in shapes._recorded]
        assert sorted(shape.rows for shape in stands) == [1, 2, 4, 8] and {shape.length for shape in stands} == {128}
        for number, prompt in enumerate(prompts[:5]):
            log.engine.submit(job(number, prompt, 70, "mars"))
        log.run()
        assert len(log.ended) == 5 and len(shapes) == len(stands), "nothing is recorded while requests wait"
    assert engine(model, compile=False)._shapes is None


def test_a_knob_turns_rows_of_fixed_shape(prompts: Prompts, model: Model) -> None:
    """Guards against a knob that does not act on recorded steps."""
    counts = []
    for turned in (0.0, 1.0):
        steps = []
        batch = Batch(
            model, Mixed(MASK, widest=4), eos_id=-1, pad_id=PAD, on_finished=lambda *_: None,
            on_tokens=lambda index, tokens, steps=steps: steps.append(len(tokens)), shapes=Steps(),
        )  # fmt: skip
        batch.join({0: Request(prompts[0], 12, 1.0, window=4)})
        batch.turn({0: (turned, 4, False)})
        while len(batch):
            batch.step()
        counts.append(steps[1:])  # after the prompt
    assert counts == [[4, 4, 3], [1] * 11]


def test_verified_answers_are_those_of_ar_whatever_windows_pay(prompts: Prompts, model: Model) -> None:
    """Guards against windows by rows that change a lossless answer, or one of `mars` that permits no change."""
    prompts = [*prompts, *prompts]
    log = Log(engine(model, windows=(4, 3, 2, 1), max_rows=6))
    for number, prompt in enumerate(prompts):
        log.engine.submit(job(number, prompt, 24, METHODS[number % 3], threshold=None))
        log.work()
    log.run()
    plain: list[MethodName] = ["mars" if method == "mars" else "ar" for method in METHODS]
    jobs = [job(number, prompt, 24, plain[number % 3], threshold=None) for number, prompt in enumerate(prompts)]
    alone = answered(engine(model, max_rows=6), *jobs)
    assert log.tokens == alone.tokens
    windows = [log.ended[number].windows for number in range(len(prompts)) if METHODS[number % 3] == "mars-verified"]
    assert any(low == 1 for low, _ in windows) and any(high > 1 for _, high in windows), "no window was turned"
    assert all(log.ended[number].lossless == (METHODS[number % 3] != "mars") for number in range(len(prompts)))


def test_tau_is_lowered_while_requests_wait_where_that_is_permitted(prompts: Prompts, model: Model) -> None:
    """Guards against a tau lowered without permission, below its bound or for ever, and a usage that hides it."""
    log, prompt = Log(engine(model, windows=(4,), max_rows=4)), prompts[0]
    cases: list[tuple[MethodName, float | None, float | None]] = [
        ("mars", 0.9, 0.4), ("mars-verified", None, 0.6), ("mars", 0.9, None), ("mars-verified", None, None),
    ]  # fmt: skip
    for number, (method, tau, least) in enumerate(cases):
        log.engine.submit(job(number, prompt, 40, method, threshold=tau, min_threshold=least, ignore_eos=True))
    log.work(3)
    in_flight = [running.ending.thresholds for running in log.engine._running.values()]
    assert in_flight == [(tau, tau) for tau in (0.9, 0.5) * 2]
    log.engine.submit(job(4, prompt, 1))
    log.run()
    assert [log.ended[number].thresholds for number in range(4)] == [(0.4, 0.9), (0.6, 0.6), (0.9, 0.9), (0.5, 0.5)]
    assert [log.ended[number].lossless for number in range(4)] == [False, False, False, True]


def test_a_long_prompt_comes_in_pieces_between_the_steps_of_others(
    prompts: Prompts, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a prompt that stalls all others, is read wrongly in pieces, or cannot be cancelled."""
    monkeypatch.setattr("marsbench.serving.engine._PIECE", 16)
    long = [token for prompt in prompts for token in prompt][:60]
    alone = answered(engine(model), job(0, long))
    log = Log(engine(model))
    log.engine.submit(job(1, prompts[0], 40, ignore_eos=True))
    log.work(2)
    for number in (2, 3):
        log.engine.submit(job(number, long))
    before = len(log.tokens[1])
    while 2 not in log.tokens:
        log.work()
    assert len(log.tokens[1]) - before == 3, "a step after each piece but the last"
    log.work(2)
    assert log.state.running == 3 and 3 not in log.tokens, "in its pieces"
    log.engine.cancel(3)
    log.run()
    assert log.tokens[2] == alone.tokens[0] and log.ended[3].finish == "cancelled" and 3 not in log.tokens
    assert len(log.tokens[1]) == 40 and log.state.slots == 0


def test_who_only_reads_on_is_told_of_several_forwards_at_once(prompts: Prompts, model: Model) -> None:
    """Guards against a message for every step, and tokens that are lost or reordered where there is none."""
    own = engine(model)
    heard: dict[int, list[int]] = {1: [], 2: []}

    def hear(whole: bool) -> set[int]:
        report = own.report(whole=whole)
        for number, pieces in report.tokens.items():
            heard[number] += chain.from_iterable(pieces)
        return set(report.tokens)

    own.submit(job(1, prompts[0], 9, ignore_eos=True))
    own.work()
    assert own.is_urgent and hear(False) == {1}
    own.work()
    assert not own.is_urgent and hear(False) == set()
    own.submit(job(2, prompts[1], 2, ignore_eos=True))
    own.work()
    assert own.is_urgent and hear(False) == {2}
    own.work()
    assert own.is_urgent and hear(False) == {2}, "it has ended"
    assert hear(True) == {1} and [len(tokens) for tokens in heard.values()] == [3, 2]
    alone = answered(engine(model), job(1, prompts[0], 3, ignore_eos=True))
    assert alone.tokens[1] == heard[1]


def test_messages_are_few_where_steps_are_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a message for every step, and a start or an end that is reported late."""

    class Fast:
        """An engine of 20 steps, a millisecond each."""

        def __init__(self) -> None:
            self.steps, self.reports = 0, list[tuple[int, bool]]()

        @property
        def is_urgent(self) -> bool:
            return self.steps in (9, 12)

        @property
        def idle(self) -> bool:
            if self.steps == 20:
                other.close()  # no client is left
            return self.steps == 20

        def work(self) -> None:
            self.steps += 1

        def report(self, *, whole: bool) -> None:
            self.reports.append((self.steps, whole))

    own, other = multiprocessing.Pipe()
    fast = Fast()
    monkeypatch.setattr(process, "time", types.SimpleNamespace(perf_counter=lambda: 100 + fast.steps / 1000))
    with pytest.raises((EOFError, ConnectionResetError)):
        process._serve(own, cast(Engine, fast))
    assert fast.reports == [(1, True), (7, True), (9, False), (12, True), (18, True)]


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.floats(0.001, 0.01), min_size=3, max_size=3),
    st.lists(st.floats(0, 1), min_size=1, max_size=4),
    st.integers(1, 16),
)
def test_no_window_is_slower_than_ar_by_what_the_law_says(steps: list[float], right: list[float], rows: int) -> None:
    """Guards against drafts that cost more than they bring, and windows that grow with the load."""
    law = PositionLaw([1, 16, 128], list(accumulate(steps)))
    windows = windows_by_rows(law, rows, 8, right)
    assert len(windows) == rows and list(windows) == sorted(windows, reverse=True) and windows[0] <= 8
    for count, window in enumerate(windows, 1):
        if window > 1:
            tokens = sum(accumulate([*right, *[right[-1]] * 8][: window - 1], mul, initial=1.0))
            assert tokens * law.seconds_at(count) >= law.seconds_at(count * (tokens + window - 1))


def test_the_table_of_windows_is_what_the_machine_makes_of_it() -> None:
    """Guards against the same table where positions are free and where every position costs."""
    free, dear = PositionLaw([1, 512], [0.01, 0.01]), PositionLaw([1, 512], [0.001, 0.512])
    bent = PositionLaw([1, 12, 64], [0.01, 0.01, 0.1])
    assert windows_by_rows(free, 4, 8, [0.7]) == (8,) * 4 and windows_by_rows(dear, 4, 8, [0.7]) == (1,) * 4
    assert windows_by_rows(free, 4, 8, [0.0]) == (1,) * 4
    table = windows_by_rows(bent, 12, 8, [0.7])
    assert table[0] > table[3] and table[-1] == 1
    assert in_words((4, 4, 2, 1)) == "up to 2 rows 4 tokens, up to 3 rows 2 tokens, above ar"
    assert in_words((1, 1)) == "ar at any number of rows" and in_words((3,)) == "up to 1 rows 3 tokens, above ar"


# ---- log-probabilities ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("together", [3, 8192])
def test_likelihoods_are_those_of_transformers(
    together: int, prompts: Prompts, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against log-probabilities that are one token off, or that change where a long prompt is cut."""
    prompt, tokens = prompts[:2]
    monkeypatch.setattr("marsbench.serving.likelihood._TOGETHER", together)
    scored = likelihood(model, prompt, tokens, 2)
    with torch.inference_mode():
        sure = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    expected = sure.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(torch.tensor(scored.chosen), expected, atol=1e-4, rtol=1e-4)
    assert [[*place] for place in scored.best] == sure.topk(2).indices.tolist()


def test_an_answer_without_its_log_probabilities_ends_alone(
    prompts: Prompts, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against other answers lost for lack of memory, and log-probabilities that were not asked for."""
    log = answered(engine(model), job(0, prompts[0], best=1, method="mars", threshold=0.1), job(1, prompts[0]))
    scored = log.ended[0].likelihood
    assert scored is not None and len(scored.chosen) == len(log.tokens[0]) and log.ended[1].likelihood is None
    monkeypatch.setattr("marsbench.serving.likelihood.forward", OUT_OF_MEMORY)
    log = answered(engine(model), job(0, prompts[0], 1, best=1), job(1, prompts[1], 8))
    assert "log-prob" in log.ended[0].failure and not log.ended[1].failure and log.tokens[1]
