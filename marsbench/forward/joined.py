"""Linear layers that read the same values as one product, with what an adapter adds to them as further columns.

A product by oneDNN takes about ten microseconds before it reads a weight, and where weights are small, that is what an
adapter costs: nine small products a layer, and what adds them up. Here its second factors lie behind the layers'
weights, and what the first ones make of values lies behind the values: [values, inner] @ [weights, columns].T. Tokens
have zeros for `inner`. Whether what they get is then equal to the bit to what the layers give by themselves is looked
at for every number of positions; where it is not, the layers run by themselves.

This takes as much memory as the layers' weights, beside the packed copies that windows without masks read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psutil
import torch
from torch import Tensor

from marsbench.forward.linear import COPIES, FEW, by_onednn, linear, packed_for_good
from marsbench.forward.packed import ALSO_PACKED, packing_is_on

Weights = dict[str, Any]  # a linear layer's own parameters by name, as they are at the moment

_LARGEST = 1 << 23  # elements of weights: reading more takes so long that calls do not matter
_ROOM = 1 << 30  # bytes of memory that stay free


def beside(layers: Sequence[Weights], values: Tensor) -> Tensor:
    """What layers give for values [M, in], one beside the other, [M, out]."""
    mapped = [linear(values, layer["weight"], layer["bias"]) for layer in layers]
    return mapped[0] if len(mapped) == 1 else torch.cat(mapped, 1)


class Joined:
    """Layers with columns for R values more."""

    def __init__(self, layers: Sequence[Weights], weight: Tensor, columns: int, nbytes: int) -> None:
        """`weight` [out, in + R] is packed, of the layers as they are; their biases are read at every call."""
        self.layers, self.weight, self.columns, self.nbytes = layers, weight, columns, nbytes
        self.shape = *(tuple(layer["weight"].shape) for layer in layers), columns

    def takes(self, values: Tensor) -> bool:
        """Whether it may be called for values [M, in]: tokens among them must get what the layers give alone."""
        return not torch.compiler.is_compiling() and len(values) <= FEW and _exact(self)[len(values)]

    def __call__(self, values: Tensor, inner: Tensor) -> Tensor:
        """Values [M, in] and what the columns are multiplied by, [M, R], to the layers' outputs [M, out]."""
        biases = [layer["bias"] for layer in self.layers]
        bias = None if biases[0] is None else torch.cat(biases)
        return by_onednn(torch.cat([values, inner], 1), self.weight, bias)


@torch.no_grad()
def joined(layers: Sequence[Weights], columns: Tensor) -> Joined | None:
    """Layers as one, with columns [out, R], where that is faster: small ones in bf16 that are packed themselves.

    In fp32 a small product does not go through oneDNN, and costs a third.
    """
    weights, has_bias = [layer["weight"] for layer in layers], {layer["bias"] is not None for layer in layers}
    is_packed = all(weight.dtype is torch.bfloat16 and weight.data_ptr() in COPIES for weight in weights)
    is_small = sum(weight.numel() for weight in weights) <= _LARGEST and psutil.virtual_memory().available > _ROOM
    if not (packing_is_on() and is_packed and is_small and len(has_bias) == 1):
        return None
    weight = torch.cat([torch.cat(weights), columns], 1)
    packed = packed_for_good(weight)
    if packed is None:
        return None
    one = Joined(layers, packed, columns.shape[1], weight.nbytes)
    ALSO_PACKED.add(one)
    return one


_EXACT: dict[tuple[object, int], tuple[bool, ...]] = {}  # by shape and threads


@torch.no_grad()
def _exact(one: Joined) -> tuple[bool, ...]:
    """By positions, from 0 to FEW: whether zeros for the columns leave what the layers give; seen once per shape."""
    here = one.shape, torch.get_num_threads()
    found = _EXACT.get(here)
    if found is None:
        like = one.layers[0]["weight"]
        values = torch.randn(FEW, like.shape[1], generator=torch.Generator().manual_seed(0)).to(like.dtype)
        zeros = values.new_zeros(FEW, one.columns)
        some = ((values[:most], zeros[:most]) for most in range(1, FEW + 1))
        found = False, *(torch.equal(one(*given), beside(one.layers, given[0])) for given in some)
        _EXACT[here] = found
    return found
