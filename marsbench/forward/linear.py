"""What makes a linear map fast: the kernel for its size, weights packed once, and an adapter's maps beside them.

A decoding step multiplies few positions by weights that do not fit into a CPU's cache: its time is the time to read
them, and `F.linear` takes two to six times that, because oneDNN reorders the weight at every call. Three ways around
it: one or two positions as the narrow right side of a product, weight first (one is doubled: a vector would take a
kernel for vectors, which is slow again); oneDNN called directly; and oneDNN on a copy of the weight that was reordered
once. Which is fastest depends on the machine and the number of positions, and is timed once per process for each shape
of weights. Where the weight fits into the cache, none of them gains anything.

The packed copies (`Packing`) lie beside the model and take as much memory as its weights; nothing is written to it.
Adapters add small maps to linear layers (`Site`), joined with them where that is faster (`Joined`).
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakSet, WeakValueDictionary

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from marsbench.forward.adapter import LowRank

VARIABLE = "MARSBENCH_PACK"  # 0 = weights are never packed
LARGE = 1 << 18  # elements of a weight, from which on reading it is what takes the time
FEW = 64  # positions, up to which it is
NARROW = 2  # positions, up to which they are best on the right of a weight that is not packed
HAS_ONEDNN: bool = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")  # type: ignore[no-untyped-call]

_ORDINARY = (nn.Parameter, Tensor)  # a subclass has a linear map of its own
_PACKED_FOR = 16  # positions that oneDNN is told of when it chooses the order of a copy
_PROBES = 16  # values of a weight that are compared
_SPARE = 1.2  # free memory that packing asks for, over what it takes
_POSITIONS = (1, 2, 4, 8, 16, 32)  # that kernels are timed for; the smallest that is not less counts, else the last
_TIMED_BYTES = 24 << 20  # of the weights of a shape, or one weight: more than stays in a core's cache
_WIDEST_RIGHT = 4  # positions, up to which "weight first" is tried
_LARGEST_JOINED = 1 << 23  # elements of weights: reading more takes so long that calls do not matter
_ROOM = 1 << 30  # bytes of memory that stay free when layers are joined

Weights = dict[str, Any]  # a linear layer's own parameters by name, as they are at the moment
Layer = tuple[Weights, LowRank | None]  # a linear layer's own parameters, and its map if an adapter has one
_Shape = tuple[tuple[int, ...], torch.dtype, int]  # of a weight: size, type, and the threads that read it


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


# ---- one linear map ----


@dataclass(eq=False)
class Copy:
    """A weight's packed copy, and what tells whether it is still of that weight.

    What is written through `.data` (by adapters that are merged, and by sharding wrappers) leaves no other trace than
    the values: a few are compared. A few others written that way, and no more, would not be noticed.
    """

    weight: Tensor
    version: int  # of the weight, when it was packed
    place: int  # where it lay
    probe: Tensor  # a view of a few of its values
    values: Tensor  # what they were
    packed: Tensor
    kernels: tuple[str, ...] = ()  # which to take, by positions from 0 to FEW

    def is_of(self, weight: Tensor) -> bool:
        """Whether `weight` is the same one, and nothing has been written to it."""
        is_same = weight is self.weight and weight._version == self.version and weight.data_ptr() == self.place
        return is_same and torch.equal(self.probe, self.values)


# Where a weight lies in memory -> its copy, for as long as somebody holds that. A copy holds its weight, so the place
# cannot be another's meanwhile. Compiled steps get to see other tensors over the same memory, and no attributes.
COPIES: WeakValueDictionary[int, Copy] = WeakValueDictionary()


def linear(values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear`: values [..., in], weight [out, in] and bias [out] to [..., out], up to rounding."""
    if weight.numel() < LARGE or not is_read_slowly(values, weight):
        return F.linear(values, weight, bias)
    return (_compiled if torch.compiler.is_compiling() else _read)(values, weight, bias)


def is_read_slowly(values: Tensor, weight: Tensor) -> bool:
    """Whether `F.linear` may not be the way to take: few positions on a CPU, a large weight, no gradient wanted."""
    return (
        HAS_ONEDNN
        and weight.numel() >= LARGE
        and 0 < values.numel() <= FEW * weight.shape[1]
        and values.dtype is weight.dtype
        and weight.dtype in (torch.float32, torch.bfloat16)
        and values.device.type == "cpu"
        and weight.device.type == "cpu"
        and type(weight) in _ORDINARY
        and not torch.is_grad_enabled()
    )


def _read(values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    copy = COPIES.get(weight.data_ptr())
    positions = values.numel() // weight.shape[1]
    if copy is not None and copy.packed.shape == weight.shape:
        return KERNELS[copy.kernels[positions]](values, copy, bias)
    if weight.dtype is not torch.float32:
        return F.linear(values, weight, bias)
    return _on_the_right(values, weight, bias) if positions <= NARROW else by_onednn(values, weight, bias)


def _on_the_right(values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """For one or two positions, or a few."""
    flat = values.reshape(-1, weight.shape[1]).contiguous()  # lying across, as results do, it is read slowly again
    narrow = flat if len(flat) > 1 else torch.cat((flat, flat))
    mapped = (weight @ narrow.t()).t()[: len(flat)].view(*values.shape[:-1], -1)
    return mapped if bias is None else mapped + bias


def by_onednn(values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """By a weight as it lies, or by a packed one."""
    mapped: Tensor = torch.ops.mkldnn._linear_pointwise(values, weight, bias, "none", [], "")
    return mapped


def reads_bf16() -> bool:
    """Whether oneDNN multiplies bf16 on this machine."""
    return HAS_ONEDNN and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


KERNELS: dict[str, Callable[[Tensor, Copy, Tensor | None], Tensor]] = {
    "packed": lambda values, copy, bias: by_onednn(values, copy.packed, bias),
    "weight first": lambda values, copy, bias: _on_the_right(values, copy.weight, bias),
    "onednn": lambda values, copy, bias: by_onednn(values, copy.weight, bias),
    "torch": lambda values, copy, bias: F.linear(values, copy.weight, bias),
}
# Inductor has a lowering of oneDNN's operation for weights that it has packed itself, and fails on others: it gets to
# see an operation of ours, which it calls as it is, and which finds the kernel when it is called.
_compiled = torch.library.custom_op(
    "marsbench::linear", _read, mutates_args=(), schema="(Tensor values, Tensor weight, Tensor? bias) -> Tensor"
)


@_compiled.register_fake
def _shape_of_linear(values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return values.new_empty(*values.shape[:-1], weight.shape[0])


# ---- weights packed once ----


class Packing:
    """The packed copies of a model's linear layers; they go when this does.

    Args:
        layers: the layers' own parameters by name, as they are at the moment.
        to_join: in bf16 pack small weights too, so that what is joined of them follows them.
    """

    def __init__(self, layers: Sequence[Weights], *, to_join: bool = False) -> None:
        self._layers, self._to_join = layers, to_join
        self._copies: dict[int, Copy] = {}  # by where the weight lies
        self.changes = 0  # how often copies were made or given up

    @torch.no_grad()
    def follow(self) -> None:
        """See to it that every copy is of its weight as it is now; those that are missing are made if there is room."""
        ours: list[Any] = [layer.get("weight") for layer in self._layers] if packing_is_on() else []
        weights: dict[int, Tensor] = {one.data_ptr(): one for one in ours if can_be_packed(one, to_join=self._to_join)}
        before, copies = self._copies, dict[int, Copy]()
        for place, weight in weights.items():
            copy = COPIES.get(place)  # our own, or another decoder's of the same model
            if copy is not None and copy.is_of(weight):
                copies[place] = copy
        has_changed = before != copies
        self._copies = before = copies  # what is replaced is given back before its successor is made
        missing = {place: weight for place, weight in weights.items() if place not in copies}
        needed = sum(weight.nbytes for weight in missing.values()) * _SPARE
        if missing and needed < psutil.virtual_memory().available:
            self._copies = {**copies, **{place: _packed(weight) for place, weight in missing.items()}}
            has_changed = True
        if has_changed:
            self.changes += 1
            _choose(list(self._copies.values()))


def can_be_packed(weight: Any, *, to_join: bool = False) -> bool:
    """Whether a weight is large (or in bf16 and to be joined), plain, on the CPU, and of a type that oneDNN reads."""
    return (
        HAS_ONEDNN
        and type(weight) in _ORDINARY
        and weight.device.type == "cpu"
        and (weight.numel() >= LARGE or (to_join and weight.dtype is torch.bfloat16))
        and weight.dim() == 2
        and weight.is_contiguous()
        and not weight.is_inference()  # it has no version
        and (weight.dtype is torch.float32 or (weight.dtype is torch.bfloat16 and reads_bf16()))
    )


def _packed(weight: Tensor) -> Copy:
    step = max(1, weight.numel() // _PROBES)
    step += step % weight.shape[1] == 0  # no two values of one row or column where that can be
    probe = weight.detach().view(-1)[::step]
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _PACKED_FOR)
    copy = Copy(weight, weight._version, weight.data_ptr(), probe, probe.clone(), packed)
    COPIES[copy.place] = copy
    return copy


_FASTEST: dict[_Shape, tuple[str, ...]] = {}  # the kernel by positions, from 0 to FEW
_TIMING_S = [0.0]  # what timing has taken so far


def _choose(copies: Sequence[Copy]) -> None:
    """Say which kernel each copy takes, timed now for shapes that are new."""
    by_shape: dict[_Shape, list[Copy]] = defaultdict(list)
    for copy in copies:
        by_shape[tuple(copy.weight.shape), copy.weight.dtype, torch.get_num_threads()].append(copy)
    new = {shape: some for shape, some in by_shape.items() if shape not in _FASTEST}
    if new:
        _FASTEST.update(_timed(new))
    for shape, some in by_shape.items():
        for copy in some:
            copy.kernels = _FASTEST[shape]


def _timed(by_shape: dict[_Shape, list[Copy]]) -> dict[_Shape, tuple[str, ...]]:
    """The fastest kernel for each shape and number of positions.

    All shapes are gone through for one kernel before the next, so that no weight is in the cache when it is read again.
    """
    started = time.perf_counter()
    best: dict[_Shape, list[str]] = defaultdict(list)
    for positions in _POSITIONS:
        seconds: dict[_Shape, list[tuple[float, str]]] = defaultdict(list)
        for name, kernel in KERNELS.items():
            if name == "weight first" and positions > _WIDEST_RIGHT:
                continue
            for shape, copies in by_shape.items():
                some = copies[: max(1, _TIMED_BYTES // copies[0].weight.nbytes)]
                values = torch.ones(positions, shape[0][1], dtype=shape[1])
                kernel(values, some[-1], None)  # what it sets up the first time
                begun = time.perf_counter()
                for copy in some:
                    kernel(values, copy, None)
                seconds[shape].append((time.perf_counter() - begun, name))
        for shape, found in seconds.items():
            best[shape].append(min(found)[1])
    _TIMING_S[0] += time.perf_counter() - started
    nearest = [sum(timed < positions for timed in _POSITIONS) for positions in range(FEW + 1)]
    return {shape: tuple(names[min(index, len(names) - 1)] for index in nearest) for shape, names in best.items()}


def packing_in_words() -> dict[str, Any]:
    """What rows say of packing, beside their provenance: the copies' bytes, the kernel by shape and positions, and the
    seconds that timing them took; nothing where nothing is packed.
    """
    if not COPIES:
        return {}
    kernels = {
        f"{' x '.join(map(str, size))}, {str(dtype).removeprefix('torch.')}": {
            str(positions): names[positions] for positions in _POSITIONS
        }
        for (size, dtype, _), names in _FASTEST.items()
    }
    size = sum(copy.weight.nbytes for copy in COPIES.values()) + sum(one.nbytes for one in JOINED)
    return {"packing": {"bytes": size, "timing_s": round(_TIMING_S[0], 3), "kernels": kernels}}


# ---- an adapter's maps ----
#
# All entries go into the few dimensions of a map, those of tokens are set to zero there, and what comes of it is added:
# zeros, for tokens. That takes fewer operations than gathering masks, and shapes are the same whatever a window holds.


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
        self._joined = Joined.of([weights for weights, _ in layers], columns) if downs else None

    def __call__(self, gate: Tensor, values: Tensor) -> Sequence[Tensor]:
        """What the layers give for values [M, in] with the adapter: every output, [M, output].

        `gate` [M, 1] is 1 at masks and 0 at tokens.
        """
        if self._down is None:
            return [_beside(layers, values) for layers in self._layers]
        inner = self._down(values).mul_(gate)
        if self._joined is not None and self._joined.takes(values):
            return _parts(self._joined(values, inner), self._sizes)
        given = zip(self._ups, _parts(inner, self._ranks), self._layers, strict=True)
        return [up.add(part, _beside(layers, values)) for up, part, layers in given]


class LayerSites(NamedTuple):
    """The sites of one transformer layer."""

    attention: Site  # queries, keys and values
    out: Site
    mlp: Site  # gate; up
    down: Site


class Joined:
    """Small layers in bf16 as one product, with an adapter's second factors as further columns.

    A product by oneDNN takes about ten microseconds before it reads a weight, and where weights are small, that is what
    an adapter costs: nine small products a layer, and what adds them up. So its second factors lie behind the layers'
    weights, and what the first ones make of values behind the values: [values, inner] @ [weights, columns].T. Tokens
    have zeros for `inner`. Whether they then get the very bits that the layers give by themselves is looked at for
    every number of positions; where not, the layers run by themselves. It takes as much memory as the layers' weights.
    """

    def __init__(self, layers: Sequence[Weights], weight: Tensor, columns: int, nbytes: int) -> None:
        """`weight` [out, in + R] is packed, of the layers as they are; their biases are read at every call."""
        self.layers, self.weight, self.columns, self.nbytes = layers, weight, columns, nbytes
        self.shape = *(tuple(layer["weight"].shape) for layer in layers), columns

    @classmethod
    @torch.no_grad()
    def of(cls, layers: Sequence[Weights], columns: Tensor) -> Joined | None:
        """Layers with columns [out, R], where that is faster: packed themselves, all or none with a bias.

        In fp32 a small product does not go through oneDNN, and costs a third.
        """
        weights, has_bias = [layer["weight"] for layer in layers], {layer["bias"] is not None for layer in layers}
        is_packed = all(weight.dtype is torch.bfloat16 and weight.data_ptr() in COPIES for weight in weights)
        size = sum(weight.numel() for weight in weights)
        if not (packing_is_on() and is_packed and size <= _LARGEST_JOINED and len(has_bias) == 1):
            return None
        weight = torch.cat([torch.cat(weights), columns], 1)
        packed = _packed_for_good(weight) if psutil.virtual_memory().available > _ROOM else None
        if packed is None:
            return None
        joined = cls(layers, packed, columns.shape[1], weight.nbytes)
        JOINED.add(joined)
        return joined

    def takes(self, values: Tensor) -> bool:
        """Whether it may be called for values [M, in]: tokens among them must get what the layers give alone."""
        return not torch.compiler.is_compiling() and len(values) <= FEW and _exact(self)[len(values)]

    def __call__(self, values: Tensor, inner: Tensor) -> Tensor:
        """Values [M, in] and what the columns are multiplied by, [M, R], to the layers' outputs [M, out]."""
        biases = [layer["bias"] for layer in self.layers]
        bias = None if biases[0] is None else torch.cat(biases)
        return by_onednn(torch.cat([values, inner], 1), self.weight, bias)


JOINED: WeakSet[Joined] = WeakSet()  # for as long as somebody holds them
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
        found = False, *(torch.equal(one(*given), _beside(one.layers, given[0])) for given in some)
        _EXACT[here] = found
    return found


def _beside(layers: Sequence[Weights], values: Tensor) -> Tensor:
    """What layers give for values [M, in], one beside the other, [M, out]."""
    mapped = [linear(values, layer["weight"], layer["bias"]) for layer in layers]
    return mapped[0] if len(mapped) == 1 else torch.cat(mapped, 1)


def _up(layer: Layer, like: Tensor) -> Tensor:
    weights, one = layer
    return like.new_empty(len(weights["weight"]), 0) if one is None else one.up


def _parts(values: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    return [values] if len(sizes) == 1 else values.split_with_sizes(sizes, 1)


def _packed_for_good(weight: Tensor) -> Tensor | None:
    """A bf16 weight [out, in] that nobody writes to, in the order in which oneDNN reads it; None where it cannot."""
    if weight.device.type != "cpu" or not weight.numel() or not reads_bf16():
        return None
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _PACKED_FOR)
    return packed


class _Small:
    """A linear map without a bias, too small to be read slowly: what it costs is the call."""

    def __init__(self, weight: Tensor) -> None:
        self._across = weight.T.contiguous()  # [in, out]
        # Where torch's own product of two matrices goes through oneDNN, calling that directly is faster.
        self._packed = _packed_for_good(weight) if weight.dtype is torch.bfloat16 else None

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
