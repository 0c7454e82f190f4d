"""Where an adapter's maps join the linear layers of a lean decoder.

All entries go into the few dimensions of a map, those of tokens are set to zero there, and what comes of it is added:
zeros, for tokens. That takes fewer operations than gathering masks, and shapes are the same whatever a window holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from marsbench.forward.adapter import LowRank
from marsbench.forward.joined import Weights, beside, joined
from marsbench.forward.linear import by_onednn, packed_for_good

Layer = tuple[Weights, LowRank | None]  # a linear layer's own parameters, and its map if it has one


class Site:
    """Linear layers that read the same values, with their maps as one."""

    def __init__(self, outputs: Sequence[Sequence[Layer]], like: Tensor) -> None:
        """The layers of each output in order; the maps are on the device of `like` and of its type."""
        layers = [layer for output in outputs for layer in output]
        downs = [one.down for _, one in layers if one is not None]
        ups = [[_up(layer, like) for layer in output] for output in outputs]
        together: list[Tensor] = [torch.block_diag(*parts) for parts in ups]  # type: ignore[no-untyped-call]
        self._layers = [[weights for weights, _ in output] for output in outputs]
        self._sizes = [len(up) for up in together]
        self._ranks = [up.shape[1] for up in together]
        self._ups = [_Small(up) for up in together]  # [output, r] each; all r together are R
        self._down = _Small(torch.cat(downs)) if downs else None  # [R, in]
        columns: Tensor = torch.block_diag(*together)  # type: ignore[no-untyped-call]
        self._joined = joined([weights for weights, _ in layers], columns) if downs else None

    def __call__(self, gate: Tensor, values: Tensor) -> Sequence[Tensor]:
        """What the layers give for values [M, in] with the adapter: every output, [M, output].

        `gate` [M, 1] is 1 at masks and 0 at tokens.
        """
        if self._down is None:
            return [beside(layers, values) for layers in self._layers]
        inner = self._down(values).mul_(gate)
        if self._joined is not None and self._joined.takes(values):
            return _parts(self._joined(values, inner), self._sizes)
        given = zip(self._ups, _parts(inner, self._ranks), self._layers, strict=True)
        return [up.add(part, beside(layers, values)) for up, part, layers in given]


def _up(layer: Layer, like: Tensor) -> Tensor:
    weights, one = layer
    return like.new_empty(len(weights["weight"]), 0) if one is None else one.up


def _parts(values: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    return [values] if len(sizes) == 1 else values.split_with_sizes(sizes, 1)


class LayerSites(NamedTuple):
    """The sites of one transformer layer."""

    attention: Site  # queries, keys and values
    out: Site
    mlp: Site  # gate; up
    down: Site


class _Small:
    """A linear map without a bias, too small to be read slowly: what it costs is the call."""

    def __init__(self, weight: Tensor) -> None:
        self._across = weight.T.contiguous()  # [in, out]
        # Where torch's own product of two matrices goes through oneDNN, calling that directly is faster.
        self._packed = packed_for_good(weight) if weight.dtype is torch.bfloat16 else None

    def __call__(self, values: Tensor) -> Tensor:
        """Values [M, in] to [M, out]."""
        if self._packed is None or torch.compiler.is_compiling():
            return values.mm(self._across)
        return by_onednn(values, self._packed)

    def add(self, values: Tensor, output: Tensor) -> Tensor:
        """`output` [M, out], to which it is added in place."""
        if self._packed is None or torch.compiler.is_compiling():
            return output.addmm_(values, self._across)
        return output.add_(by_onednn(values, self._packed))
