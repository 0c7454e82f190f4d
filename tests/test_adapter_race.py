"""What a gated adapter costs on the clock, at the shape of SmolLM2-135M and at that of the embedded world's models.

A race is only worth something on a machine that does nothing else, so it runs on request: MARSBENCH_RACE=1, with
`pytest -s` to see the figures. It takes about two minutes and 2 GiB.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from statistics import mean, median
from typing import Any

import pytest
import torch
from test_adapter import noisy
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from marsbench.forward.adapter import Adapted
from marsbench.presets import preset
from marsbench.racing.step_time import StepShape, _step

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("MARSBENCH_RACE" not in os.environ, reason="a race wants the machine for itself"),
]
LAPS, RANK = 15, 16


@pytest.fixture(autouse=True)
def all_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    yield
    torch.set_num_threads(threads)


def small() -> Any:
    world = preset("mini").world
    assert world is not None
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=1024, tie_word_embeddings=True, **world.model)).eval()


def smollm2() -> Any:
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=2048, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize(
    ("make", "dtype", "steps", "bound"),
    [(smollm2, torch.float32, 1, 1.15), (smollm2, torch.bfloat16, 1, 1.15), (small, torch.float32, 5, 1.25)],
    ids=["135m", "135m, bf16", "mini"],
)
def test_an_adapter_costs_little(make: Callable[[], Any], dtype: torch.dtype, steps: int, bound: float) -> None:
    """Guards against low-rank maps whose many small operations take back what the masks have won."""
    torch.manual_seed(0)
    model = make().to(dtype)
    adapted = Adapted(model, noisy(model, 0.01, RANK))
    weights = sum(parameter.nbytes for parameter in model.parameters())
    print(f"\nadapter: {adapted.adapter.bytes() / 2**20:.1f} MiB beside {weights / 2**20:.0f}")
    over = {}
    for shape in (StepShape(1, 4), StepShape(1, 16), StepShape(4, 4)):
        seconds: dict[str, list[float]] = {"alone": [], "adapted": []}
        for lap in range(LAPS + 2):
            for name, one in (("alone", model), ("adapted", adapted)):
                found = mean(_step(one, shape) for _ in range(steps))
                if lap > 1:
                    seconds[name].append(found)
        ratios = [a / b for a, b in zip(seconds["adapted"], seconds["alone"], strict=True)]
        over[shape] = median(ratios)
        print(
            f"{shape.rows} x {shape.window:2}: alone {1e3 * median(seconds['alone']):.2f} ms, with the adapter "
            f"{median(ratios):.3f} times ({min(ratios):.3f} to {max(ratios):.3f})"
        )
    assert over[StepShape(1, 16)] <= bound
