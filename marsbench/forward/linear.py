"""What makes linear maps fast: layers that read the same values as one product, its kernel, and an adapter's maps.

A decoding step multiplies few positions by weights that do not fit into a CPU's cache: its time is the time to read
them, and `F.linear` takes two to six times that, because oneDNN reorders the weight at every call. Three ways around
it: one or two positions as the narrow right side of a product, weight first (one is doubled: a vector would take a
kernel for vectors, which is slow again); oneDNN called directly; and oneDNN on a copy of the weights that was reordered
once, in which the layers of a `Site` lie one below the other, so that they are one product. Which is fastest depends
on the machine and the number of positions, and is timed once per process for each shape of weights. Where the weights
fit into the cache, none of them gains anything.

The packed copies (`Packing`) lie beside the model and take as much memory as its weights; nothing is written to it.
Adapters add small maps to linear layers, as further columns of the same product where tokens keep their bits
(`Joined`).
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from marsbench.forward.adapter import LowRank
from marsbench.forward.between import is_native

VARIABLE = "MARSBENCH_PACK"  # 0 = weights are never packed
LARGE = 1 << 18  # elements of a site's weights, from which on reading them is what takes the time
FEW = 64  # positions, up to which it is
NARROW = 2  # positions, up to which they are best on the right of a weight that is not packed
HAS_ONEDNN: bool = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")  # type: ignore[no-untyped-call]

_ORDINARY = (nn.Parameter, Tensor)  # a subclass has a linear map of its own
_PACKED_FOR = 16  # positions that oneDNN is told of when it chooses the order of a copy
_PROBES = 16  # values of a weight that are compared
_SPARE = 1.2  # free memory that packing asks for, over what it takes
_POSITIONS = (1, 2, 4, 8, 16, 32)  # that kernels are timed for; the smallest that is not less counts, else the last
_TIMED_BYTES = 24 << 20  # of the weights of a shape, or one site's: more than stays in a core's cache
_LAPS = 3  # of which the fastest counts
_WIDEST = {"weight first": 4, "packed, as two": 1}  # positions, up to which a kernel is tried
_LARGEST_JOINED = 1 << 23  # elements of weights: reading more takes so long that calls do not matter
_ROOM = 1 << 30  # bytes of memory that stay free when an adapter is joined

_Places = tuple[int, ...]  # where weights lie in memory
_Shape = tuple[tuple[tuple[int, ...], ...], torch.dtype, int]  # of a site: its weights', their type, and threads


def packing_is_on() -> bool:
    """Whether weights are packed; see `set_packing`."""
    return os.environ.get(VARIABLE) != "0"


def set_packing(on: bool) -> None:
    """Have weights packed, or not, by this process and those that it starts."""
    os.environ[VARIABLE] = "1" if on else "0"


@contextmanager
def packing(on: bool) -> Iterator[None]:
    """Have weights packed, or not, for the time of a `with` block."""
    before = os.environ.get(VARIABLE)
    set_packing(on)
    try:
        yield
    finally:
        os.environ.pop(VARIABLE) if before is None else os.environ.__setitem__(VARIABLE, before)


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
    packed: Tensor  # [out, in], of all layers
    bias: Tensor | None  # [out]
    kernels: tuple[str, ...] = ()  # which to take, by positions from 0 to FEW

    def is_of(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> bool:
        """Whether these are the same ones, and nothing has been written to them."""
        found = [*weights, *(bias for bias in biases if bias is not None)]
        return len(found) == len(self.watched) and all(map(Watched.is_still, self.watched, found))

    def __call__(self, values: Tensor) -> Tensor:
        """Values [M, in] to [M, out], M at most FEW."""
        kernel = self.kernels[len(values)]
        if kernel == "packed":
            return by_onednn(values, self.packed, self.bias)
        if kernel == "packed, as two":  # one position alone takes a kernel for vectors, which sums in another order
            return by_onednn(values.expand(2, -1), self.packed, self.bias)[:1]
        return _beside(KERNELS[kernel], values, self.weights, self.biases)

    @property
    def nbytes(self) -> int:
        """Memory that it takes, in bytes."""
        return sum(weight.nbytes for weight in self.weights)

    @property
    def shape(self) -> _Shape:
        """What decides how fast it is read."""
        return tuple(tuple(one.shape) for one in self.weights), self.packed.dtype, torch.get_num_threads()


# Where weights lie in memory -> their copy, for as long as somebody holds that. A copy holds its weights, so the places
# cannot be others' meanwhile. Compiled steps get to see other tensors over the same memory, and no attributes.
COPIES: WeakValueDictionary[_Places, Copy] = WeakValueDictionary()
_Kernel = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def _on_the_right(values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """For one or two positions, or a few."""
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


# Of the weights as they lie, one after the other.
KERNELS: dict[str, _Kernel] = {"weight first": _on_the_right, "onednn": by_onednn, "torch": F.linear}
_ALL = ["packed", "packed, as two", *KERNELS]


def _beside(kernel: _Kernel, values: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor:
    """What layers give for values [M, in], one beside the other, [M, out]."""
    mapped = [kernel(values, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    return mapped[0] if len(mapped) == 1 else torch.cat(mapped, 1)


def is_read_slowly(values: Tensor) -> bool:
    """Whether `F.linear` may not be the way to multiply values [M, in] by large ones: few, on a CPU."""
    return 0 < len(values) <= FEW and values.device.type == "cpu" and HAS_ONEDNN and not torch.is_grad_enabled()


def _by_torch(values: Tensor, layers: Sequence[Mapping[str, Any]]) -> Tensor:
    """The same of layers' own parameters, in as little time as it takes to ask for them."""
    if len(layers) == 1:
        return F.linear(values, layers[0]["weight"], layers[0]["bias"])
    return torch.cat([F.linear(values, layer["weight"], layer["bias"]) for layer in layers], -1)


def _not_packed(values: Tensor, weights: Sequence[Tensor]) -> _Kernel:
    """What to take for few values and large weights of which there is no copy."""
    if values.dtype is not torch.float32 or not all(type(weight) in _ORDINARY for weight in weights):
        return F.linear
    return _on_the_right if len(values) <= NARROW else by_onednn


def can_be_packed(weights: Sequence[Any], *, to_join: bool = False) -> bool:
    """Whether weights are large together (or in bf16 and to be joined), plain, on the CPU, and of a type that oneDNN
    reads.
    """
    return (
        HAS_ONEDNN
        and all(type(one) in _ORDINARY and one.device.type == "cpu" for one in weights)
        and all(one.dim() == 2 and one.is_contiguous() for one in weights)
        and not any(one.is_inference() for one in weights)  # it has no version
        and (sum(one.numel() for one in weights) >= LARGE or (to_join and weights[0].dtype is torch.bfloat16))
        and all(one.dtype is torch.float32 or (one.dtype is torch.bfloat16 and reads_bf16()) for one in weights)
    )


# Inductor has a lowering of oneDNN's operation for weights that it has packed itself, and fails on others: it gets to
# see operations of ours, which it calls as they are, and which find copies and kernels when they are called.
@torch.library.custom_op("marsbench::site", mutates_args=())
def _site(values: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> Tensor:
    copy = COPIES.get(_places(weights))
    return _beside(_not_packed(values, weights), values, weights, biases) if copy is None else copy(values)


@_site.register_fake
def _shape_of_site(values: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> Tensor:
    return values.new_empty(len(values), sum(len(weight) for weight in weights))


@torch.library.custom_op("marsbench::adapted_site", mutates_args=())
def _adapted_site(
    values: Tensor, inner: Tensor, columns: Tensor, weights: list[Tensor], biases: list[Tensor | None]
) -> Tensor:
    joined = JOINED.get(columns.data_ptr())
    if joined is not None and joined.takes(values):
        return joined(values, inner)
    given: Tensor = _site(values, weights, biases)
    return given.addmm_(inner, columns.t())


@_adapted_site.register_fake
def _shape_of_adapted_site(
    values: Tensor, inner: Tensor, columns: Tensor, weights: list[Tensor], biases: list[Tensor | None]
) -> Tensor:
    return values.new_empty(len(values), len(columns))


def _places(weights: Sequence[Tensor]) -> _Places:
    return tuple(weight.data_ptr() for weight in weights)


# ---- the layers that read the same values ----


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
        self.copy: Copy | None = None  # seen to by `Packing`

    def __call__(self, values: Tensor, gate: Tensor | None = None) -> Sequence[Tensor]:
        """What the layers give for values [M, in]: every output, [M, out].

        `gate` [M, 1] is 1 at masks, where an adapter acts, and 0 at tokens; None = there are no masks.
        """
        if gate is not None and self._maps is not None:
            return self._adapted(self._maps, values, gate)
        if (self.copy is None and not self.is_large) or not is_read_slowly(values):
            return [_by_torch(values, layers) for layers in self._outputs]
        if torch.compiler.is_compiling():
            return self._parts(_site(values, self.weights, self.biases))
        if self.copy is not None:
            return self._parts(self.copy(values))
        return self._parts(_beside(_not_packed(values, self.weights), values, self.weights, self.biases))

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
        self._maps = None  # what is replaced is given back first
        downs = [maps[name].down for names in self._names for name in names if name in maps]
        if downs:
            ups = [
                [
                    maps[name].up if name in maps else like.new_empty(len(layer["weight"]), 0)
                    for name, layer in zip(names, layers, strict=True)
                ]
                for names, layers in zip(self._names, self._outputs, strict=True)
            ]
            self._maps = _Maps(torch.cat(downs), ups, self.copy)

    def _adapted(self, maps: _Maps, values: Tensor, gate: Tensor) -> Sequence[Tensor]:
        """All entries go into the few dimensions of a map, those of tokens become zero there, and the rest is added:
        zeros, for tokens. That takes fewer operations than gathering masks, and the same whatever a window holds.
        """
        inner = maps.down(values).mul_(gate)
        if torch.compiler.is_compiling() and self.copy is not None and is_read_slowly(values):
            return self._parts(_adapted_site(values, inner, maps.columns, self.weights, self.biases))
        if maps.joined is not None and maps.joined.takes(values):
            return self._parts(maps.joined(values, inner))
        return maps.add(inner, self(values))

    def _parts(self, product: Tensor) -> Sequence[Tensor]:
        return (product,) if len(self._sizes) == 1 else product.split_with_sizes(self._sizes, 1)


class LayerSites(NamedTuple):
    """The sites of one transformer layer."""

    attention: Site  # queries, keys and values
    out: Site
    mlp: Site  # gate; up
    down: Site


class Packing:
    """The packed copies of a model's sites; they go when this does.

    Args:
        sites: all of them.
        to_join: in bf16 pack small weights too, so that an adapter's maps can be joined with them.
    """

    def __init__(self, sites: Sequence[Site], *, to_join: bool = False) -> None:
        self._sites, self._to_join = sites, to_join
        self.changes = 0  # how often copies were made or given up

    @torch.no_grad()
    def follow(self) -> None:
        """Have every copy be of its weights as they are now; those that are missing are made if there is room."""
        has_changed, missing = False, list[Site]()
        for site in self._sites:
            found = None
            if packing_is_on() and can_be_packed(site.weights, to_join=self._to_join):
                found = COPIES.get(_places(site.weights))  # our own, or another decoder's of the same model
                if found is None or not found.is_of(site.weights, site.biases):
                    found = None
                    missing.append(site)
            has_changed |= site.copy is not found
            site.copy = found  # what is replaced is given back before its successor is made
        needed = sum(weight.nbytes for site in missing for weight in site.weights) * _SPARE
        if missing and needed < psutil.virtual_memory().available:
            for site in missing:
                site.copy = _packed(site.weights, site.biases)
            has_changed = True
        if has_changed:
            self.changes += 1
            _choose([site.copy for site in self._sites if site.copy is not None])


def _packed(weights: list[Tensor], biases: list[Tensor | None]) -> Copy:
    """A copy; layers without a bias get zeros where others have one."""
    bias = None
    if any(one is not None for one in biases):
        each = zip(weights, biases, strict=True)
        bias = torch.cat([weight.new_zeros(len(weight)) if one is None else one.detach() for weight, one in each])
    packed = _for_onednn(torch.cat([weight.detach() for weight in weights]))
    watched = [Watched(one) for one in (*weights, *biases) if one is not None]
    copy = Copy(weights, biases, watched, packed, bias)
    COPIES[_places(weights)] = copy
    return copy


def _for_onednn(weight: Tensor) -> Tensor:
    """A weight [out, in] in the order in which oneDNN reads it."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _PACKED_FOR)
    return packed


_FASTEST: dict[_Shape, tuple[str, ...]] = {}  # the kernel by positions, from 0 to FEW
_TIMING_S = [0.0]  # what timing has taken so far


def _choose(copies: Sequence[Copy]) -> None:
    """Say which kernel each copy takes, timed now for shapes that are new."""
    by_shape: dict[_Shape, list[Copy]] = defaultdict(list)
    for copy in copies:
        by_shape[copy.shape].append(copy)
    new = {shape: some for shape, some in by_shape.items() if shape not in _FASTEST}
    if new:
        _FASTEST.update(_timed(new))
    for shape, some in by_shape.items():
        for copy in some:
            copy.kernels = _FASTEST[shape]


def _timed(by_shape: Mapping[_Shape, Sequence[Copy]]) -> dict[_Shape, tuple[str, ...]]:
    """The fastest kernel for each shape and number of positions, in 16 bits among those that round alike.

    All shapes are gone through for one kernel before the next, so that no weight is in the cache when it is read again.
    """
    started = time.perf_counter()
    best: dict[_Shape, list[str]] = defaultdict(list)
    alike = {shape: _alike(copies[0]) for shape, copies in by_shape.items()}
    for positions in _POSITIONS:
        seconds: dict[_Shape, dict[str, float]] = defaultdict(dict)
        for name in _ALL * _LAPS:
            if positions > _WIDEST.get(name, FEW):
                continue
            for shape, copies in by_shape.items():
                if name not in alike[shape][positions == 1]:
                    continue
                some = copies[: max(1, _TIMED_BYTES // copies[0].nbytes)]
                values = torch.ones(positions, copies[0].weights[0].shape[1], dtype=shape[1])
                for copy in some:
                    copy.kernels = (name,) * (FEW + 1)
                some[-1](values)  # what it sets up the first time
                begun = time.perf_counter()
                for copy in some:
                    copy(values)
                took = time.perf_counter() - begun
                seconds[shape][name] = min(took, seconds[shape].get(name, took))
        for shape, found in seconds.items():
            best[shape].append(min(found, key=found.__getitem__))
    _TIMING_S[0] += time.perf_counter() - started
    nearest = [sum(timed < positions for timed in _POSITIONS) for positions in range(FEW + 1)]
    return {shape: tuple(found[min(index, len(found) - 1)] for index in nearest) for shape, found in best.items()}


def _alike(copy: Copy) -> dict[bool, list[str]]:
    """For one position (True) and for several: the kernels that give a row the same bits as "packed" gives it among
    others, whatever stands beside it; in fp32 all.

    What is computed beside other positions must not be rounded otherwise than alone, or near ties end otherwise: fp32
    has hardly any, bf16 one in some hundred tokens.
    """
    if copy.packed.dtype is torch.float32:
        return {True: _ALL, False: _ALL}
    values = torch.randn(FEW, copy.weights[0].shape[1], generator=torch.Generator().manual_seed(0))
    values = values.to(copy.packed.dtype)

    def agrees(name: str, most: int) -> bool:
        copy.kernels = (name,) * (FEW + 1)
        return torch.equal(torch.cat([copy(some) for some in torch.split(values, most)]), whole)

    copy.kernels = ("packed",) * (FEW + 1)
    whole = copy(values)
    several = [name for name in _ALL if all(agrees(name, most) for most in range(2, _POSITIONS[-1] + 1))]
    alone = [name for name in _ALL if agrees(name, 1)]
    return {True: alone, False: several} if alone and "packed" in several else {True: _ALL, False: _ALL}


def packing_in_words() -> dict[str, Any]:
    """What rows say of packing, beside their provenance: the copies' bytes, the kernel by shape and positions, the
    seconds that timing them took, and what computes between the maps; nothing where nothing is packed.
    """
    if not COPIES:
        return {}
    kernels = {
        f"{' + '.join(' x '.join(map(str, size)) for size in sizes)}, {str(dtype).removeprefix('torch.')}": {
            str(positions): names[positions] for positions in _POSITIONS
        }
        for (sizes, dtype, _), names in _FASTEST.items()
    }
    size = sum(copy.nbytes for copy in COPIES.values()) + sum(one.nbytes for one in JOINED.values())
    between = "native" if is_native() else "torch"
    return {"packing": {"bytes": size, "timing_s": round(_TIMING_S[0], 3), "kernels": kernels, "between": between}}


# ---- an adapter's maps ----


class _Maps:
    """The maps of one site: the first factors as one, the second ones output by output, or joined with the layers."""

    def __init__(self, down: Tensor, ups: Sequence[Sequence[Tensor]], copy: Copy | None) -> None:
        together: list[Tensor] = [torch.block_diag(*parts) for parts in ups]  # type: ignore[no-untyped-call]
        self.down = _Small(down)  # [R, in]
        self._ranks = [up.shape[1] for up in together]
        self._ups = [_Small(up) for up in together]  # [output, r] each; all r together are R
        self.columns: Tensor = torch.block_diag(*together)  # type: ignore[no-untyped-call]
        self.joined = None if copy is None else Joined.of(copy, self.columns)

    def add(self, inner: Tensor, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """What the first factors gave, [M, R], by the second ones, added to each of the outputs in place."""
        parts = [inner] if len(self._ranks) == 1 else inner.split_with_sizes(self._ranks, 1)
        return [up.add(part, output) for up, part, output in zip(self._ups, parts, outputs, strict=True)]


class Joined:
    """A site's copy with an adapter's second factors as further columns.

    A product by oneDNN takes about ten microseconds before it reads a weight, and where weights are small, that is what
    an adapter costs. So its second factors lie behind the layers' weights, and what the first ones make of values
    behind the values: [values, inner] @ [weights, columns].T. Tokens have zeros for `inner`. Whether they then get the
    very bits that the site gives by itself is looked at for every number of positions; where not, it runs by itself.
    It takes as much memory as the layers' weights.
    """

    def __init__(self, copy: Copy, columns: Tensor) -> None:
        """`columns` [out, R]; they are held, since compiled steps know this by where they lie."""
        self._copy, self._columns = copy, columns
        weight = torch.cat([torch.cat([one.detach() for one in copy.weights]), columns], 1)
        self.nbytes = weight.nbytes
        self._packed = _for_onednn(weight)
        shape = copy.shape, copy.kernels, columns.shape[1]
        if shape not in _EXACT:
            _EXACT[shape] = self._exact_for()
        self._is_exact = _EXACT[shape]
        JOINED[columns.data_ptr()] = self

    @classmethod
    @torch.no_grad()
    def of(cls, copy: Copy, columns: Tensor) -> Joined | None:
        """A copy with columns, where that is faster and there is room."""
        is_small = sum(weight.numel() for weight in copy.weights) <= _LARGEST_JOINED
        return cls(copy, columns) if is_small and psutil.virtual_memory().available > _ROOM else None

    def takes(self, values: Tensor) -> bool:
        """Whether it may be called for values [M, in]: tokens among them must get what the site gives alone."""
        return len(values) <= FEW and self._is_exact[len(values)]

    def __call__(self, values: Tensor, inner: Tensor) -> Tensor:
        """Values [M, in] and what the columns are multiplied by, [M, R], to the layers' outputs [M, out]."""
        return by_onednn(torch.cat([values, inner], 1), self._packed, self._copy.bias)

    @torch.no_grad()
    def _exact_for(self) -> tuple[bool, ...]:
        """By positions, from 0 to FEW: whether zeros for the columns leave what the site gives by itself.

        A mask never comes alone.
        """
        like = self._copy.weights[0]
        values = torch.randn(FEW, like.shape[1], generator=torch.Generator().manual_seed(0)).to(like.dtype)
        zeros = values.new_zeros(FEW, self._columns.shape[1])

        def is_exact(most: int) -> bool:
            parts = zip(torch.split(values, most), torch.split(zeros, most), strict=True)
            return all(torch.equal(self(some, none), self._copy(some)) for some, none in parts if len(some) > 1)

        return False, False, *(is_exact(most) for most in range(2, FEW + 1))


JOINED: WeakValueDictionary[int, Joined] = WeakValueDictionary()  # by where their columns lie
_EXACT: dict[tuple[object, ...], tuple[bool, ...]] = {}  # by what decides it: the copy's shape and kernels, and R


class _Small:
    """A linear map without a bias, too small to be read slowly: what it costs is the call."""

    def __init__(self, weight: Tensor) -> None:
        self._across = weight.T.contiguous()  # [in, out]
        # Where torch's own product of two matrices goes through oneDNN, calling that directly is faster.
        is_bf16 = weight.dtype is torch.bfloat16 and weight.device.type == "cpu" and weight.numel() and reads_bf16()
        self._packed = _for_onednn(weight) if is_bf16 else None

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
