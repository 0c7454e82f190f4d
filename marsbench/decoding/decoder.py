"""The forward pass that all methods share: token entries in, hidden states and cached keys and values out.

`LeanDecoder` runs Qwen2 and Llama checkpoints with the weights of their transformers modules but fewer, larger
operations, and leaves fillers out: a window that is wide for one row costs nothing in the others. Any other
architecture runs through its own modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaModel, Qwen2Model

from marsbench.decoding.cache import RaggedCache
from marsbench.decoding.rows import Answer, Window

_ROPES = ("default", "linear", "llama3")  # rotary embeddings that do not depend on the length of the sequence


class Decoder(Protocol):
    """A model without its LM head."""

    def __call__(self, cache: RaggedCache, window: Window, relative: Tensor) -> Answer:
        """Run a window.

        Args:
            cache: prepared for the window.
            window: the entries.
            relative: integer [N, S], which entry each slot of a row holds: -1 for what was cached before the window,
                which all entries see, W for what lies behind it, which none does.
        """
        ...


def decoder_of(model: Any) -> Decoder:
    """The decoder of a causal language model: lean where its architecture is known, else its own modules."""
    try:
        known = _LEAN.get(model)
        if known is not None and known.is_current():
            return known
        if _is_known(model):
            return _LEAN.setdefault(model, LeanDecoder(model)) if known is None else _renewed(model)
    except TypeError:  # a wrapper that cannot be referred to weakly
        pass
    return ModuleDecoder(model)


class ModuleDecoder:
    """The model's own modules, fillers and all."""

    def __init__(self, model: Any) -> None:
        self._decoder, self._lm_head = model.get_decoder(), model.get_output_embeddings()

    def __call__(self, cache: RaggedCache, window: Window, relative: Tensor) -> Answer:
        """Run a window; see `Decoder`."""
        hidden: Tensor = self._decoder(
            input_ids=window.input_ids,
            position_ids=window.position.clamp(min=0),
            attention_mask=additive_mask(window.visible, relative, self._decoder.dtype),
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        return Answer(hidden, self._lm_head)


class LeanDecoder:
    """Qwen2 or Llama with fused projections, over the real entries of a window only.

    The query heads that share a key head are folded into the query length, so that keys and values are never repeated.
    The fused weights share their memory with the model's own, which go on working.
    """

    def __init__(self, model: Any) -> None:
        decoder = model.get_decoder()
        self._lm_head = model.get_output_embeddings()
        self._embed, self._norm, self._rotary = decoder.embed_tokens, decoder.norm, decoder.rotary_emb
        self._layers = [_Layer(layer) for layer in decoder.layers]
        self._cos = self._sin = torch.empty(0)

    def is_current(self) -> bool:
        """Whether the model still has the weights that were fused."""
        return all(layer.is_current() for layer in self._layers)

    def __call__(self, cache: RaggedCache, window: Window, relative: Tensor) -> Answer:
        """Run a window; see `Decoder`."""
        rows, width = shape = window.input_ids.shape
        real = None if window.real is None else window.real.flatten().nonzero().squeeze(1)
        input_ids, position = window.input_ids.flatten(), window.position.flatten()
        if real is not None:
            input_ids, position = input_ids[real], position[real]
            cache.narrow(real)
        hidden = self._embed(input_ids)
        cos, sin = self._rotation(position, relative.shape[1], hidden)
        mask = additive_mask(window.visible, relative, hidden.dtype, copies=self._layers[0].group)
        for number, layer in enumerate(self._layers):
            hidden = layer(number, hidden, cos, sin, mask, cache, shape, real)
        hidden = _rms_norm(self._norm, hidden)
        return Answer(_spread(hidden, real, rows * width).view(rows, width, -1), self._lm_head)

    def _rotation(self, position: Tensor, most: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [M, 1, head size] at positions [M] below `most`; the first half of the sines is negated."""
        if most > len(self._cos):
            places = torch.arange(2 * most, device=position.device)
            cos, sin = self._rotary(like.new_empty(1, 1, 1), places.unsqueeze(0))
            low, high = sin[0].chunk(2, -1)
            self._cos, self._sin = cos[0].unsqueeze(1), torch.cat([-low, high], -1).unsqueeze(1)
        return self._cos[position], self._sin[position]


class _Layer:
    """One transformer layer."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._norms = layer.input_layernorm, layer.post_attention_layernorm
        self._qkv = _Fused([attention.q_proj, attention.k_proj, attention.v_proj])
        self._gate_up = _Fused([mlp.gate_proj, mlp.up_proj])
        self._out, self._down, self._activation = attention.o_proj, mlp.down_proj, mlp.act_fn
        self._size, self._scale = attention.head_dim, attention.scaling
        self._heads = attention.q_proj.out_features // self._size
        self._kv_heads = attention.k_proj.out_features // self._size
        self.group = self._heads // self._kv_heads  # query heads per key head

    def is_current(self) -> bool:
        """Whether the model still has the weights that were fused."""
        return self._qkv.is_current() and self._gate_up.is_current()

    def __call__(
        self,
        number: int,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor,
        cache: RaggedCache,
        shape: torch.Size,
        real: Tensor | None,
    ) -> Tensor:
        """Hidden states [M, H] of the real entries to those after the layer."""
        qkv = self._qkv(_rms_norm(self._norms[0], hidden)).view(len(hidden), -1, self._size)
        turning = qkv[:, : self._heads + self._kv_heads]
        turned = torch.addcmul(turning * cos, turning.roll(self._size // 2, -1), sin)
        keys, values = cache.write(number, turned[:, self._heads :], qkv[:, self._heads + self._kv_heads :])
        queries = turned[:, : self._heads]
        found = self._attend(_spread(queries, real, shape[0] * shape[1]), keys, values, mask, shape)
        hidden = hidden + self._out(found if real is None else found[real])
        gate, up = self._gate_up(_rms_norm(self._norms[1], hidden)).chunk(2, -1)
        after: Tensor = hidden + self._down(self._activation(gate) * up)
        return after

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, shape: torch.Size) -> Tensor:
        """Attention of queries [N * W, heads, size] over keys and values [N, S, key heads, size]: [N * W, H]."""
        rows, width = shape
        folded = queries.view(rows, width, self._kv_heads, self.group, self._size).permute(0, 2, 3, 1, 4)
        found = F.scaled_dot_product_attention(
            folded.reshape(rows, self._kv_heads, self.group * width, self._size),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=mask,
            scale=self._scale,
        )
        unfolded = found.view(rows, self._kv_heads, self.group, width, self._size).permute(0, 3, 1, 2, 4)
        return unfolded.reshape(rows * width, -1)


class _Fused:
    """Several linear maps of the same input as one; their weights become parts of one tensor."""

    def __init__(self, parts: list[nn.Linear]) -> None:
        self._parts = parts
        self._weight = _joined([part.weight for part in parts])
        biases = [part.bias for part in parts if part.bias is not None]
        self._bias = _joined(biases) if biases else None
        self._shared = self._places()

    def is_current(self) -> bool:
        """Whether the modules still share their weights' memory with the fused one."""
        return self._shared == self._places()

    def _places(self) -> list[int]:
        parameters = [parameter for part in self._parts for parameter in (part.weight, part.bias)]
        return [0 if parameter is None else parameter.data_ptr() for parameter in parameters]

    def __call__(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self._weight, self._bias)


@torch.inference_mode(False)  # parameters of inference tensors could never be trained again
@torch.no_grad()
def _joined(parameters: Sequence[Tensor]) -> Tensor:
    """One tensor that holds the parameters one after the other; they become views of it."""
    whole = torch.cat([parameter.detach() for parameter in parameters])
    for parameter, part in zip(parameters, torch.split(whole, [len(one) for one in parameters]), strict=True):
        parameter.data = part
    return whole


_LEAN: WeakKeyDictionary[Any, LeanDecoder] = WeakKeyDictionary()


def _renewed(model: Any) -> LeanDecoder:
    """Fuse again, after the weights have been moved or replaced."""
    _LEAN[model] = LeanDecoder(model)
    return _LEAN[model]


def _is_known(model: Any) -> bool:
    """Whether a model is a Qwen2 or Llama of plain linear layers, full attention and a fixed rotary embedding."""
    decoder = model.get_decoder()
    if type(decoder) not in (Qwen2Model, LlamaModel) or hasattr(model, "hf_device_map"):
        return False
    attentions = [layer.self_attn for layer in decoder.layers]
    linears = [layer for one in attentions for layer in (one.q_proj, one.k_proj, one.v_proj)]
    linears += [part for layer in decoder.layers for part in (layer.mlp.gate_proj, layer.mlp.up_proj)]
    biased = {one.q_proj.bias is None for one in attentions} | {one.k_proj.bias is None for one in attentions}
    return (
        all(type(linear) is nn.Linear for linear in linears)
        and len(biased) == 1
        and all(layer.mlp.gate_proj.bias is None for layer in decoder.layers)
        and getattr(decoder.rotary_emb, "rope_type", None) in _ROPES
        and set(getattr(model.config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
    )


def _rms_norm(norm: Any, hidden: Tensor) -> Tensor:
    return F.rms_norm(hidden, (hidden.shape[-1],), norm.weight, norm.variance_epsilon)


def additive_mask(visible: Tensor, relative: Tensor, dtype: torch.dtype, *, copies: int = 1) -> Tensor:
    """What attention adds to its scores, [N, 1, copies * W, S]: 0, or the lowest number where a slot is hidden.

    Args:
        visible: bool [W, W], which entries of its window an entry sees.
        relative: integer [N, S], which entry a slot holds: -1 is seen by all entries, W by none.
        dtype: of the result.
        copies: how often to repeat the entries.
    """
    table = torch.full(
        (copies, len(visible), len(visible) + 2), torch.finfo(dtype).min, dtype=dtype, device=relative.device
    )
    table[:, :, 0] = 0
    table[:, :, 1:-1].masked_fill_(visible, 0)
    return table.flatten(0, 1)[:, relative + 1].transpose(0, 1).unsqueeze(1)


def _spread(values: Tensor, real: Tensor | None, entries: int) -> Tensor:
    """Values [M, ...] of the real entries at their places among all `entries`, zeros at fillers."""
    if real is None:
        return values
    return values.new_zeros(entries, *values.shape[1:]).index_copy_(0, real, values)
