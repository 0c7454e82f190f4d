"""The forward pass that all methods share: token entries in, hidden states and cached keys and values out.

`LeanDecoder` runs Qwen2 and Llama checkpoints with the weights of their transformers modules, or packed copies of them,
but fewer, larger operations, and leaves fillers out. Whatever else hangs on a model, or is one, runs through its own
modules. A batch asks for its decoder once, when it begins: `decoder_of` looks at the model then, and steps do not.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from marsbench.forward.adapter import Adapted, masks_of, parted
from marsbench.forward.between import NativePass, Norm, Pass, Shape, is_for, spread
from marsbench.forward.cache import RaggedCache
from marsbench.forward.draft_head import DraftHead, HeadInUse, packed
from marsbench.forward.joined import JoinedPass, join_sites
from marsbench.forward.linear import Site, pack_sites
from marsbench.forward.modules import ModuleDecoder, check_by_forward
from marsbench.forward.native import product, unit_norm
from marsbench.forward.plain import is_leaf, is_plain, is_plainly_its_class
from marsbench.forward.window import Answer, Window, makes_a_graph, without_cudnn_attention

_SILU = (nn.SiLU, type(ACT2FN["silu"]))  # what a model's activation is, if it is not strange


# A model without its LM head: what it answers to a window, for which the cache has been prepared. The tensor, integer
# [N, S], says which entry each slot of a row holds: -1 for what was cached before the window, which all entries see, W
# for what lies behind it, which none does.
Decoder = Callable[[RaggedCache, Window, Tensor], Answer]


def decoder_of(model: Any) -> Decoder:
    """The decoder of a causal language model as it is now; `UserError` for one that does what is not known here."""
    without_cudnn_attention()
    if not isinstance(model, Adapted):
        model = getattr(model, "_orig_mod", model)  # what `torch.compile` has wrapped: its parts are the same
    alone, _ = parted(model)
    if is_plain(alone):
        lean = _LEAN.get(model)
        if lean is None or lean.parts != _parts(alone):  # it was made of other modules
            _LEAN[model] = lean = LeanDecoder(model)
        lean.follow()
        return lean
    with suppress(TypeError):  # a wrapper that cannot be referred to weakly
        _LEAN.pop(model, None)  # it holds on to modules that may be gone
    decoder = ModuleDecoder(model)
    if not is_plainly_its_class(alone):
        check_by_forward(alone)
    return decoder


class LeanDecoder:
    """Qwen2 or Llama over the real entries of a window only, with the weights that its modules have at every call."""

    def __init__(self, model: Any) -> None:
        model, self._adapter = parted(model)
        self.parts = _parts(model)
        decoder = model.get_decoder()
        self._lm_head = _Head(model.get_output_embeddings())
        self._embed, self._norm, self._rotary = decoder.embed_tokens, Norm(decoder.norm), decoder.rotary_emb
        self._layers = [_Layer(number, layer) for number, layer in enumerate(decoder.layers)]
        self._sites = [site for layer in self._layers for site in layer.sites]
        attention = decoder.layers[0].self_attn
        size = attention.head_dim
        heads, kv_heads = (part.out_features // size for part in (attention.q_proj, attention.k_proj))
        self._shape = Shape(heads, kv_heads, size, attention.scaling)
        self._is_native = False
        self._with_head = [*self._sites, *([self._lm_head.site] if self._lm_head.site else [])]
        self._packed = 0  # how often copies were made or given up
        self._vector = torch.empty(0)  # the adapter's, on the device of the model and of its type, as its maps are
        self._draft_head: DraftHead | None = None  # the adapter's, likewise
        self._packed_head: DraftHead | None = None  # the same as `linear.cpp` reads it, where it can be
        self._beside: tuple[object, ...] = ()  # what the maps were laid out for
        self._laid = 0  # how often they were
        self._cos = self._sin = torch.empty(0)
        self._frequencies: Tensor | None = None
        self._turned_by: tuple[object, ...] = ()  # what the table was made for

    @property
    def is_bare(self) -> bool:
        """Whether nothing hangs on the LM head either."""
        return self._lm_head.plain is not None

    @property
    def natively(self) -> tuple[bool, ...]:
        """Which of its maps are computed in C++: others become another graph."""
        return tuple(site.copy is not None for site in self._with_head)

    @property
    def rounds_alike(self) -> bool:
        """Whether an entry is rounded in one way, whatever stands beside it: all of it is computed in C++."""
        return self._is_native and self._lm_head.plain is not None and all(self.natively)

    def addresses(self) -> tuple[int, ...]:
        """Where everything lies that a step reads of the model; what it reads of an adapter is told by a number."""
        read = [tensor for module in self.parts for tensor in (*module._parameters.values(), *module._buffers.values())]
        return (*(tensor.data_ptr() for tensor in read if tensor is not None), self._laid)

    def follow(self) -> None:
        self._lm_head.follow()
        join_sites(self._sites)
        self._packed += pack_sites(self._with_head)
        like = self._embed._parameters["weight"]
        is_packed = all(site.copy is not None for site in self._sites)
        beside = like.device, like.dtype, self._packed
        if self._adapter is not None and self._beside != beside:  # its maps are laid beside the layers anew
            adapter = self._adapter.like(like)
            self._vector, self._draft_head = adapter.vector, adapter.head
            self._packed_head = packed(adapter.head) if is_packed else None
            for site in self._sites:
                site.adapt(adapter.maps, like)
            self._beside, self._laid = beside, self._laid + 1
        sizes = like.shape[1], self._layers[0].down.weights[0].shape[1]
        self._is_native = is_packed and is_for(self._shape, sizes)
        frequencies = self._rotary._buffers["inv_freq"]
        turned_by = (None if frequencies.is_inference() else frequencies._version, like.dtype, like.device)
        if frequencies is not self._frequencies or turned_by != self._turned_by:
            self._cos = self._sin = torch.empty(0)
            self._frequencies, self._turned_by = frequencies, turned_by

    def __call__(self, cache: RaggedCache, window: Window, relative: Tensor) -> Answer:
        rows, width = window.input_ids.shape
        real = None if window.real is None else window.real.flatten().nonzero().squeeze(1)
        input_ids, position = window.input_ids.flatten(), window.position.flatten()
        if real is not None:
            input_ids, position = input_ids[real], position[real]
            cache.narrow(real)
        hidden = self._embed(input_ids)
        masks = None if self._adapter is None else masks_of(window)
        gate = None  # [M, 1], what the adapter's change is multiplied by: 1 at masks, 0 at tokens
        if masks is not None:
            gate = (masks.view(-1, 1) if real is None else masks.view(-1, 1)[real]).to(hidden.dtype)
            hidden = torch.addcmul(hidden, gate, self._vector)
        cos_sin = self._rotation(position, relative.shape[1], hidden)
        kind: type[Pass] = Pass
        if not torch.is_grad_enabled():
            kind = NativePass if self._is_native else Pass if cache.parts is None else JoinedPass
        run = kind(self._shape, cache, window, relative, real, cos_sin, hidden.dtype)
        change: Tensor | None = None
        for layer in self._layers:
            hidden, change = layer(run, hidden, change, gate)
        _, hidden = run.norm(self._norm, hidden, change)
        answer = Answer(spread(hidden, real, rows * width).view(rows, width, -1), self._lm_head)
        if self._draft_head is None:
            return answer
        in_use = HeadInUse(self._draft_head, self._embed, self._lm_head, self._lm_head.rows)
        if self._packed_head is not None and not torch.is_grad_enabled():
            normed = unit_norm if self._is_native else in_use.normed
            in_use = replace(in_use, head=self._packed_head, linear=product, normed=normed)
        return replace(answer, head=in_use)

    def _rotation(self, position: Tensor, most: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [M, 1, head size] at positions [M] below `most`; the first half of the sines is negated."""
        frequencies = self._rotary._buffers["inv_freq"]
        if makes_a_graph():  # a table would be looked up in as many operations as it saves, and moves when it grows
            turned = position.unsqueeze(1) * frequencies.float()
            cos, sin = (part * self._rotary.attention_scaling for part in (turned.cos(), turned.sin()))
            both = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
            return both[0].to(like.dtype).unsqueeze(1), both[1].to(like.dtype).unsqueeze(1)
        if most > len(self._cos):
            places = torch.arange(2 * most, device=position.device)
            cos, sin = self._rotary(like.new_empty(1, 1, 1), places.unsqueeze(0))
            low, high = sin[0].chunk(2, -1)
            self._cos, self._sin = cos[0].unsqueeze(1), torch.cat([-low, high], -1).unsqueeze(1)
        return self._cos[position], self._sin[position]


class _Layer:
    def __init__(self, number: int, layer: Any) -> None:
        self._number = number

        def site(part: str, *outputs: Sequence[str]) -> Site:
            layers = getattr(layer, part)._modules
            return Site(*({f"layers.{number}.{part}.{name}": layers[name] for name in output} for output in outputs))

        self.attention, self.out = site("self_attn", ("q_proj", "k_proj", "v_proj")), site("self_attn", ("o_proj",))
        self.mlp, self.down = site("mlp", ("gate_proj",), ("up_proj",)), site("mlp", ("down_proj",))
        self.sites = self.attention, self.out, self.mlp, self.down
        activation = layer.mlp.act_fn
        self._norms = Norm(layer.input_layernorm), Norm(layer.post_attention_layernorm)
        self._activation: Callable[[Tensor], Tensor] | None = None if type(activation) in _SILU else activation

    def __call__(
        self, run: Pass, hidden: Tensor, change: Tensor | None, gate: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states [M, H] of the real entries after the layer, and the change that is yet to be added to them."""
        hidden, normed = run.norm(self._norms[0], hidden, change)
        (qkv,) = self.attention(normed, gate)
        hidden, change = run.project(self.out, run.attention(self._number, qkv), gate, hidden)
        hidden, normed = run.norm(self._norms[1], hidden, change)
        opening, up = self.mlp(normed, gate)
        acted = run.swiglu(opening, up) if self._activation is None else self._activation(opening) * up
        return run.project(self.down, acted, gate, hidden)


class _Head:
    """The LM head: called as the module it is, unless that is a plain linear layer that nothing hangs on."""

    def __init__(self, module: nn.Module) -> None:
        self._module: Callable[[Tensor], Tensor] = module
        is_linear = type(module) is nn.Linear and type(module.weight) is nn.Parameter
        self.site = Site({"lm_head": module}) if is_linear else None
        self.plain: Site | None = None  # the same, where nothing hangs on the module

    def follow(self) -> None:
        self.plain = self.site if is_leaf(self._module) else None

    def __call__(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., H] to logits [..., V]."""
        if self.plain is None:
            return self._module(hidden)
        if self.plain.copy is None:  # values may be of any shape
            return self.plain(hidden)[0]
        (logits,) = self.plain(hidden.flatten(0, -2))
        return logits.view(*hidden.shape[:-1], logits.shape[1])

    @property
    def rows(self) -> Tensor | None:
        """Its weight [V, H], where nothing else makes logits of states."""
        return None if self.plain is None else self.plain.weights[0]


_LEAN: WeakKeyDictionary[Any, LeanDecoder] = WeakKeyDictionary()  # model -> what was made of it


def _parts(model: Any) -> list[nn.Module]:
    return [*model.get_decoder().modules(), model.get_output_embeddings()]
