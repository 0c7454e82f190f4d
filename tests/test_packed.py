"""Packed weights: never stale, freed with their model, and no different except in speed."""

import copy
import gc
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any
from weakref import WeakValueDictionary

import psutil
import pytest
import tools
import torch
from test_adapter import noisy, states
from test_architectures import SHAPE
from tools import packing
from torch import Tensor, nn
from transformers import PreTrainedModel

from marsbench.decoding.engine import forward
from marsbench.forward import linear as linear_module
from marsbench.forward.adapter import Adapted
from marsbench.forward.cache import RaggedCache
from marsbench.forward.decoder import LeanDecoder, decoder_of
from marsbench.forward.linear import Copy, packing_in_words, positions_packed
from marsbench.forward.native import is_native
from marsbench.forward.window import Window

pytestmark = pytest.mark.skipif(not is_native(), reason="no C++ compiler")
IDS = torch.tensor([[4, 5, 6, 7, 8]])
LAYERS, SITES = 2, 4


def llama(seed: int = 0, *, tied: bool = True) -> Any:
    return tools.llama(seed, vocab_size=48, initializer_range=0.3, tie_word_embeddings=tied)


@pytest.fixture(autouse=True)
def all_packed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every matrix is read from its packed copy, even where that is slower."""
    monkeypatch.setattr(linear_module, "COPIES", WeakValueDictionary())  # without other tests' models
    with packing(True):
        yield
    gc.collect()


@torch.inference_mode()
def logits_of(model: Any) -> Tensor:
    """Logits [1, W, V] of IDS by the engine's forward pass."""
    decoder, width = decoder_of(model), IDS.shape[1]
    assert isinstance(decoder, LeanDecoder)
    visible = torch.ones(width, width, dtype=torch.bool).tril()
    window = Window(IDS, torch.arange(width).unsqueeze(0), torch.zeros(1, dtype=torch.long), width, visible)
    return forward(decoder, RaggedCache(), window).logits(slice(None))


@torch.inference_mode()
def own_logits(model: Any) -> Tensor:
    """Logits [1, W, V] of IDS by a fresh copy of the model and its own modules."""
    logits: Tensor = copy.deepcopy(model)(IDS, use_cache=False).logits
    return logits


def trained(model: Any, make: Callable[..., torch.optim.Optimizer], **more: Any) -> None:
    optimizer = make(model.parameters(), lr=0.1, **more)
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()


def merged(weight: Tensor) -> None:
    """As adapters are merged: through `.data`, which no version counter sees."""
    weight.data += torch.randn(weight.shape[0], 1) @ torch.randn(1, weight.shape[1])


def replaced(layer: Any) -> None:
    layer.weight = nn.Parameter(torch.randn_like(layer.weight))


def sharded(model: Any) -> None:
    """As a sharding wrapper gathers: all values are copied into the same storage."""
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn_like(parameter) / 4)


def given_data(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone() * 1.5


CHANGES: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda model: trained(model, torch.optim.SGD),
    "AdamW": lambda model: trained(model, torch.optim.AdamW),
    "AdamW, fused": lambda model: trained(model, torch.optim.AdamW, fused=True),
    "load_state_dict": lambda model: model.load_state_dict(llama(5).state_dict()),
    "load_state_dict, assigned": lambda model: model.load_state_dict(llama(5).state_dict(), assign=True),
    "merged adapter": lambda model: merged(model.model.layers[1].mlp.down_proj.weight),
    "replaced weight": lambda model: replaced(model.model.layers[0].self_attn.q_proj),
    "sharded": sharded,
    "other data": given_data,
    "one value": lambda model: torch.no_grad()(model.model.layers[0].self_attn.k_proj.weight[1].add_)(5.0),
    "bf16 and back": lambda model: model.bfloat16().float(),
    "bf16": lambda model: model.bfloat16(),
}


@pytest.mark.parametrize(
    ("change", "tied"), [*product(CHANGES, [True]), *product(("AdamW", "load_state_dict, assigned", "bf16"), [False])]
)
def test_what_is_written_is_read_at_the_next_step(change: str, tied: bool) -> None:
    """Guards against logits of weights that have since changed."""
    model = llama(tied=tied)
    torch.testing.assert_close(logits_of(model), own_logits(model), atol=1e-4, rtol=1e-4)
    before = logits_of(model)
    assert len(linear_module.COPIES) == LAYERS * SITES + 1
    for _ in range(2):  # and once more, when everything has been packed again
        CHANGES[change](model)
        tolerance = 1e-4 if model.dtype is torch.float32 else 0.3
        after = logits_of(model)
        torch.testing.assert_close(after, own_logits(model), atol=tolerance, rtol=tolerance)
    if change not in ("bf16 and back", "bf16"):
        assert not torch.allclose(after, before, atol=1e-2)


def test_memory_is_back_when_the_model_is_gone() -> None:
    """Guards against copies that outlive their model, and a second copy where two batches decode one model."""
    gc.collect()
    assert len(linear_module.COPIES) == 0
    model, other = llama(), llama(1, tied=False)
    for decoded in (model, model, other):
        logits_of(decoded)
    assert len(linear_module.COPIES) == 2 * (LAYERS * SITES + 1)
    packed = packing_in_words()["packing"]
    matrices = [*model.model.layers.parameters(), *other.model.layers.parameters()]
    assert packed["bytes"] == sum(matrix.nbytes for matrix in matrices if matrix.dim() == 2) + 2 * 48 * 32 * 4
    assert packed["by"] == ["native"] and packed["times_torch"]["float32"]["1"] > 0
    del model, decoded
    gc.collect()
    assert len(linear_module.COPIES) == LAYERS * SITES + 1
    del other, matrices
    gc.collect()
    assert len(linear_module.COPIES) == 0 and packing_in_words() == {}


def test_nothing_is_packed_that_need_not_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against memory taken where packing is off, where memory is short, or for what is no plain weight."""
    model = llama()
    with packing(False):
        plain = logits_of(model)
        assert len(linear_module.COPIES) == 0
    assert not torch.equal(logits_of(model), torch.zeros_like(plain)) and len(linear_module.COPIES) > 0
    with packing(False):
        torch.testing.assert_close(logits_of(model), plain, atol=0, rtol=0)
        assert len(linear_module.COPIES) == 0, "it was switched off between two batches"
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 1000}))
    torch.testing.assert_close(logits_of(llama()), plain, atol=0, rtol=0)
    assert len(linear_module.COPIES) == 0
    with torch.inference_mode():
        assert not positions_packed([torch.ones(64, 64)]), "it has no version"
    assert positions_packed([torch.ones(64, 64)])
    assert not positions_packed([torch.ones(64, 64).t()[2:]]) and not positions_packed([torch.ones(4, 4)])


@pytest.fixture
def model() -> PreTrainedModel:
    return tools.qwen2(**SHAPE).to(torch.bfloat16)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of positions for which layers ran together with an adapter's maps."""
    counts: list[int] = []
    alone = Copy.adapted

    def call(weights: Copy, values: Tensor, *arguments: Any) -> Tensor:
        counts.append(len(values))
        return alone(weights, values, *arguments)

    monkeypatch.setattr(Copy, "adapted", call)
    return counts


def by_themselves(model: Any) -> Tensor:
    """The states where layers and maps run one after the other."""
    with packing(False):
        return states(model)[0]


@pytest.mark.parametrize("biases", ["all", "some"])
def test_tokens_get_what_they_get_without_an_adapter(model: PreTrainedModel, calls: list[int], biases: str) -> None:
    """Guards against zeros after the values that round a token's sum otherwise, and against a bias that is dropped."""
    if biases == "some":
        model.model.layers[0].self_attn.k_proj.bias = None
    adapted = Adapted(model, noisy(model, 0.3))
    (plain, masked), (packed, _) = states(model), states(adapted)
    assert torch.equal(plain[~masked], packed[~masked])
    assert calls == [11] * 4 * model.config.num_hidden_layers
    torch.testing.assert_close(packed[masked], by_themselves(adapted)[masked], rtol=0.05, atol=0.05)
    torch.testing.assert_close(by_themselves(model), plain, rtol=0.05, atol=0.05)
    assert not torch.isclose(plain[masked], packed[masked]).all(1).any()


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.v_proj.bias"])
def test_it_follows_what_is_written_to_a_layer(model: PreTrainedModel, calls: list[int], name: str) -> None:
    """Guards against a copy of weights, or of biases, that the model no longer has."""
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
