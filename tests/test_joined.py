"""Small layers in bf16 run as one product with an adapter's maps, and say of tokens what they say by themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_adapter import noisy, states
from test_architectures import SHAPE
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from marsbench.forward import linear as linear_module
from marsbench.forward.adapter import Adapted
from marsbench.forward.linear import JOINED, Joined, packing, packing_in_words, reads_bf16

pytestmark = pytest.mark.skipif(not reads_bf16(), reason="oneDNN multiplies no bf16 here")


@pytest.fixture(autouse=True, params=["large weights", "small weights"])
def packed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Weights are packed for their size, or only to be joined; nothing is known of shapes yet."""
    if request.param == "large weights":
        monkeypatch.setattr(linear_module, "LARGE", 1)
    monkeypatch.setattr(linear_module, "_EXACT", {})
    with packing(True):
        yield


@pytest.fixture
def model() -> PreTrainedModel:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(**SHAPE)).to(torch.bfloat16).eval()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of positions for which layers ran as one."""
    found: list[int] = []
    alone = Joined.__call__

    def call(one: Joined, values: Tensor, inner: Tensor) -> Tensor:
        if torch.count_nonzero(inner):  # else it is only looked at
            found.append(len(values))
        return alone(one, values, inner)

    monkeypatch.setattr(Joined, "__call__", call)
    return found


def skip_where_inexact() -> None:
    """Kernels of some machines add up otherwise where there are more columns: there layers run by themselves."""
    if not all(exact[11] for exact in linear_module._EXACT.values()):
        pytest.skip("layers that are joined would not say the same of tokens on this machine")


def by_themselves(model: Any) -> Tensor:
    """The states, of layers and maps that run one after the other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Joined, "takes", lambda *_: False)
        return states(model)[0]


def test_tokens_get_what_they_get_without_an_adapter(model: PreTrainedModel, calls: list[int]) -> None:
    """Guards against zeros behind the values by which a token's sum is rounded otherwise."""
    adapted = Adapted(model, noisy(model, 0.3))
    (plain, masked), (found, _) = states(model), states(adapted)
    assert torch.equal(plain[~masked], found[~masked])
    skip_where_inexact()
    assert calls == [11] * 4 * model.config.num_hidden_layers
    torch.testing.assert_close(found[masked], by_themselves(adapted)[masked], rtol=0.05, atol=0.05)
    assert not torch.isclose(plain[masked], found[masked]).all(1).any()


def test_layers_that_would_say_something_else_run_by_themselves(
    model: PreTrainedModel, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a machine whose kernels add up in another order where there are more columns."""
    as_one = Joined.__call__
    monkeypatch.setattr(Joined, "__call__", lambda *given: 1.01 * as_one(*given))
    (plain, masked), (found, _) = states(model), states(Adapted(model, noisy(model, 0.3)))
    assert not calls and torch.equal(plain[~masked], found[~masked])


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
    torch.testing.assert_close(after, by_themselves(adapted), rtol=0.05, atol=0.05)
    skip_where_inexact()
    assert calls


def test_it_goes_where_packing_is_turned_off(model: PreTrainedModel, calls: list[int]) -> None:
    """Guards against copies that outlive the packed ones, and memory that no row tells of."""
    adapted = Adapted(model, noisy(model, 0.3))
    states(adapted)
    alone = sum(module.weight.nbytes for module in model.modules() if isinstance(module, nn.Linear))
    assert 1.8 * alone < packing_in_words()["packing"]["bytes"] < 2.5 * alone
    calls.clear()
    with packing(False):
        states(adapted)
    assert not calls and not list(JOINED)


def test_layers_with_and_without_a_bias_are_one(model: PreTrainedModel, calls: list[int]) -> None:
    """Guards against a bias that is dropped with another layer's."""
    model.model.layers[0].self_attn.k_proj.bias = None
    adapted = Adapted(model, noisy(model, 0.3))
    (plain, masked), (found, _) = states(model), states(adapted)
    assert torch.equal(plain[~masked], found[~masked])
    with packing(False):
        torch.testing.assert_close(states(model)[0], plain, rtol=0.05, atol=0.05)
    skip_where_inexact()
    assert len(calls) == 4 * model.config.num_hidden_layers
