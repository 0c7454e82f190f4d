"""Hooks, adapters, offloading and weights loaded anew take effect, and decoding leaves the model as it was."""

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import tools
import torch
import torch.nn.functional as F
from safetensors.torch import save_model
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import parametrize
from transformers import PreTrainedModel

from marsbench.decoding.engine import Batch, decode
from marsbench.decoding.generation import Request
from marsbench.errors import UserError
from marsbench.forward import decoder as decoder_module
from marsbench.forward import linear as linear_module
from marsbench.forward.decoder import LeanDecoder, ModuleDecoder, decoder_of
from marsbench.forward.linear import Site
from marsbench.forward.native import is_native
from marsbench.methods import Options, build_method

PROMPT, NEW = [4, 5, 6, 7, 8], 10
SHAPE = tools.SIZES


@pytest.fixture
def model() -> PreTrainedModel:
    return tools.qwen2(tie_word_embeddings=False)


def ar(model: Any) -> list[int]:
    method, requests = build_method("ar", Options()), [Request(PROMPT, NEW)]
    return decode(model, method, requests, eos_id=-1, pad_id=0)[0].tokens


@torch.inference_mode()
def greedy(model: Any) -> list[int]:
    """The continuation by the model's own forward passes, without a cache."""
    ids = list(PROMPT)
    for _ in range(NEW):
        ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(PROMPT) :]


class Lora(nn.Module):
    """A linear layer with a correction of low rank, as adapters wrap them."""

    def __init__(self, base_layer: nn.Module, width: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.base_layer = base_layer
        self.lora_a, self.lora_b = nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)

    def forward(self, values: Tensor) -> Tensor:
        answer: Tensor = self.base_layer(values) + 8 * self.lora_b(self.lora_a(values))
        return answer


class Adapted(nn.Module):
    """A wrapper around a model that passes on the attributes it lacks, as peft's does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = model

    def forward(self, *arguments: Any, **named: Any) -> Any:
        return self.base_model(*arguments, **named)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base_model"), name)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * -2


def put_adapter(model: Any) -> None:
    layer = model.model.layers[1].self_attn
    layer.o_proj = Lora(layer.o_proj, SHAPE["hidden_size"])


def load_anew(model: Any) -> None:
    torch.manual_seed(3)
    state = {name: torch.randn_like(weight) * 0.5 for name, weight in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def own_forward(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    before = mlp.forward
    mlp.forward = lambda values: before(values) * -2


def first(model: Any) -> Any:
    return model.model.layers[0]


def weight_times(factor: float, layer: Any) -> None:
    layer.weight = nn.Parameter(layer.weight.detach() * factor)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "adapter": put_adapter,
    "module replaced": lambda model: setattr(first(model), "mlp", copy.deepcopy(model.model.layers[1].mlp)),
    "head replaced": lambda model: model.set_output_embeddings(nn.Linear(32, SHAPE["vocab_size"], bias=False)),
    "loaded anew": load_anew,
    "weight replaced": lambda model: weight_times(-3, first(model).self_attn.v_proj),
    "layer hooked": lambda model: first(model).register_forward_hook(lambda module, inputs, output: output * -1.5),
    "projection hooked": lambda model: first(model).self_attn.q_proj.register_forward_pre_hook(
        lambda module, inputs: (inputs[0] * -2,)
    ),
    "head hooked": lambda model: model.lm_head.register_forward_hook(lambda module, inputs, output: -output),
    "own forward": own_forward,
    "parametrized": lambda model: parametrize.register_parametrization(first(model).mlp.up_proj, "weight", Doubled()),
    "frequencies": lambda model: setattr(model.model.rotary_emb, "inv_freq", model.model.rotary_emb.inv_freq * 0.2),
}


def test_the_lean_way_is_taken_again_when_nothing_hangs_on_the_model(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a hook that makes all later batches slow, or is called after its removal."""
    before, calls = ar(model), list[int]()
    hook = model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    assert isinstance(decoder_of(model), ModuleDecoder)
    assert ar(model) == before and len(calls) == NEW
    hook.remove()
    calls.clear()
    monkeypatch.setattr(ModuleDecoder, "__call__", None)
    assert ar(model) == before and calls == []
    assert isinstance(decoder_of(model), LeanDecoder)


@pytest.mark.parametrize("method", ["ar", "speculative"])
def test_a_model_is_looked_at_when_a_batch_begins(
    method: str, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a check of every module and weight, also a draft model's, in every step."""
    chosen = build_method(method, Options(draft=copy.deepcopy(model)))
    batch = Batch(model, chosen, eos_id=-1, pad_id=0, on_finished=lambda *_: None)
    batch.join({0: Request(PROMPT, NEW)})
    for name in ("is_plain", "_parts"):
        monkeypatch.setattr(decoder_module, name, None)
    monkeypatch.setattr(linear_module, "positions_packed", None)
    while len(batch):
        batch.step()
    with pytest.raises(TypeError):
        ar(model)


def test_a_hook_on_the_head_leaves_the_rest_lean(model: PreTrainedModel) -> None:
    """Guards against a head whose hooks, which time it, are not called."""
    calls: list[int] = []
    model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    assert isinstance(decoder_of(model), LeanDecoder)
    assert ar(model) == greedy(model)
    assert len(calls) == 2 * NEW


def hooked(place: Any, name: str, part: nn.Module, hook: Callable[..., Any] = lambda *_: None) -> None:
    """Put a part in a place of a model, with a hook on it or on its last part."""
    setattr(place, name, part)
    (part[-1] if isinstance(part, nn.Sequential) else part).register_forward_hook(hook)


STRANGE: dict[str, Callable[[Any], Any]] = {
    "list hooked": lambda model: model.model.layers.register_forward_hook(lambda *_: None),
    "activation": lambda model: hooked(first(model).mlp, "act_fn", nn.Sequential(nn.Tanh()), lambda _, __, out: -out),
    "more parts": lambda model: hooked(model.model, "probe", nn.Linear(3, 3)),
    "head adapted": lambda model: hooked(
        model, "lm_head", nn.Sequential(model.lm_head, nn.Tanh()), lambda _, __, out: -out
    ),
    "head parametrized": lambda model: parametrize.register_parametrization(model.lm_head, "weight", Doubled()),
}


@pytest.mark.parametrize("change", CHANGES | STRANGE)
@pytest.mark.parametrize("began", [True, False])
def test_a_change_counts_from_the_next_batch_on(began: bool, change: str, model: PreTrainedModel) -> None:
    """Guards against parts that the check of a model misses, before the first batch or a later one."""
    before = greedy(model)
    assert not began or ar(model) == before
    torch.manual_seed(2)
    (CHANGES | STRANGE)[change](model)
    assert ar(model) == greedy(model) and (change in STRANGE or greedy(model) != before)


def test_models_on_one_device_run_lean(model: PreTrainedModel) -> None:
    """Guards against torch's own wrapper, or `device_map="cuda"`, that makes decoding slow."""
    compiled = torch.compile(model, backend="eager")
    assert isinstance(decoder_of(compiled), LeanDecoder)
    assert ar(compiled) == ar(model)
    model.hf_device_map = {"": "cpu"}
    assert isinstance(decoder_of(model), LeanDecoder) and ar(model) == greedy(model)
    model.hf_device_map = {"model": "cpu", "lm_head": "disk"}
    assert isinstance(decoder_of(model), ModuleDecoder)


def test_hooks_on_all_modules_are_called(model: PreTrainedModel) -> None:
    """Guards against torch's global hooks, or hooks in a new dictionary, that are not called."""
    seen: set[str] = set()
    hook = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.add(type(module).__name__))
    try:
        ar(model)
    finally:
        hook.remove()
    assert {"Qwen2DecoderLayer", "Linear"} <= seen
    before = ar(model)
    model.model.layers[0]._forward_hooks = type(model.model.layers[0]._forward_hooks)()
    CHANGES["layer hooked"](model)
    assert ar(model) == greedy(model) != before


@pytest.mark.parametrize("outside", [True, False])
def test_adapters_in_a_wrapper_are_run(outside: bool, model: PreTrainedModel) -> None:
    """Guards against `get_decoder` of a wrapper that returns the model without its adapters."""
    before = ar(model)
    put_adapter(model)
    wrapped = Adapted(model) if outside else model
    assert ar(wrapped) == greedy(model) != before
    attention = model.model.layers[1].self_attn
    attention.o_proj = attention.o_proj.base_layer
    assert ar(wrapped) == greedy(model) == before


class Embedding(nn.Module):
    """An embedding around another, as adapters wrap them: of its attributes it has only the weight."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.more = nn.Parameter(torch.randn_like(self.weight))

    @property
    def weight(self) -> Tensor:
        return self.base.weight  # type: ignore[return-value]

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight + self.more)


def test_adapters_on_embeddings_are_run(model: PreTrainedModel) -> None:
    """Guards against a model with a wrapped embedding, which does not have the attribute for its number of rows."""
    before = greedy(model)
    torch.manual_seed(3)
    model.model.embed_tokens = Embedding(model.model.embed_tokens)
    assert ar(model) == greedy(model) != before
    with pytest.raises(UserError, match="vocabulary of 24"):
        decode(model, build_method("ar", Options()), [Request([24], 1)], eos_id=-1, pad_id=0)


def test_the_model_is_left_as_it_was(model: PreTrainedModel, tmp_path: Path) -> None:
    """Guards against parameters that share memory after a decoding, which safetensors refuses to save."""

    def state() -> list[tuple[Any, ...]]:
        return [
            (name, id(held), held.data_ptr(), held.untyped_storage().nbytes(), held._version)
            for name, held in (*model.named_parameters(), *model.named_buffers())
        ]

    own, before = {name: len(vars(module)) for name, module in model.named_modules()}, state()
    ar(model)
    assert state() == before
    assert {name: len(vars(module)) for name, module in model.named_modules()} == own
    save_model(model, str(tmp_path / "model.safetensors"))


def test_views_of_a_flat_buffer_stay_views_of_it(model: PreTrainedModel) -> None:
    """Guards against training libraries whose flat weights no longer reach the model after a decoding."""
    parameters = [*model.parameters()]
    flat = torch.cat([parameter.detach().flatten() for parameter in parameters])
    parts = flat.split([parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.data = part.view_as(parameter)
    before = ar(model)
    flat.normal_(generator=torch.Generator().manual_seed(4))
    assert {held.untyped_storage().data_ptr() for held in parameters} == {flat.untyped_storage().data_ptr()}
    assert ar(model) == greedy(model) != before


def test_models_and_their_weights_are_freed(model: PreTrainedModel) -> None:
    """Guards against a model, or its weights from before a conversion, that stay in memory after decoding."""
    clone = copy.deepcopy(model)
    assert ar(clone) == ar(model)
    alive = [weakref.ref(clone), weakref.ref(clone.model.layers[0])]
    del clone
    gc.collect()
    assert [held() for held in alive] == [None, None]
    ar(model)
    storages = [weakref.ref(parameter.untyped_storage()) for parameter in model.parameters()]
    assert all(storage() is not None for storage in storages)
    model.to(torch.float64)
    assert ar(model) == greedy(model)
    gc.collect()
    assert all(storage() is None for storage in storages)


def test_models_that_move_or_are_offloaded(model: PreTrainedModel) -> None:
    """Guards against rotary tables of the old type, and weights that accelerate keeps elsewhere."""
    before = ar(model)
    assert ar(model.double()) == greedy(model)
    assert ar(model.float()) == before
    before = greedy(model)
    ar(model)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert ar(model) == before


LARGE = (1024, 768)


def site_of(weight: Tensor, bias: Tensor | None = None) -> Site:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight, layer.bias = (
        values if values is None or isinstance(values, nn.Parameter) else nn.Parameter(values, requires_grad=False)
        for values in (weight, bias)
    )
    return Site({"layer": layer})


class Marked(Tensor):
    """A subclass, as quantised weights are."""


def test_all_other_weights_are_read_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against small models whose numbers change, and lost gradients, types and subclasses."""
    weight, values = torch.randn(LARGE), torch.randn(2, LARGE[1])
    with torch.no_grad():
        others = {
            "small": (values[:, :32], weight[:32, :32]),
            "many": (torch.randn(65, LARGE[1]), weight),
            "half": (values.half(), weight.half()),
            "none": (values[:0], weight),
            "bf16 that is not packed": (values.bfloat16(), weight.bfloat16()),
        }
        for name, (inputs, matrix) in others.items():
            assert torch.equal(site_of(matrix)(inputs)[0], F.linear(inputs, matrix)), name
        monkeypatch.setenv("MARSBENCH_NATIVE", "1")
        assert bool(linear_module.positions_packed([weight])) == is_native()
        assert not linear_module.positions_packed([weight.as_subclass(Marked)])
    wanted = nn.Parameter(weight)
    site_of(wanted)(values)[0].sum().backward()
    assert wanted.grad is not None
    with FakeTensorMode(), torch.no_grad():
        site = site_of(torch.empty(LARGE))
        assert torch.compile(lambda x: site(x)[0], backend="eager")(torch.empty(2, LARGE[1])).shape == (2, LARGE[0])
