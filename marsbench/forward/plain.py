"""Whether a model is plainly a Qwen2 or Llama.

Whoever skips a model's modules and reads their weights must know that nothing hangs on them: no hook, no adapter, no
quantised layer, no `forward` of an instance's own. All of that may come and go between two batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules import module as torch_module
from transformers import LlamaForCausalLM, LlamaModel, Qwen2ForCausalLM, Qwen2Model
from transformers.models.llama import modeling_llama as llama
from transformers.models.qwen2 import modeling_qwen2 as qwen2

_ROPES = ("default", "linear", "llama3")  # rotary embeddings that do not depend on the length of the sequence


class Kind(NamedTuple):
    """The classes of a model's parts."""

    decoder: type[nn.Module]
    layer: type[nn.Module]
    attention: type[nn.Module]
    mlp: type[nn.Module]
    norm: type[nn.Module]
    rotary: type[nn.Module]


_KINDS: dict[type[nn.Module], Kind] = {
    Qwen2ForCausalLM: Kind(
        Qwen2Model,
        qwen2.Qwen2DecoderLayer,
        qwen2.Qwen2Attention,
        qwen2.Qwen2MLP,
        qwen2.Qwen2RMSNorm,
        qwen2.Qwen2RotaryEmbedding,
    ),
    LlamaForCausalLM: Kind(
        LlamaModel,
        llama.LlamaDecoderLayer,
        llama.LlamaAttention,
        llama.LlamaMLP,
        llama.LlamaRMSNorm,
        llama.LlamaRotaryEmbedding,
    ),
}
# What the classes themselves do: libraries that patch models put other functions in their place.
_FORWARDS = [(one, one.forward) for model, kind in _KINDS.items() for one in (model, *kind, nn.Linear, nn.Embedding)]
_GLOBAL_HOOKS = (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def is_plain(model: Any) -> bool:
    """Whether a model is a Qwen2 or Llama of plain linear layers, full attention and a fixed rotary embedding.

    Its LM head may be anything: it can be called.
    """
    kind = _KINDS.get(type(model))
    devices = {*getattr(model, "hf_device_map", {}).values()}  # one, as of `device_map="cuda"`, is like any other
    if kind is None or len(devices) > 1 or not runs_its_class(model):
        return False
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    if decoder is not model._modules.get("model") or head is None or head is not model._modules.get("lm_head"):
        return False
    # Adapters are found in the first layer, before all the others are looked at.
    return all(_are_of_their_class(kind, decoder)) and _has_fixed_attention(decoder) and not any(_GLOBAL_HOOKS)


def is_plainly_its_class(model: Any) -> bool:
    """Whether a model's own forward pass does nothing but run a known decoder's modules and its LM head."""
    kind = _KINDS.get(type(model))
    return kind is not None and type(model.get_decoder()) is kind.decoder and runs_its_class(model)


def runs_its_class(module: Any) -> bool:
    """Whether calling a module runs its class's `forward`, and nothing before or after it."""
    own = vars(module)
    return not ("forward" in own or "_hf_hook" in own or any(own[name] for name in _HOOKS))


def is_leaf(module: Any) -> bool:
    """Whether a module runs its class's `forward` and has no parts: no parametrization either."""
    return not module._modules and runs_its_class(module)


def _are_of_their_class(kind: Kind, decoder: Any) -> Iterator[bool]:
    """Whether the decoder's parts are what they seem, part by part."""
    yield type(decoder) is kind.decoder and runs_its_class(decoder)
    yield _is_leaf(decoder.norm, kind.norm) and _is_leaf(decoder.rotary_emb, kind.rotary)
    yield _is_leaf(decoder.embed_tokens, nn.Embedding)
    yield type(decoder.layers) is nn.ModuleList and runs_its_class(decoder.layers) and len(decoder._modules) == 4
    for layer in decoder.layers:
        attention, mlp = layer.self_attn, layer.mlp
        yield all(
            type(one) is known and runs_its_class(one)
            for one, known in ((layer, kind.layer), (attention, kind.attention), (mlp, kind.mlp))
        )
        linears = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
        yield all(_is_leaf(one, nn.Linear) for one in (*linears, mlp.gate_proj, mlp.up_proj, mlp.down_proj))
        yield all(_is_leaf(one, kind.norm) for one in (layer.input_layernorm, layer.post_attention_layernorm))
        yield len(layer._modules) == 4 and len(attention._modules) == 4 and len(mlp._modules) == 4
        yield _is_leaf(mlp.act_fn, type(mlp.act_fn))
    parameters = [*decoder.parameters()]
    yield {type(parameter) for parameter in parameters} == {nn.Parameter}
    yield len({(parameter.device, parameter.dtype) for parameter in parameters}) == 1
    yield all(one.forward is known and known.__module__ == one.__module__ for one, known in _FORWARDS)


def _is_leaf(module: Any, known: type[nn.Module]) -> bool:
    return type(module) is known and is_leaf(module)


def _has_fixed_attention(decoder: Any) -> bool:
    """Whether every entry sees all before it, and is turned by its position alone."""
    kinds = getattr(decoder.config, "layer_types", None) or ["full_attention"]
    return getattr(decoder.rotary_emb, "rope_type", None) in _ROPES and set(kinds) == {"full_attention"}
