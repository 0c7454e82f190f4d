"""What makes linear maps fast: layers that read the same values as one product, packed weights, an adapter's maps.

A decoding step multiplies few positions by weights that do not fit into a CPU's cache: its time is the time to read
them, and `F.linear` takes two to six times that, because oneDNN reorders the weight at every call. So the layers of a
`Site`, which read the same values, lie one below the other in a copy that was reordered once, and are one product. It
is `linear.cpp`'s where that can be built: it reads nearly as fast as memory does, an adapter's maps are further columns
of it, and what a position gives does not depend on how many stand beside it, a whole prompt or none, so that verified
answers are those of `ar`, token for token, in bf16 too. Elsewhere it is oneDNN's, for few positions, which gains
nothing where weights fit into the cache.

The packed copies lie beside the model and take as much memory as its weights; nothing is written to it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from marsbench.forward.adapter import LowRank
from marsbench.forward.native import BLOCK, can_pack, is_native, pack, product, product_pays

VARIABLE = "MARSBENCH_PACK"  # 0 = weights are never packed
LARGE = 1 << 18  # elements of a site's weights, from which on reading them is what takes the time; for oneDNN
FEW = 64  # positions, up to which it is
NARROW = 2  # positions, up to which they are best on the right of a weight that is not packed
HAS_ONEDNN: bool = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")  # type: ignore[no-untyped-call]

_ORDINARY = (nn.Parameter, Tensor)  # a subclass has a linear map of its own
_PACKED_FOR = 16  # positions that oneDNN is told of when it chooses the order of a copy
_PROBES = 16  # values of a weight that are compared
_LINE = 64  # bytes that copies begin at multiples of
_SPARE = 1.2  # free memory that packing asks for, over what it takes

_Places = tuple[int, ...]  # where weights lie in memory


def packing_is_on() -> bool:
    """Whether weights are packed; see `set_packing`."""
    return os.environ.get(VARIABLE) != "0"


def set_packing(on: bool) -> None:
    """Have weights packed, or not, by this process and those that it starts."""
    os.environ[VARIABLE] = "1" if on else "0"


# ---- one product ----


class Watched:
    """A tensor, and whether something was written to it since."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version, self._place = tensor, tensor._version, tensor.data_ptr()
        step = max(1, tensor.numel() // _PROBES)
        step += step % tensor.shape[-1] == 0  # no two values of one row or column where that can be
        self._probe = tensor.detach().view(-1)[::step]
        self._values = self._probe.clone()

    def is_still(self, tensor: Tensor) -> bool:
        """Whether it is the same tensor, with what it held."""
        is_same = tensor is self._tensor and tensor._version == self._version and tensor.data_ptr() == self._place
        return is_same and torch.equal(self._probe, self._values)


@dataclass(eq=False)
class Copy:
    """The packed copy of a site's weights and biases, and what tells whether it is still of them.

    What is written through `.data` (by adapters that are merged, and by sharding wrappers) leaves no other trace than
    the values: a few are compared. A few others written that way, and no more, would not be noticed.
    """

    weights: list[Tensor]
    biases: list[Tensor | None]
    watched: list[Watched]
    packed: Tensor  # of all layers, as `linear.cpp` or as oneDNN reads it
    bias: Tensor | None  # [out]
    kind: str  # of `packed_for`
    is_native: bool  # whether that is `linear.cpp`

    def is_of(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> bool:
        """Whether these are the same ones, and nothing has been written to them."""
        found = [*weights, *(bias for bias in biases if bias is not None)]
        return len(found) == len(self.watched) and all(map(Watched.is_still, self.watched, found))

    def __call__(self, values: Tensor) -> Tensor:
        """Values [M, in] to [M, out]; by oneDNN, M is at most FEW."""
        if self.is_native:
            return product(values, self.packed, self.bias)
        if len(values) <= NARROW and values.dtype is torch.float32:
            return _beside(_on_the_right, values, self.weights, self.biases)
        if len(values) == 1:  # one position alone takes a kernel for vectors, which sums in another order
            return by_onednn(values.expand(2, -1), self.packed, self.bias)[:1]
        return by_onednn(values, self.packed, self.bias)

    def adapted(self, values: Tensor, gate: Tensor, down: Tensor, columns: list[Tensor]) -> Tensor:
        """The same with an adapter's packed maps, by `linear.cpp`; for `gate` see `Site`."""
        found: Tensor = torch.ops.marsbench.adapted.default(values, self.packed, self.bias, down, columns, gate)
        return found


# Where weights lie in memory -> their copy, for as long as somebody holds that. A copy holds its weights, so the places
# cannot be others' meanwhile. Compiled steps get to see other tensors over the same memory, and no attributes.
COPIES: WeakValueDictionary[_Places, Copy] = WeakValueDictionary()
_Kernel = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def _on_the_right(values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """One or two positions, as the narrow right side of a product; one is doubled: a vector would be read slowly."""
    flat = values.contiguous()  # lying across, as results do, it is read slowly again
    narrow = flat if len(flat) > 1 else torch.cat((flat, flat))
    mapped = (weight @ narrow.t()).t()[: len(flat)]
    return mapped if bias is None else mapped + bias


# The overload itself: looking for it takes longer than a small product.
_ONEDNN: Any = torch.ops.mkldnn._linear_pointwise.default if HAS_ONEDNN else None


def by_onednn(values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """By a weight as it lies, or by a packed one."""
    mapped: Tensor = _ONEDNN(values, weight, bias, "none", [], "")
    return mapped


def reads_bf16() -> bool:
    """Whether oneDNN multiplies bf16 on this machine."""
    return HAS_ONEDNN and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _beside(kernel: _Kernel, values: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor:
    """What layers give for values [M, in], one beside the other, [M, out]."""
    mapped = [kernel(values, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    return mapped[0] if len(mapped) == 1 else torch.cat(mapped, 1)


def _by_torch(values: Tensor, layers: Sequence[Mapping[str, Any]]) -> Tensor:
    """The same of layers' own parameters, in as little time as it takes to ask for them."""
    if len(layers) == 1:
        return F.linear(values, layers[0]["weight"], layers[0]["bias"])
    return torch.cat([F.linear(values, layer["weight"], layer["bias"]) for layer in layers], -1)


def _not_packed(values: Tensor, weights: Sequence[Tensor]) -> _Kernel:
    """What to take for few values and large weights of which there is no copy."""
    if not HAS_ONEDNN or values.dtype is not torch.float32 or not all(type(weight) in _ORDINARY for weight in weights):
        return F.linear
    return _on_the_right if len(values) <= NARROW else by_onednn


def packed_for(weights: Sequence[Any]) -> str:
    """What a copy of weights is for: "native" is `linear.cpp`, else "oneDNN"; empty where there can be none.

    They are plain, on the CPU and of a type that is read there; for oneDNN, they are large together.
    """
    if (
        not all(type(weight) in _ORDINARY and weight.device.type == "cpu" for weight in weights)
        or not all(weight.dim() == 2 and weight.is_contiguous() for weight in weights)
        or any(weight.is_inference() for weight in weights)  # it has no version
    ):
        return ""
    outputs, dtypes = sum(map(len, weights)), {weight.dtype for weight in weights}
    if len(dtypes) == 1 and can_pack(outputs, weights[0].shape[1], *dtypes) and product_pays() and is_native():
        return "native"
    is_read = dtypes <= {torch.float32, *([torch.bfloat16] if reads_bf16() else [])}
    return "oneDNN" if HAS_ONEDNN and is_read and sum(weight.numel() for weight in weights) >= LARGE else ""


# Inductor has a lowering of oneDNN's operation for weights that it has packed itself, and fails on others: it gets to
# see an operation of ours, which it calls as it is, and which finds copies when it is called.
@torch.library.custom_op("marsbench::site", mutates_args=())
def _site(values: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> Tensor:
    copy = COPIES.get(_places(weights))
    return _beside(_not_packed(values, weights), values, weights, biases) if copy is None else copy(values)


@_site.register_fake
def _shape_of_site(values: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> Tensor:
    return values.new_empty(len(values), sum(len(weight) for weight in weights))


def _places(weights: Sequence[Tensor]) -> _Places:
    return tuple(weight.data_ptr() for weight in weights)


# ---- the layers that read the same values ----


class Joined(NamedTuple):
    """The weights of a site's layers, one below the other."""

    weight: Tensor  # [out, in]
    bias: Tensor | None  # [out]


class Site:
    """Linear layers that read the same values, and an adapter's maps beside them.

    Args:
        outputs: the layers by their names; those of one output lie one beside the other in it.
    """

    def __init__(self, *outputs: Mapping[str, Any]) -> None:
        # Their own parameters, as they are at the moment: `nn.Module` looks for its attributes in several places.
        self._outputs = [[layer._parameters for layer in output.values()] for output in outputs]
        self._names = [[*output] for output in outputs]
        self._sizes = [sum(layer.out_features for layer in output.values()) for output in outputs]
        self.is_large = sum(weight.numel() for weight in self.weights) >= LARGE
        self._maps: _Maps | None = None
        self.copy: Copy | None = None  # seen to by `pack_sites`
        self.joined: Joined | None = None  # seen to by `joined.join_sites`

    def __call__(self, values: Tensor, gate: Tensor | None = None) -> Sequence[Tensor]:
        """What the layers give for values [M, in]: every output, [M, out].

        `gate` [M, 1] is 1 at masks, where an adapter acts, and 0 at tokens; None = there are no masks.
        """
        if gate is not None and (maps := self._maps) is not None:
            # All entries go into the few dimensions of a map, those of tokens become zero there, and the rest is added:
            # zeros, for tokens. That takes fewer operations than gathering masks, and the same whatever a window holds.
            if maps.packed_down is None or self.copy is None or torch.is_grad_enabled():
                return maps.add(values.mm(maps.across).mul_(gate), self(values))
            return self._parts(self.copy.adapted(values, gate, maps.packed_down, maps.packed_columns))
        if self.joined is not None and not torch.is_grad_enabled():
            return self._parts(F.linear(values, *self.joined))
        if self.copy is not None and self.copy.is_native and not torch.is_grad_enabled():
            return self._parts(self.copy(values))
        is_small = self.copy is None and not self.is_large
        if is_small or not 0 < len(values) <= FEW or values.device.type != "cpu" or torch.is_grad_enabled():
            return [_by_torch(values, layers) for layers in self._outputs]
        if self.copy is not None and not torch.compiler.is_compiling():
            return self._parts(self.copy(values))
        if torch.compiler.is_compiling():
            return self._parts(_site(values, self.weights, self.biases))
        return self._parts(_beside(_not_packed(values, self.weights), values, self.weights, self.biases))

    def add_to(self, hidden: Tensor, values: Tensor, gate: Tensor | None) -> Tensor:
        """Hidden states [M, H] with the one output added to them in place."""
        if self.joined is None or self.joined.bias is not None:
            return hidden.add_(self(values, gate)[0])
        hidden.addmm_(values, self.joined.weight.t())
        if gate is not None and (maps := self._maps) is not None:
            maps.add(values.mm(maps.across).mul_(gate), [hidden])
        return hidden

    @property
    def is_native(self) -> bool:
        """Whether it is computed in C++."""
        return self.copy is not None and self.copy.is_native

    @property
    def weights(self) -> list[Any]:
        """Of all layers, as they are; none where a parametrization makes it."""
        return [layer.get("weight") for output in self._outputs for layer in output]

    @property
    def biases(self) -> list[Tensor | None]:
        """Of all layers, as they are."""
        return [layer["bias"] for output in self._outputs for layer in output]

    def adapt(self, maps: Mapping[str, LowRank], like: Tensor) -> None:
        """Lay the maps of an adapter beside the layers of their names, on the device of `like` and of its type."""
        pairs = [
            [
                maps.get(name)
                or LowRank(like.new_empty(0, layer["weight"].shape[1]), like.new_empty(len(layer["weight"]), 0))
                for name, layer in zip(names, layers, strict=True)
            ]
            for names, layers in zip(self._names, self._outputs, strict=True)
        ]
        is_adapted = any(name in maps for names in self._names for name in names)
        self._maps = _Maps.of(pairs, self.is_native) if is_adapted else None

    def _parts(self, product: Tensor) -> Sequence[Tensor]:
        return (product,) if len(self._sizes) == 1 else product.split_with_sizes(self._sizes, 1)


@torch.no_grad()
def pack_sites(sites: Sequence[Site]) -> bool:
    """Have every packed copy be of its weights as they are now; those that are missing are made if there is room.

    A copy goes with the last of the sites that hold it. Whether copies were made or given up is returned.
    """
    has_changed, missing = False, list[tuple[Site, str]]()
    for site in sites:
        found = None
        if packing_is_on() and (kind := packed_for(site.weights)):
            found = COPIES.get(_places(site.weights))  # our own, or another decoder's of the same model
            if found is None or found.kind != kind or not found.is_of(site.weights, site.biases):
                found = None
                missing.append((site, kind))
        has_changed |= site.copy is not found
        site.copy = found  # what is replaced is given back before its successor is made
    needed = sum(weight.nbytes for site, _ in missing for weight in site.weights) * _SPARE
    if not missing or needed >= psutil.virtual_memory().available:
        return has_changed
    room = _Room([site for site, kind in missing if kind == "native"])
    for site, kind in missing:
        site.copy = _packed(site.weights, site.biases, kind, room)
    return True


class _Room:
    """One piece of memory for the copies of several sites, in large pages where there are such: it is read through in
    every step, which takes longer from pages of four KiB.
    """

    def __init__(self, sites: Sequence[Site]) -> None:
        nbytes = sum(weight.nbytes for site in sites for weight in site.weights) + _LINE * (len(sites) + 1)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            memory.madvise(mmap.MADV_HUGEPAGE)
            self._free = torch.frombuffer(memory, dtype=torch.uint8)
        else:
            self._free = torch.empty(nbytes, dtype=torch.uint8)

    def keep(self, packed: Tensor) -> Tensor:
        """The same values, here."""
        kept = self._free[: packed.nbytes].view(packed.dtype).view(packed.shape)
        self._free = self._free[-(-packed.nbytes // _LINE) * _LINE :]
        return kept.copy_(packed)


def _packed(weights: list[Tensor], biases: list[Tensor | None], kind: str, room: _Room) -> Copy:
    """A copy; layers without a bias get zeros where others have one."""
    bias = None
    if any(bias is not None for bias in biases):
        each = zip(weights, biases, strict=True)
        bias = torch.cat([weight.new_zeros(len(weight)) if own is None else own.detach() for weight, own in each])
    whole = torch.cat([weight.detach() for weight in weights])
    is_native = kind == "native"
    packed = room.keep(pack(whole)) if is_native else torch.ops.mkldnn._reorder_linear_weight(whole, _PACKED_FOR)
    watched = [Watched(tensor) for tensor in (*weights, *biases) if tensor is not None]
    copy = Copy(weights, biases, watched, packed, bias, kind, is_native)
    COPIES[_places(weights)] = copy
    return copy


def packing_in_words() -> dict[str, Any]:
    """What rows say of packing, beside their provenance: the copies' bytes, and what reads them; nothing where nothing
    is packed.
    """
    if not COPIES:
        return {}
    by = sorted({copy.kind for copy in COPIES.values()})
    return {"packing": {"bytes": sum(one.nbytes for copy in COPIES.values() for one in copy.weights), "by": by}}


# ---- an adapter's maps ----


class _Maps(NamedTuple):
    """The maps of one site.

    As `linear.cpp` reads them, the inner values are filled up to whole blocks.
    """

    across: Tensor  # [in, R]: all first factors as one
    ranks: list[int]  # of each output; together they are R
    ups: list[Tensor]  # [r, output] each
    packed_down: Tensor | None  # for `linear.cpp`
    packed_columns: list[Tensor]  # likewise, of the layers, from the top

    @classmethod
    def of(cls, pairs: Sequence[Sequence[LowRank]], is_native: bool) -> _Maps:
        """Made of the layers' factors, output by output; a layer without a map has factors of rank 0."""
        every = [pair for of_output in pairs for pair in of_output]
        ups: list[Tensor] = [torch.block_diag(*[pair.up for pair in of_output]) for of_output in pairs]  # type: ignore[no-untyped-call]
        down = torch.cat([pair.down for pair in every])
        packed_down, columns = None, list[Tensor]()
        if is_native:
            if any(len(pair.up) % BLOCK for pair in every):  # a block holds outputs of several layers
                every = [LowRank(down, torch.block_diag(*ups))]  # type: ignore[no-untyped-call]
            spare = [-pair.up.shape[1] % BLOCK for pair in every]
            downs = [F.pad(pair.down, (0, 0, 0, more)) for pair, more in zip(every, spare, strict=True)]
            columns = [pack(F.pad(pair.up, (0, more))) for pair, more in zip(every, spare, strict=True)]
            packed_down = pack(torch.cat(downs))
        return cls(down.t().contiguous(), [up.shape[1] for up in ups], [up.t() for up in ups], packed_down, columns)

    def add(self, inner: Tensor, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """What the first factors gave, [M, R], by the second ones, added to each of the outputs in place."""
        parts = [inner] if len(self.ranks) == 1 else inner.split_with_sizes(self.ranks, 1)
        return [output.addmm_(part, up) for up, part, output in zip(self.ups, parts, outputs, strict=True)]
