"""Whether a model is plainly a Qwen2 or Llama.

Reading the weights beside the modules needs that nothing hangs on these: no hook, adapter, quantised layer or `forward`
of an instance's own. All of that may come and go between two batches.
"""

from types import ModuleType
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module
from transformers import LlamaForCausalLM, Qwen2ForCausalLM
from transformers.models.llama import modeling_llama as llama
from transformers.models.qwen2 import modeling_qwen2 as qwen2

_ROPES = ("default", "linear", "llama3")  # rotary embeddings that do not depend on the length of the sequence
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_PARTS = {  # a decoder's parts by their names, and their classes' names without the family's
    "": "Model", "layer": "DecoderLayer", "self_attn": "Attention", "mlp": "MLP", "rotary_emb": "RotaryEmbedding",
    **dict.fromkeys(("norm", "input_layernorm", "post_attention_layernorm"), "RMSNorm"),
}  # fmt: skip
_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Kind = dict[str, type[nn.Module]]


def _kind(family: ModuleType, name: str) -> Kind:
    own = {part: getattr(family, name + of) for part, of in _PARTS.items()}
    return {**own, **dict.fromkeys(_LINEAR, nn.Linear), "embed_tokens": nn.Embedding, "layers": nn.ModuleList}


_KINDS: dict[type[nn.Module], Kind] = {Qwen2ForCausalLM: _kind(qwen2, "Qwen2"), LlamaForCausalLM: _kind(llama, "Llama")}
# What the classes themselves do: libraries that patch models put other functions in their place.
_FORWARDS = {module: module.forward for model, kind in _KINDS.items() for module in (model, *kind.values())}
del _FORWARDS[nn.ModuleList]  # which has none


def is_plain(model: Any) -> bool:
    """Whether a model is a Qwen2 or Llama of plain layers, full attention and a fixed rotary embedding."""
    kind = _KINDS.get(type(model))
    devices = {*getattr(model, "hf_device_map", {}).values()}  # one, as of `device_map="cuda"`, is like any other
    if kind is None or len(devices) > 1 or not runs_its_class(model):
        return False
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    if decoder is not model._modules.get("model") or head is None or head is not model._modules.get("lm_head"):
        return False
    # Adapters are found in the first layer, before all the others are looked at.
    if not all(_is_known(kind, name, module) for name, module in decoder.named_modules()):
        return False
    sorts = {(type(parameter), parameter.device, parameter.dtype) for parameter in decoder.parameters()}
    kinds = getattr(decoder.config, "layer_types", None) or ["full_attention"]
    return (
        len(sorts) == 1
        and next(iter(sorts))[0] is nn.Parameter
        and all(module.forward is own and own.__module__ == module.__module__ for module, own in _FORWARDS.items())
        and not any((torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks))
        and getattr(decoder.rotary_emb, "rope_type", None) in _ROPES
        and set(kinds) == {"full_attention"}
    )


def is_plainly_its_class(model: Any) -> bool:
    """Whether a model's own forward pass does nothing but run a known decoder's modules and its LM head."""
    kind = _KINDS.get(type(model))
    return kind is not None and type(model.get_decoder()) is kind[""] and runs_its_class(model)


def runs_its_class(module: Any) -> bool:
    """Whether calling a module runs its class's `forward`, and nothing before or after it."""
    own = vars(module)
    return not ("forward" in own or "_hf_hook" in own or any(own[name] for name in _HOOKS))


def is_leaf(module: Any) -> bool:
    """Whether a module runs its class's `forward` and has no parts: no parametrization either."""
    return not module._modules and runs_its_class(module)


def _is_known(kind: Kind, name: str, module: nn.Module) -> bool:
    name = name.rpartition(".")[2]
    known = kind.get("layer" if name.isdigit() else name)
    return is_leaf(module) if name == "act_fn" else type(module) is known and runs_its_class(module)
