"""A gated adapter changes what masks predict, and no token of the model's own: in every layout, loop, architecture."""

import copy
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any
from weakref import WeakValueDictionary

import pytest
import torch
from test_architectures import EOS, KNOWN, MASK, NEW, PAD, SHAPE, prompts
from test_host_reads import Operations
from tools import packing, qwen2
from torch import Tensor, nn
from transformers import PreTrainedModel

from marsbench.decoding.engine import Batch, KindOfBatch, decode, forward
from marsbench.decoding.generation import Generation, Request
from marsbench.errors import UserError
from marsbench.forward import linear as linear_module
from marsbench.forward.adapter import Adapted, Adapter, LowRank, hooked
from marsbench.forward.cache import RaggedCache
from marsbench.forward.decoder import LeanDecoder, decoder_of
from marsbench.forward.draft_head import KINDS, DraftHead
from marsbench.forward.modules import ModuleDecoder
from marsbench.forward.window import Answer, Window
from marsbench.methods import Options, build_method

RANK = 3
DRAFTING = {
    "groups": ("mars-verified", {}), "linear": ("mars-verified", {"layout": "linear"}),
    "wide": ("mars-verified", {"window": 5}), "lookup": ("mars-lookup", {}), "two forwards": ("uno", {}),
    "mars, one token": ("mars", {}), "no cache": ("mars-no-cache", {}),
}  # fmt: skip


def noisy(model: PreTrainedModel, size: float = 10.0, rank: int = RANK) -> Adapter:
    """Noise of a size on every linear layer below the LM head, and on the embedding."""
    torch.manual_seed(11)
    decoder = model.get_decoder()
    maps = {
        name: LowRank(size * torch.randn(rank, layer.in_features), size * torch.randn(layer.out_features, rank))
        for name, layer in decoder.named_modules()
        if isinstance(layer, nn.Linear)
    }
    return Adapter(size * torch.randn(model.get_input_embeddings().embedding_dim), maps)


def noise(kind: str, model: PreTrainedModel, size: float) -> DraftHead:
    embeddings = model.get_input_embeddings()
    torch.manual_seed(12)
    fresh = KINDS[kind].fresh(embeddings.num_embeddings, embeddings.embedding_dim)
    return KINDS[kind](*(size * torch.randn_like(weight) for weight in fresh))


def with_noise(model: PreTrainedModel, kind: str | None = None) -> Adapted:
    """A model with noise of size 10 in its adapter, and in a head behind it."""
    return Adapted(model, replace(noisy(model), head=kind and noise(kind, model, 10.0)))


@pytest.fixture
def model() -> PreTrainedModel:
    return qwen2(**SHAPE)


def run(model: Any, method: str, kind: KindOfBatch | None = None, **options: Any) -> list[Generation]:
    """All prompts in one batch, of mixed lengths."""
    chosen = build_method(method, Options(**({"mask_id": MASK, "window": 3} | options)))
    return decode(model, chosen, [Request(prompt, NEW) for prompt in prompts()], eos_id=EOS, pad_id=PAD, kind=kind)


def tokens(generations: list[Generation]) -> list[list[int]]:
    return [generation.tokens for generation in generations]


# The heads differ in what they read, and a network reads more than a table.
@pytest.mark.parametrize(("kind", "name"), [*product([None, "network"], KNOWN), *product(["markov"], [*KNOWN][:3])])
def test_no_token_changes_in_any_architecture(kind: str | None, name: str) -> None:
    """Guards against an adapter, or a head, that reaches a token: noise of size 10 in it would change every answer."""
    torch.manual_seed(0)
    model = KNOWN[name]().eval()
    alone, adapted = tokens(run(model, "ar")), with_noise(model, kind)
    drafting = [("ar", {}), *DRAFTING.values()] if kind is None else [*DRAFTING.values()][:5]  # a head is for drafts
    for method, options in drafting:
        assert tokens(run(adapted, method, **options)) == alone, (method, options)


def states(model: Any, *, masks: bool = True, ragged: bool = True) -> tuple[Tensor, Tensor]:
    """Hidden states of a window with two rows, [2, 6, H], and which of its entries are masks."""
    answer, masked = answers(model, masks=masks, ragged=ragged)
    return answer.hidden, masked


def answers(model: Any, *, masks: bool = True, ragged: bool = True) -> tuple[Answer, Tensor]:
    """What a model answers to that window."""
    ids = torch.tensor([[5, 6, 7, 8, MASK, MASK], [9, 10, 11, MASK, MASK, MASK]])
    begin, width = torch.zeros(2, dtype=torch.long), 6
    real = torch.ones(2, 6, dtype=torch.bool)
    real[1, 5] = False
    masks_begin = torch.tensor([4, 3])
    position = torch.arange(width).expand(2, width)
    window = Window(
        ids, position, begin, width, torch.ones(6, 6, dtype=torch.bool).tril(), real if ragged else None,
        masks_begin if masks else None,
    )  # fmt: skip
    with torch.inference_mode():
        answer = forward(decoder_of(model), RaggedCache(), window)
    return answer, (torch.arange(6) >= masks_begin.unsqueeze(1)) & real


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_states_of_tokens_are_equal_to_the_bit(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Guards against a change of rounding at tokens: by another kernel, another order, or minus zero."""
    model = model.to(dtype)
    (plain, masked), (adapted, _) = states(model), states(with_noise(model))
    assert torch.equal(plain[~masked], adapted[~masked])
    assert not torch.isclose(plain[masked], adapted[masked]).all(1).any(), "the adapter acts on every mask"


@pytest.mark.parametrize("by", [LeanDecoder, ModuleDecoder])
def test_the_mask_s_vector_reaches_no_logit_of_a_tied_model(by: type) -> None:
    """Guards against a vector added to the embedding's weight: where weights are tied, the mask's logit changes."""
    model = qwen2(**SHAPE, tie_word_embeddings=True)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    if by is ModuleDecoder:
        model.get_decoder().layers[0].register_forward_hook(lambda *_: None)
    adapted = with_noise(model)
    assert isinstance(decoder_of(adapted), by)
    (plain, masked), (answer, _) = answers(model), answers(adapted)
    tokens = ~masked
    tokens[1, 5] = False  # a filler
    with torch.inference_mode():
        logits = answer.logits(slice(None))
        assert torch.equal(plain.logits(slice(None))[tokens], logits[tokens])
        torch.testing.assert_close(logits, answer.hidden @ model.lm_head.weight.T)


def test_an_adapter_is_idle_without_masks_and_cheap_with(model: PreTrainedModel) -> None:
    """Guards against masks that are known by their id, which a prompt may hold, and against many small operations."""
    for ragged in (False, True):
        alone, adapted = (states(variant, masks=False, ragged=ragged)[0] for variant in (model, with_noise(model)))
        assert torch.equal(alone, adapted)
    counts = []
    for variant in (model, with_noise(model)):
        states(variant, ragged=False)  # lays the maps out
        with Operations() as operations:
            states(variant, ragged=False)
        counts.append(operations.count.total())
    layers, window = model.config.num_hidden_layers, 6
    assert 0 < counts[1] - counts[0] <= 16 * layers + window


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layers", ["", "k_proj|1.mlp"], ids=["all", "some"])
def test_lean_decoder_and_modules_agree(model: PreTrainedModel, dtype: torch.dtype, layers: str) -> None:
    """Guards against factors joined in another order than layers, a map expected for every layer, and a lost hook."""
    model, close = model.to(dtype), 1e-4 if dtype is torch.float32 else 0.05
    every = noisy(model, 0.3)
    maps = {name: pair for name, pair in every.maps.items() if re.search(layers, name)}
    adapted = Adapted(model, Adapter(every.vector, maps))
    lean, _ = states(adapted)
    assert isinstance(decoder_of(adapted), LeanDecoder) and not torch.equal(lean, states(model)[0])
    ids, position = torch.tensor([[5, 6, 7, 8, MASK, MASK]]), torch.arange(6).unsqueeze(0)
    with torch.inference_mode(), hooked(model, adapted.adapter, ids == MASK):
        own = model.get_decoder()(input_ids=ids, position_ids=position).last_hidden_state
    torch.testing.assert_close(lean[:1], own, rtol=close, atol=close)
    handle = model.get_decoder().layers[0].register_forward_hook(lambda *_: None)
    assert isinstance(decoder_of(adapted), ModuleDecoder)
    by_modules = states(adapted)[0].clone()
    handle.remove()
    by_modules[1, 5] = 0  # a filler
    torch.testing.assert_close(lean, by_modules, rtol=close, atol=close)
    assert torch.equal(lean, states(adapted)[0])


def test_batches_of_several_adapters_take_turns(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against weights copied or packed once for each adapter, and a batch that goes on with another's masks."""
    monkeypatch.setattr(linear_module, "COPIES", WeakValueDictionary())  # without other tests' models
    several = [Adapted(model, noisy(model, size)) for size in (0.1, 0.3, 0.6)]
    method, generations = build_method("mars", Options(mask_id=MASK, window=3)), []

    def batch(adapted: Any) -> Batch:
        done: dict[int, Generation] = {}
        generations.append(done)
        started = Batch(adapted, method, eos_id=EOS, pad_id=PAD, on_finished=done.__setitem__)
        started.join({row: Request(prompt, NEW, threshold=0.3) for row, prompt in enumerate(prompts())})
        return started

    with packing(True):
        for adapted in several:
            running = batch(adapted)
            while len(running):
                running.step()
        copies = len(linear_module.COPIES)
        in_turns = [batch(adapted) for adapted in several]
        while any(map(len, in_turns)):
            for running in in_turns:
                running.step()
        assert copies == len(linear_module.COPIES) == 4 * model.config.num_hidden_layers + 1
    assert generations[:3] == generations[3:]
    assert generations[0] != generations[1] != generations[2], "each has answers of its own"
    assert all(adapted.get_decoder() is model.get_decoder() for adapted in several)


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_an_adapted_model_can_be_copied(make: Callable[[Adapted], Adapted], model: PreTrainedModel) -> None:
    """Guards against a copy that calls itself without end for an attribute which it does not have yet."""
    adapted = Adapted(model, noisy(model, 0.3))
    assert torch.equal(states(adapted)[0], states(make(adapted))[0])


def test_an_adapter_of_another_model_is_refused(model: PreTrainedModel) -> None:
    """Guards against a map for a missing layer that is left out without an error."""
    adapter = noisy(model)
    with pytest.raises(UserError, match="no layer"):
        Adapted(KNOWN["gpt2"]().eval(), adapter)
    with pytest.raises(UserError, match=r"no layer layers\.2"):
        Adapted(qwen2(**SHAPE | {"num_hidden_layers": 2}), adapter)
    with pytest.raises(UserError, match="another size"):
        Adapted(qwen2(**SHAPE | {"intermediate_size": 64}), adapter)
