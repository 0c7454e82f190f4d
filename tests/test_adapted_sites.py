"""Layers run as one product with an adapter's maps, and say of tokens what they say by themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from packed_or_not import packing
from test_adapter import noisy, states
from test_architectures import SHAPE
from torch import Tensor
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from marsbench.forward.adapter import Adapted
from marsbench.forward.linear import Copy
from marsbench.forward.native import VARIABLE, is_native

pytestmark = pytest.mark.skipif(not is_native(), reason="no C++ compiler")


@pytest.fixture(autouse=True)
def packed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Weights are packed, however small."""
    monkeypatch.setenv(VARIABLE, "1")  # whatever is faster
    with packing(True):
        yield


@pytest.fixture
def model() -> PreTrainedModel:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(**SHAPE)).to(torch.bfloat16).eval()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of positions for which layers ran as one with an adapter's maps."""
    found: list[int] = []
    alone = Copy.adapted

    def call(one: Copy, values: Tensor, *given: Any) -> Tensor:
        found.append(len(values))
        return alone(one, values, *given)

    monkeypatch.setattr(Copy, "adapted", call)
    return found


def by_themselves(model: Any) -> Tensor:
    """The states, of layers and maps that run one after the other."""
    with packing(False):
        return states(model)[0]


def test_tokens_get_what_they_get_without_an_adapter(model: PreTrainedModel, calls: list[int]) -> None:
    """Guards against zeros behind the values by which a token's sum is rounded otherwise."""
    adapted = Adapted(model, noisy(model, 0.3))
    (plain, masked), (found, _) = states(model), states(adapted)
    assert torch.equal(plain[~masked], found[~masked])
    assert calls == [11] * 4 * model.config.num_hidden_layers
    torch.testing.assert_close(found[masked], by_themselves(adapted)[masked], rtol=0.05, atol=0.05)
    assert not torch.isclose(plain[masked], found[masked]).all(1).any()


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.v_proj.bias"])
def test_it_follows_what_is_written_to_a_layer(model: PreTrainedModel, calls: list[int], name: str) -> None:
    """Guards against a copy of weights, or of biases, that are none of the model's any more."""
    adapter = noisy(model, 0.3)
    adapted = Adapted(model, adapter)
    before = states(adapted)[0]
    with torch.no_grad():
        model.get_parameter(name).add_(0.5)
    after = states(adapted)[0]
    assert not torch.equal(before, after)
    assert torch.equal(after, states(Adapted(model, adapter))[0])
    torch.testing.assert_close(after, by_themselves(adapted), rtol=0.1, atol=0.1)
    assert calls


def test_layers_with_and_without_a_bias_are_one(model: PreTrainedModel, calls: list[int]) -> None:
    """Guards against a bias that is dropped with another layer's."""
    model.model.layers[0].self_attn.k_proj.bias = None
    adapted = Adapted(model, noisy(model, 0.3))
    (plain, masked), (found, _) = states(model), states(adapted)
    assert torch.equal(plain[~masked], found[~masked])
    with packing(False):
        torch.testing.assert_close(states(model)[0], plain, rtol=0.05, atol=0.05)
    assert len(calls) == 4 * model.config.num_hidden_layers
