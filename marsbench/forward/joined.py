"""The passes of a GPU: few operations a layer, since each is launched by itself and takes microseconds at least.

Layers that read the same values are one product: their weights lie one below the other in memory, once, and the
modules' parameters are views of it. Keys and values are written at once, and what a layer adds is added by its last
product. A kernel of attention gives one block to each key head, which leaves most of a GPU idle: so parts of the keys
attend as rows of a batch, each with the logarithm of its sum of exponentials, and are weighed by that.
"""

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from marsbench.forward.between import Pass
from marsbench.forward.cache import Parts
from marsbench.forward.linear import Joined, Site
from marsbench.forward.window import ALIGNED, additive_mask

_SHORTEST = 64  # slots of a part, about
_BLOCKS = 256  # parts times key heads times rows, from which on a GPU is busy


def joins(device: torch.device) -> bool:
    return device.type == "cuda"


def join_sites(sites: Iterable[Site]) -> None:
    """Have the layers of each site lie one below the other; their parameters stay, and become views."""
    for site in sites:
        weights, biases = site.weights, site.biases
        if site.joined is not None and all(map(_lie_in, site.joined, (weights, biases))):
            continue
        site.joined = None
        plain = all(type(weight) is nn.Parameter and weight.is_contiguous() for weight in weights)
        if not plain or not joins(weights[0].device) or len({bias is None for bias in biases}) > 1:
            continue
        with torch.inference_mode(False), torch.no_grad():
            bias = None if biases[0] is None else _one_below_the_other(biases)
            site.joined = Joined(_one_below_the_other(weights), bias)


def _one_below_the_other(parts: Sequence[Any]) -> Tensor:
    """Parameters in one piece of memory, which they are views of from now on."""
    if len(parts) == 1:
        return parts[0].detach()  # type: ignore[no-any-return]
    whole = torch.cat([part.detach() for part in parts])
    for part, place in zip(parts, torch.split(whole, [len(part) for part in parts]), strict=True):
        part.data = place
    return whole


def _lie_in(whole: Tensor | None, parts: Sequence[Any]) -> bool:
    if whole is None:
        return not any(part is not None for part in parts)
    places = torch.split(whole, [len(part) for part in parts]) if sum(map(len, parts)) == len(whole) else ()
    return bool(places) and all(
        part.data_ptr() == place.data_ptr() and (part.shape, part.dtype) == (place.shape, place.dtype)
        for part, place in zip(parts, places, strict=True)
    )


def parts_of(slots: int, heads: int) -> Parts:
    """For so many slots at least, and key heads of all rows together; a part's length is a multiple of `ALIGNED`."""
    wanted = max(1, min(slots // _SHORTEST, _BLOCKS // heads))
    length = -(-slots // (wanted * ALIGNED)) * ALIGNED
    return Parts(-(-slots // length), length)


def parts_for(keys: Tensor, rows: int, slots: int) -> Parts | None:
    """How a cache of so many rows and slots is parted, for keys [..., heads, size] like these; None = not at all."""
    if not joins(keys.device):
        return None
    heads, size = keys.shape[-2:]
    return parts_of(slots, rows * heads if parts_attend(keys.device, keys.dtype, size) else _BLOCKS)


class JoinedPass(Pass):
    """A pass in fixed shapes, over a cache that holds keys and values beside each other."""

    def __post_init__(self) -> None:
        self._rows, self._width = self.window.input_ids.shape
        shape, parts, device = self.shape, self.cache.parts, self.relative.device
        assert parts is not None, "keys and values lie beside each other"
        self._parts = parts
        behind = parts.number * parts.length - self.relative.shape[1]
        relative = F.pad(self.relative, (0, behind), value=self._width)
        mask = additive_mask(self.window.visible, relative, self.dtype, copies=shape.group)
        queries = shape.group * self._width
        if parts.number > 1:
            mask = mask.view(self._rows, 1, -1, *parts).permute(0, 3, 1, 2, 4).flatten(0, 1).contiguous()
        self._mask = mask.expand(-1, shape.kv_heads, queries, -1)
        cos, sin = self.cos_sin
        turned, still = (len(cos), shape.heads + shape.kv_heads, -1), (len(cos), shape.kv_heads, shape.size)
        self._cos = torch.cat([cos.expand(*turned), torch.ones(still, dtype=cos.dtype, device=device)], 1)
        self._sin = torch.cat([sin.expand(*turned), torch.zeros(still, dtype=sin.dtype, device=device)], 1)

    def norm(self, by: Any, hidden: Tensor, change: Tensor | None) -> tuple[Tensor, Tensor]:
        """See `Pass`; the change has been added already."""
        return hidden, F.rms_norm(hidden, (hidden.shape[1],), by.parameters["weight"], by.epsilon)

    def project(self, site: Site, values: Tensor, gate: Tensor | None, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """See `Pass`: added to the hidden states in place, by the product itself where it can be."""
        return site.add_to(hidden, values, gate), None

    def attention(self, layer: int, qkv: Tensor) -> Tensor:
        shape = self.shape
        values = qkv.view(len(qkv), -1, shape.size)
        turned = torch.addcmul(values * self._cos, values.roll(shape.size // 2, -1), self._sin)
        queries, both = turned.split_with_sizes([shape.heads, 2 * shape.kv_heads], 1)
        stores = self.cache.write_both(layer, both.view(-1, 2, shape.kv_heads, shape.size))
        if self._parts.number == 1:
            return self._attend(queries, *stores)
        rows, width, group, (count, length) = self._rows, self._width, shape.group, self._parts
        folded = queries.view(rows, 1, width, shape.kv_heads, group, shape.size).permute(0, 1, 3, 4, 2, 5)
        folded = folded.expand(-1, count, -1, -1, -1, -1).reshape(rows * count, shape.kv_heads, -1, shape.size)
        keys, values = (store.view(rows * count, length, *store.shape[2:]).transpose(1, 2) for store in stores)
        out, sums = attend(folded, keys, values, self._mask, shape.scale)
        weights = sums.view(rows, count, shape.kv_heads, group, width, 1).softmax(1)
        out = out.view(rows, count, shape.kv_heads, group, width, shape.size)
        # In the order in which the next product reads: entries, then heads.
        weighed = out.permute(0, 4, 2, 3, 1, 5) * weights.permute(0, 4, 2, 3, 1, 5)
        return weighed.sum(4).view(rows * width, -1).to(qkv.dtype)


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention [B, heads, Q, size], and fp32 [B, heads, Q] the logarithm of each query's sum of exponentials."""
    if queries.device.type == "cpu":
        out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
            queries, keys, values, attn_mask=mask, scale=scale
        )
    else:
        out, sums, *_ = torch.ops.aten._scaled_dot_product_efficient_attention.default(
            queries, keys, values, mask, True, scale=scale
        )
    return out, sums[..., : queries.shape[2]]


@cache
def parts_attend(device: torch.device, dtype: torch.dtype, size: int) -> bool:
    """Whether parts of keys, weighed, come to what all of them do on a device; asked before anything is recorded."""
    try:
        queries, keys, values = (torch.randn(1, 2, many, size, device=device, dtype=dtype) for many in (7, 64, 64))
        mask = torch.zeros(1, 1, 1, 32, device=device, dtype=dtype).expand(2, 2, 7, 32)
        whole = F.scaled_dot_product_attention(queries, keys, values, scale=0.1)
        keys, values = (torch.cat(store.chunk(2, 2)) for store in (keys, values))
        out, sums = attend(queries.expand(2, -1, -1, -1), keys, values, mask, 0.1)
        merged = (out * sums.softmax(0).unsqueeze(-1)).sum(0, keepdim=True)
        return bool((merged - whole).abs().max() < 0.02)
    except RuntimeError:  # a kernel that is not there
        return False
