"""What makes linear maps fast: layers that read the same values as one product, packed weights, an adapter's maps.

A decoding step multiplies few positions by weights that do not fit into a CPU's cache, and `F.linear` takes two to six
times as long as reading them. So the layers of a `Site`, which read the same values, lie one below the other in a copy
as `linear.cpp` reads it, an adapter's maps as further columns. What a position gives does not depend on how many stand
beside it, so verified answers are those of `ar`, in bf16 too. Elsewhere it is `F.linear`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from marsbench.forward.adapter import LowRank
from marsbench.forward.fastest import most_positions, times_torch
from marsbench.forward.native import BLOCK, can_pack, large_pages, pack, product

_ORDINARY = (nn.Parameter, Tensor)  # a subclass has a linear map of its own
_PROBES = 16  # values of a weight that are compared
_SPARE = 1.2  # free memory that packing asks for, over what it takes


class Watched:
    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version, self._place = tensor, tensor._version, tensor.data_ptr()
        step = max(1, tensor.numel() // _PROBES)
        step += step % tensor.shape[-1] == 0  # no two values of one row or column where that can be
        self._probe = tensor.detach().view(-1)[::step]
        self._values = self._probe.clone()

    def is_still(self, tensor: Tensor) -> bool:
        is_same = tensor is self._tensor and tensor._version == self._version and tensor.data_ptr() == self._place
        return is_same and torch.equal(self._probe, self._values)


class Copy:
    """The packed copy of a site's weights; what is written to these through `.data` shows in a few of their values."""

    def __init__(self, weights: list[Tensor], biases: list[Tensor | None], most: int) -> None:
        self.weights, self.most = weights, most  # the positions, up to which it is used
        self.watched = [Watched(tensor) for tensor in (*weights, *biases) if tensor is not None]
        self.packed = pack(torch.cat([weight.detach() for weight in weights]))  # as `linear.cpp` reads it
        self.bias: Tensor | None = None  # [out], zeros for layers that have none
        if any(bias is not None for bias in biases):
            each = zip(weights, biases, strict=True)
            parts = [weight.new_zeros(len(weight)) if own is None else own.detach() for weight, own in each]
            self.bias = torch.cat(parts)

    def is_of(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> bool:
        given = [*weights, *(bias for bias in biases if bias is not None)]
        return len(given) == len(self.watched) and all(map(Watched.is_still, self.watched, given))

    def adapted(self, values: Tensor, gate: Tensor, down: Tensor, columns: list[Tensor]) -> Tensor:
        out: Tensor = torch.ops.marsbench.adapted.default(values, self.packed, self.bias, down, columns, gate)
        return out


# Where weights lie in memory -> their copy, for as long as a site holds it. A copy holds its weights, so the places
# cannot be others' meanwhile.
COPIES: WeakValueDictionary[tuple[int, ...], Copy] = WeakValueDictionary()


def positions_packed(weights: Sequence[Any]) -> int:
    """Up to how many positions packed weights are used: 0 where there can be no copy, or where it is slower."""
    if (
        not all(type(weight) in _ORDINARY and weight.device.type == "cpu" for weight in weights)
        or not all(weight.dim() == 2 and weight.is_contiguous() for weight in weights)
        or any(weight.is_inference() for weight in weights)  # it has no version
        or len({weight.dtype for weight in weights}) > 1
        or not can_pack(sum(map(len, weights)), weights[0].shape[1], weights[0].dtype)
    ):
        return 0
    return most_positions(weights[0].dtype)


def _places(weights: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(weight.data_ptr() for weight in weights)


class Joined(NamedTuple):
    weight: Tensor  # [out, in]
    bias: Tensor | None  # [out]


class Site:
    """Linear layers that read the same values, by name, those of an output beside each other, and an adapter's maps."""

    def __init__(self, *outputs: Mapping[str, Any]) -> None:
        # Their own parameters, as they are at the moment: `nn.Module` looks for its attributes in several places.
        self._outputs = [[layer._parameters for layer in output.values()] for output in outputs]
        self._names = [[*output] for output in outputs]
        self._sizes = [sum(layer.out_features for layer in output.values()) for output in outputs]
        self._maps: _Maps | None = None
        self.copy: Copy | None = None  # seen to by `pack_sites`
        self.joined: Joined | None = None  # seen to by `joined.join_sites`

    def __call__(self, values: Tensor, gate: Tensor | None = None) -> Sequence[Tensor]:
        """Every output, [M, out], for values [M, in]; `gate` [M, 1] is 1 at masks, where an adapter acts, else 0."""
        copy = None if self.copy is None or len(values) > self.copy.most or torch.is_grad_enabled() else self.copy
        if gate is not None and (maps := self._maps) is not None:
            # All entries go into the few dimensions of a map, those of tokens become zero there, and the rest is added:
            # zeros, for tokens. That takes fewer operations than gathering masks, and the same whatever a window holds.
            if copy is None or maps.packed_down is None:
                return maps.add(values.mm(maps.across).mul_(gate), self(values))
            return self._parts(copy.adapted(values, gate, maps.packed_down, maps.packed_columns))
        if self.joined is not None and not torch.is_grad_enabled():
            return self._parts(F.linear(values, *self.joined))
        if copy is None:  # parameters are asked for in little time
            each = [[F.linear(values, own["weight"], own["bias"]) for own in layers] for layers in self._outputs]
            return [parts[0] if len(parts) == 1 else torch.cat(parts, -1) for parts in each]
        return self._parts(product(values, copy.packed, copy.bias))

    def add_to(self, hidden: Tensor, values: Tensor, gate: Tensor | None) -> Tensor:
        if self.joined is None or self.joined.bias is not None:
            return hidden.add_(self(values, gate)[0])
        hidden.addmm_(values, self.joined.weight.t())
        if gate is not None and (maps := self._maps) is not None:
            maps.add(values.mm(maps.across).mul_(gate), [hidden])
        return hidden

    @property
    def weights(self) -> list[Any]:
        """Of all layers, as they are; none where a parametrization makes it."""
        return [layer.get("weight") for output in self._outputs for layer in output]

    @property
    def biases(self) -> list[Tensor | None]:
        return [layer["bias"] for output in self._outputs for layer in output]

    def adapt(self, maps: Mapping[str, LowRank], like: Tensor) -> None:
        """Lay the maps of an adapter beside the layers of their names, on the device of `like` and of its type."""

        def map_of(name: str, weight: Tensor) -> LowRank:
            return maps.get(name) or LowRank(like.new_empty(0, weight.shape[1]), like.new_empty(len(weight), 0))

        pairs = [
            [map_of(name, layer["weight"]) for name, layer in zip(names, layers, strict=True)]
            for names, layers in zip(self._names, self._outputs, strict=True)
        ]
        is_adapted = any(name in maps for names in self._names for name in names)
        self._maps = _Maps(pairs, is_native=self.copy is not None) if is_adapted else None

    def _parts(self, product: Tensor) -> Sequence[Tensor]:
        return (product,) if len(self._sizes) == 1 else product.split_with_sizes(self._sizes, 1)


@torch.no_grad()
def pack_sites(sites: Sequence[Site]) -> bool:
    """Have every packed copy be of its weights as they are now, if there is room; whether copies came or went."""
    has_changed, missing = False, list[tuple[Site, int]]()
    for site in sites:
        copy = None
        if most := positions_packed(site.weights):
            copy = COPIES.get(_places(site.weights))  # our own, or another decoder's of the same model
            if copy is None or copy.most != most or not copy.is_of(site.weights, site.biases):
                copy = None
                missing.append((site, most))
        has_changed |= site.copy is not copy
        site.copy = copy  # what is replaced is given back before its successor is made
    needed = sum(weight.nbytes for site, _ in missing for weight in site.weights)
    if not missing or _SPARE * needed >= psutil.virtual_memory().available:
        return has_changed
    room = large_pages(needed)
    for site, most in missing:
        copy = site.copy = COPIES[_places(site.weights)] = Copy(site.weights, site.biases, most)
        place, room = room.tensor_split([copy.packed.nbytes])
        copy.packed = place.view(copy.packed.dtype).view_as(copy.packed).copy_(copy.packed)
    return True


def packing_in_words() -> dict[str, Any]:
    """What rows say of packing beside their provenance: bytes, and how much faster it is than torch; else nothing."""
    if not COPIES:
        return {}
    total = sum(weight.nbytes for copy in COPIES.values() for weight in copy.weights)
    return {"packing": {"bytes": total, "by": ["native"], "times_torch": times_torch()}}


class _Maps:
    def __init__(self, pairs: Sequence[Sequence[LowRank]], *, is_native: bool) -> None:
        """A layer without a map has factors of rank 0; for `linear.cpp`, inner values are filled up to whole blocks."""
        every = [pair for of_output in pairs for pair in of_output]
        ups: list[Tensor] = [torch.block_diag(*[pair.up for pair in of_output]) for of_output in pairs]  # type: ignore[no-untyped-call]
        down = torch.cat([pair.down for pair in every])
        self.across = down.t().contiguous()  # [in, R]: all first factors as one
        self.ranks = [up.shape[1] for up in ups]  # of each output; together they are R
        self.ups = [up.t() for up in ups]  # [r, output] each
        self.packed_down: Tensor | None = None  # for `linear.cpp`
        self.packed_columns = list[Tensor]()  # likewise, of the layers, from the top
        if is_native:
            if any(len(pair.up) % BLOCK for pair in every):  # a block holds outputs of several layers
                every = [LowRank(down, torch.block_diag(*ups))]  # type: ignore[no-untyped-call]
            spare = [-pair.up.shape[1] % BLOCK for pair in every]
            downs = [F.pad(pair.down, (0, 0, 0, more)) for pair, more in zip(every, spare, strict=True)]
            self.packed_columns = [pack(F.pad(pair.up, (0, more))) for pair, more in zip(every, spare, strict=True)]
            self.packed_down = pack(torch.cat(downs))

    def add(self, inner: Tensor, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """What the first factors gave, [M, R], by the second ones, added to each of the outputs in place."""
        parts = [inner] if len(self.ranks) == 1 else inner.split_with_sizes(self.ranks, 1)
        return [output.addmm_(part, up) for up, part, output in zip(self.ups, parts, outputs, strict=True)]
