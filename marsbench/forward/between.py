"""What lies between the linear maps of a layer: norms, rotation and attention, activation.

By operations of torch everywhere, or by `between.cpp` for models whose weights are packed on a CPU: there, some twenty
small operations a layer take as long as the maps do. By it an entry's result does not depend on what stands beside it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from marsbench.forward.cache import RaggedCache
from marsbench.forward.linear import Site
from marsbench.forward.window import Window, additive_mask

_LANES = 16  # values that `between.cpp` takes at a time, at most
_HEAD_SIZES = (16, 32, 64, 80, 96, 128, 256)


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    size: int  # of a head
    scale: float

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


class Norm:
    def __init__(self, module: Any) -> None:
        self.parameters: dict[str, Tensor] = module._parameters  # its weight [H], as it is at the moment
        self.epsilon: float = module.variance_epsilon
        self.constant = torch.tensor(self.epsilon)


@dataclass(eq=False)
class Pass:
    """One forward pass over the real entries of a window, M of N * W, by operations of torch."""

    shape: Shape
    cache: RaggedCache
    window: Window
    relative: Tensor  # see `Decoder`
    real: Tensor | None  # [M], the real entries; None = all
    cos_sin: tuple[Tensor, Tensor]  # cosines and sines [M, 1, size] of theirs, the first half of the sines negated
    dtype: torch.dtype

    def __post_init__(self) -> None:
        self._rows, self._width = self.window.input_ids.shape
        self._mask = additive_mask(self.window.visible, self.relative, self.dtype, copies=self.shape.group)

    def norm(self, by: Norm, hidden: Tensor, change: Tensor | None) -> tuple[Tensor, Tensor]:
        """Hidden states [M, H] with a change added, and these normalised."""
        hidden = hidden if change is None else hidden + change
        if hidden.dtype is torch.float32 and hidden.device.type == "cpu":  # where torch's own takes more operations
            square = torch.linalg.vecdot(hidden, hidden)
            scale = torch.add(by.constant, square, alpha=1 / hidden.shape[1]).rsqrt_()
            return hidden, (hidden * scale.unsqueeze(1)) * by.parameters["weight"]
        return hidden, F.rms_norm(hidden, (hidden.shape[1],), by.parameters["weight"], by.epsilon)

    def project(self, site: Site, values: Tensor, gate: Tensor | None, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """Hidden states [M, H], and the change that a site's layer makes of values [M, in], to be added later."""
        return hidden, site(values, gate)[0]

    def attention(self, layer: int, qkv: Tensor) -> Tensor:
        """Queries, keys and values [M, (heads + 2 key heads) * size] of a layer to what each entry finds, [M, H]."""
        shape, (cos, sin) = self.shape, self.cos_sin
        sizes = [shape.heads + shape.kv_heads, shape.kv_heads]
        turning, values = qkv.view(len(qkv), -1, shape.size).split_with_sizes(sizes, 1)
        turned = torch.addcmul(turning * cos, turning.roll(shape.size // 2, -1), sin)
        queries, keys = turned.split_with_sizes([shape.heads, shape.kv_heads], 1)
        keys, values = self.cache.write(layer, keys, values)
        out = self._attend(spread(queries, self.real, self._rows * self._width), keys, values)
        return out if self.real is None else out[self.real]

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attention of queries [N * W, heads, size] over keys and values [N, S, key heads, size]: [N * W, H]."""
        rows, width, shape = self._rows, self._width, self.shape
        if width == 1:  # heads that share a key head lie beside each other already
            folded = queries.view(rows, shape.kv_heads, shape.group, shape.size)
        else:
            parted = queries.view(rows, width, shape.kv_heads, shape.group, shape.size).permute(0, 2, 3, 1, 4)
            folded = parted.reshape(rows, shape.kv_heads, shape.group * width, shape.size)
        out = F.scaled_dot_product_attention(
            folded, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=self._mask, scale=shape.scale
        )
        if width == 1:
            return out.reshape(rows, -1)
        unfolded = out.view(rows, shape.kv_heads, shape.group, width, shape.size).permute(0, 3, 1, 2, 4)
        return unfolded.reshape(rows * width, -1)


class NativePass(Pass):
    """A pass by `between.cpp`; hidden states are written in place."""

    def __post_init__(self) -> None:
        entries = torch.arange(self.window.input_ids.numel()) if self.real is None else self.real
        begin, visible = self.window.begin.contiguous(), self.window.visible.contiguous()
        self._window = entries, self.cache.flat_slots, begin, visible, self.cache.total

    def norm(self, by: Norm, hidden: Tensor, change: Tensor | None) -> tuple[Tensor, Tensor]:
        return hidden, torch.ops.marsbench.norm.default(hidden, change, by.parameters["weight"], by.epsilon)

    def attention(self, layer: int, qkv: Tensor) -> Tensor:
        shape = self.shape
        stores = self.cache.stores(layer, qkv, (shape.kv_heads, shape.size))
        out: Tensor = torch.ops.marsbench.attention.default(qkv, *self.cos_sin, *stores, *self._window, shape.scale)
        return out

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        out: Tensor = torch.ops.marsbench.swiglu.default(gate, up)
        return out


def is_for(shape: Shape, sizes: Sequence[int]) -> bool:
    return shape.size in _HEAD_SIZES and not any(size % _LANES for size in sizes)


def spread(values: Tensor, real: Tensor | None, entries: int) -> Tensor:
    """Values [M, ...] of the real entries at their places among all `entries`, zeros at fillers."""
    return values if real is None else values.new_zeros(entries, *values.shape[1:]).index_copy_(0, real, values)
