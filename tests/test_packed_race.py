"""What packed weights are worth on the clock, on a model of SmolLM2-135M's shape with random weights.

A race is only worth something on a machine that does nothing else, so it runs on request: MARSBENCH_RACE=1, with
`pytest -s` to see the figures. It takes about ten minutes and 2 GiB.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import pytest
import torch
from packed_or_not import packing
from transformers import LlamaConfig, LlamaForCausalLM

from marsbench.decoding.engine import decode
from marsbench.decoding.generation import Request
from marsbench.forward.linear import packing_in_words
from marsbench.methods.ar import Autoregressive
from marsbench.methods.hugging_face import HfGenerate
from marsbench.racing.step_time import StepShape, _copied_per_second, _step

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("MARSBENCH_RACE" not in os.environ, reason="a race wants the machine for itself"),
]
LAPS, TOKENS = 7, 24
# Rows and positions of a step -> the most that it may cost, in steps of as many rows at one position.
BOUNDS = {StepShape(1, width): 1.25 for width in range(2, 7)} | {StepShape(1, 16): 1.8, StepShape(4, 4): 1.6}
ONES = (StepShape(1, 1), StepShape(4, 1))


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=2048, tie_word_embeddings=True,
    )  # fmt: skip
    yield LlamaForCausalLM(config).eval()
    torch.set_num_threads(threads)


def laps(contenders: dict[Any, Callable[[], float]]) -> dict[Any, float]:
    """The median seconds of each contender, all in turn, after a lap that warms up."""
    found: dict[Any, list[float]] = {name: [] for name in contenders}
    for lap in range(LAPS + 1):
        for name, run in contenders.items():
            seconds = run()
            if lap:
                found[name].append(seconds)
    return {name: median(seconds) for name, seconds in found.items()}


def test_a_few_positions_cost_little_more_than_one(model: Any) -> None:
    """Guards against a window that pays in tokens per forward and not on the clock."""

    def step(shape: StepShape, on: bool) -> Callable[[], float]:
        def run() -> float:
            with packing(on):
                return _step(model, shape)

        return run

    shapes = [*ONES, *BOUNDS]
    found = laps({(shape, on): step(shape, on) for on in (True, False) for shape in shapes})
    copied = median(_copied_per_second(torch.device("cpu")) for _ in range(5))
    weights = sum(parameter.nbytes for parameter in model.parameters())
    for shape in shapes:
        ratio = found[shape, True] / found[StepShape(shape.rows, 1), True]
        print(
            f"{shape.rows} x {shape.window:2}: packed {found[shape, True] * 1e3:6.1f} ms, {ratio:.2f} of one position; "
            f"not packed {found[shape, False] * 1e3:6.1f} ms"
        )
    # Copying reads and writes every byte; weights are only read.
    print(f"roofline of ar: {weights / copied / found[StepShape(1, 1), True]:.0%} of copying {copied / 1e9:.1f} GB/s")
    print(packing_in_words())
    over = {shape: found[shape, True] / found[StepShape(shape.rows, 1), True] for shape in BOUNDS}
    assert {shape: ratio for shape, ratio in over.items() if ratio > BOUNDS[shape]} == {}


@pytest.mark.parametrize("rows", [1, 4, 8, 16])
def test_ar_is_no_straw_man(rows: int, model: Any) -> None:
    """Guards against a baseline that others would beat by loading the model elsewhere."""
    requests = [Request([row * 97 % 49152 + place for place in range(64)], TOKENS) for row in range(rows)]

    def run(method: Any) -> Callable[[], float]:
        def timed() -> float:
            started = time.perf_counter()
            decode(model, method, requests, eos_id=49151, pad_id=0, batch_size=rows)
            return time.perf_counter() - started

        return timed

    found = laps({"ar": run(Autoregressive()), "hf-generate": run(HfGenerate())})
    print(f"batch {rows:2}: " + ", ".join(f"{name} {rows * TOKENS / s:.1f} tokens/s" for name, s in found.items()))
    assert found["hf-generate"] / found["ar"] >= 1.2
