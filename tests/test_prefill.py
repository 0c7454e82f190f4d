"""Prompts in parts: the tokens are the same, no forward is wider than allowed, and the parts count as one forward."""

import random
from typing import Any

import pytest
import tools
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from marsbench.decoding.engine import Batch, decode
from marsbench.decoding.generation import PREFILL_POSITIONS, Generation, Meter, Request
from marsbench.decoding.requests import groups_of
from marsbench.errors import UserError
from marsbench.forward.decoder import LeanDecoder, ModuleDecoder, decoder_of
from marsbench.methods import METHODS, Options, build_method
from marsbench.training.medusa import MedusaHeads

PAD, MASK = 0, 3
OURS = [name for name, info in METHODS.items() if not info.own_loop]


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    """Untrained models, also a model without a lean decoder and a draft model, and heads."""
    torch.manual_seed(0)
    longer, heads = {"max_position_embeddings": 256}, MedusaHeads(32)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    models = {
        "lean": tools.qwen2(None, **longer),
        "modules": Qwen3ForCausalLM(Qwen3Config(**tools.SIZES | longer, head_dim=8)).eval(),
        "draft": tools.qwen2(None, **longer, num_hidden_layers=1),
        "heads": heads,
    }
    kinds = [type(decoder_of(models[name])) for name in ("lean", "modules")]
    assert kinds == [LeanDecoder, ModuleDecoder]
    return models


def run(
    models: dict[str, Any], method: str, prompts: list[list[int]], prefill_positions: int, *, family: str = "lean",
    threshold: float | None = None, meter: Meter | None = None, batch_size: int = 8, **options: Any,
) -> list[Generation]:  # fmt: skip
    options = {"mask_id": MASK, "draft": models["draft"], "heads": models["heads"], **options}
    chosen = build_method(method, Options(**options))
    tau = threshold if METHODS[method].takes_threshold else None
    requests = [Request(prompt, 12, tau) for prompt in prompts]
    return decode(
        models[family], chosen, requests, eos_id=2, pad_id=PAD, batch_size=batch_size, meter=meter,
        prefill_positions=prefill_positions,
    )  # fmt: skip


CHOICES: dict[str, Any] = {
    "cache_block": st.integers(1, 6), "layout": st.sampled_from(["groups", "linear"]),
    "draft_method": st.sampled_from(["ar", "mars"]), "draft_threshold": st.just(0.2),
}  # fmt: skip


@pytest.mark.parametrize("method", OURS)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    prompts=st.lists(st.lists(st.integers(4, 23), min_size=1, max_size=30), min_size=1, max_size=5),
    most=st.integers(1, 40),
    threshold=st.sampled_from([None, 0.2]),
    family=st.sampled_from(["lean", "modules"]),
    options=st.fixed_dictionaries(CHOICES),
)
@example(prompts=[[13, 7], [14], [21, 7, 15, 17], [23, 10, 21]], most=2, threshold=0.3, family="lean", options={})
def test_prompts_in_parts_change_nothing(
    method: str, prompts: list[list[int]], most: int, threshold: float | None, family: str, options: dict[str, Any],
    models: dict[str, Any],
) -> None:  # fmt: skip
    """Guards against tokens, forwards or positions that depend on how a prompt was cut, by any method."""
    uncut, parts = Meter(), Meter()
    choices: dict[str, Any] = {"threshold": threshold, "family": family, **options}
    expected = run(models, method, prompts, 10**6, meter=uncut, **choices)
    assert run(models, method, prompts, most, meter=parts, **choices) == expected
    assert (parts.prompt_positions, parts.forwards, parts.positions) == (
        uncut.prompt_positions, uncut.forwards, uncut.positions)  # fmt: skip
    assert parts.prompt_forwards >= uncut.prompt_forwards == 1


@pytest.mark.parametrize("method", ["ar", "medusa", "jacobi", "mars", "speculative", "mars-block-cache"])
def test_no_forward_over_prompts_is_wider_than_it_may_be(
    method: str, models: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a forward over all prompts of a join, also a draft model's: rows times the longest prompt."""
    guesses = {"mars": 3, "mars-block-cache": 3, "speculative": 4}.get(method, 0)
    seen: list[tuple[int, int]] = []

    def widths(module: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        seen.append(tuple(named["input_ids"].shape))  # type: ignore[arg-type]

    draw = random.Random(0)
    prompts = [[draw.randint(4, 23) for _ in range(length)] for length in (3, 9, 10, 11, 80, 100)]
    decoders = [models[name].get_decoder() for name in ("modules", "draft")]
    hooks = [decoder.register_forward_pre_hook(widths, with_kwargs=True) for decoder in decoders]
    monkeypatch.setattr("marsbench.forward.decoder._LEAN", {})
    try:
        run(models, method, prompts, 32, family="modules", threshold=0.2)
    finally:
        for hook in hooks:
            hook.remove()
    assert all(rows * (width - guesses) <= 32 or width <= 2 + 2 * guesses for rows, width in seen)
    assert (3, 10 + (guesses if method != "speculative" else 0)) in seen or method == "speculative"  # not row by row
    assert (1, 32) in seen


def test_groups_are_as_large_as_they_may_be() -> None:
    """Guards against groups above the bound, rows that are lost, and single rows that could go together."""
    lengths = [3, 3, 4, 4, 9, 1, 1, 20, 2]
    groups = groups_of({row: Request([5] * length) for row, length in enumerate(lengths)}, 12)
    assert [list(group) for group in groups] == [[0, 1, 2], [3], [4], [5, 6], [7], [8]]
    assert groups_of({}, 12) == []
    usual = {row: Request([5] * 512) for row in range(16)}
    assert len(groups_of(usual, PREFILL_POSITIONS)) == 1, "an ordinary batch is not divided, which would cost time"


def test_a_join_in_parts_is_whole_or_not_at_all(models: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against first groups that stay when a later group fails, and reports on rows that did not join."""
    reported: list[int] = []
    done: dict[int, Generation] = {}
    batch = Batch(
        models["lean"], build_method("ar", Options()), eos_id=-1, pad_id=PAD, on_finished=done.__setitem__,
        on_tokens=lambda index, tokens: reported.append(index), prefill_positions=8,
    )  # fmt: skip
    batch.join({9: Request([4, 5, 6], 6)})
    reported.clear()
    own, calls = batch.decoder, 0

    def fails(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise MemoryError
        return own(*arguments)

    newcomers = {row: Request([5, 6, 7, 8, row + 4], 1 + row) for row in range(4)}
    monkeypatch.setattr(batch, "decoder", fails)
    with pytest.raises(MemoryError):
        batch.join(newcomers)
    with pytest.raises(UserError, match="threshold"):
        batch.join({7: Request([5], 4), 8: Request([5] * 9, 4, 0.5)})
    assert (len(batch), reported, done) == (1, [], {})
    batch.join(newcomers)
    assert len(batch) == 4 and set(reported) == {0, 1, 2, 3} and list(done) == [0]  # row 0 has a limit of one token
    while len(batch):
        batch.step()
    alone = decode(models["lean"], batch.method, [*newcomers.values(), Request([4, 5, 6], 6)], eos_id=-1, pad_id=PAD)
    assert [done[row] for row in (0, 1, 2, 3, 9)] == alone


def test_a_join_ticks_once_and_others_step_between(models: dict[str, Any]) -> None:
    """Guards against parts of a prompt that count as forwards, of its row or others, and traces of dropped rows."""

    class Clock(Meter):
        ticks = 0

        def tick(self) -> None:
            self.ticks += 1

    clock = Clock()
    (generation,) = run(models, "ar", [[5, 6, 7] * 9], 4, meter=clock)
    assert clock.ticks == generation.forwards
    assert clock.prompt_forwards == 7
    done: dict[int, Generation] = {}
    ar = build_method("ar", Options(mask_id=MASK))
    batch = Batch(models["lean"], ar, eos_id=2, pad_id=PAD, on_finished=done.__setitem__)
    prompts = [[4 + (5 * row + place) % 20 for place in range(7 + 30 * row)] for row in range(2)]
    batch.join({0: Request(prompts[0], 60, ignore_eos=True)})
    pieces = batch.joining({1: Request(prompts[1], 12)}, 8)
    for _ in pieces:
        assert 1 not in batch
        batch.step()
    dropped = batch.joining({2: Request(prompts[1], 12)}, 8)
    next(dropped)
    del dropped
    while len(batch):
        batch.step()
    alone = run(models, "ar", [prompts[1]], PREFILL_POSITIONS)[0]
    assert done.keys() == {0, 1} and done[1] == alone
