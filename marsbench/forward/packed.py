"""Weights packed once: copies in the order in which oneDNN reads them, beside the model, that follow what is written.

oneDNN reorders an unpacked weight at every call, which costs as much again as reading it. So a model that begins to
decode on a CPU has its large weights copied in that order, which takes as much memory as they do. Nothing is written to
the model. When a batch begins, each copy is held to its weight: the same tensor, at the same place, at the same
version, and with the same values in a few places, since what is written through `.data` (by adapters that are merged,
and by sharding wrappers) leaves no other trace. A few values written that way, and no others, would not be noticed.

Which kernel reads a weight of a shape fastest, for how many positions, is measured here once per process.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import psutil
import torch
from torch import Tensor

from marsbench.forward import linear as maps
from marsbench.forward.linear import COPIES, FEW, HAS_ONEDNN, KERNELS, ORDINARY, PACKED_FOR, Copy, reads_bf16

VARIABLE = "MARSBENCH_PACK"  # 0 = never
_POSITIONS = (1, 2, 4, 8, 16, 32)  # that kernels are timed for; the smallest that is not less counts, else the last
_TIMED_BYTES = 24 << 20  # of the weights of a shape, or one weight: more than stays in a core's cache
_WIDEST_RIGHT = 4  # positions, up to which "weight first" is tried
_PROBES = 16  # values of a weight that are compared
_SPARE = 1.2  # free memory that packing asks for, over what it takes
_Shape = tuple[tuple[int, ...], torch.dtype, int]  # of a weight: size, type, and the threads that read it


# What else holds packed weights and says their `nbytes`, for as long as somebody holds it.
ALSO_PACKED: WeakSet[Any] = WeakSet()


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


class Packing:
    """The packed copies of a model's linear layers; they go when this does.

    Args:
        layers: the layers' own parameters by name, as they are at the moment.
        to_join: in bf16 pack small weights too, so that what `joined` makes of them follows them.
    """

    def __init__(self, layers: Sequence[dict[str, Any]], *, to_join: bool = False) -> None:
        self._layers, self._to_join = layers, to_join
        self._copies: list[Copy | None] | None = None  # of each layer, None for one that has none; None = not looked at
        self._probes: list[Tensor] = []
        self._values = torch.empty(0)  # theirs, when the weights were packed
        self.changes = 0  # how often copies were made or given up

    def follow(self) -> None:
        """See to it that every copy is of its weight as it is now; called when a batch begins."""
        if not packing_is_on():
            if self._copies is not None:
                self._copies, self.changes = None, self.changes + 1
        elif self._copies is None or not self._holds(self._copies):
            self._pack()

    def _holds(self, copies: Sequence[Copy | None]) -> bool:
        for layer, copy in zip(self._layers, copies, strict=True):
            if copy is not None and not copy.is_of(layer["weight"]):
                return False
        return not self._probes or torch.equal(torch.cat(self._probes), self._values)

    @torch.no_grad()
    def _pack(self) -> None:
        """Pack what has changed, and everything the first time, if there is room for it."""
        ours = [layer["weight"] for layer in self._layers]
        weights = [weight if can_be_packed(weight, to_join=self._to_join) else None for weight in ours]
        every = {weight.data_ptr(): weight for weight in weights if weight is not None}
        found = {place: copy for place, weight in every.items() if (copy := _current(place, weight)) is not None}
        self.changes += 1
        self._copies, self._probes = None, []  # what is replaced is given back before its successor is made
        missing = sum(weight.nbytes for place, weight in every.items() if place not in found)
        if missing * _SPARE < psutil.virtual_memory().available:
            found |= {place: _made(weight) for place, weight in every.items() if place not in found}
        copies = list(found.values())
        _choose(copies)
        self._copies = [None if weight is None else found.get(weight.data_ptr()) for weight in weights]
        self._probes = [copy.probe for copy in copies]
        self._values = torch.cat([copy.values for copy in copies]) if copies else torch.empty(0)


def _current(place: int, weight: Tensor) -> Copy | None:
    """A weight's copy as it is now: our own, or another decoder's of the same model."""
    copy = COPIES.get(place)
    return copy if copy is not None and copy.is_of(weight) and torch.equal(copy.probe, copy.values) else None


def _made(weight: Tensor) -> Copy:
    probe = _probe(weight)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), PACKED_FOR)
    copy = Copy(weight, weight._version, weight.data_ptr(), probe, probe.clone(), packed)
    COPIES[copy.place] = copy
    return copy


def can_be_packed(weight: Any, *, to_join: bool = False) -> bool:
    """Whether a weight is large (or in bf16 and to be joined), plain, on the CPU, and of a type that oneDNN reads."""
    return (
        HAS_ONEDNN
        and type(weight) in ORDINARY
        and weight.device.type == "cpu"
        and (weight.numel() >= maps.LARGE or (to_join and weight.dtype is torch.bfloat16))
        and weight.dim() == 2
        and weight.is_contiguous()
        and not weight.is_inference()  # it has no version
        and (weight.dtype is torch.float32 or (weight.dtype is torch.bfloat16 and reads_bf16()))
    )


def _probe(weight: Tensor) -> Tensor:
    """A view of a few of a weight's values, no two of one row or column where that can be."""
    step = max(1, weight.numel() // _PROBES)
    step += step % weight.shape[1] == 0
    return weight.detach().view(-1)[::step]


# ---- which kernel ----

_FASTEST: dict[_Shape, tuple[str, ...]] = {}  # by positions, from 0 to FEW
_TIMING_S = [0.0]  # what timing has taken so far


def _shape(weight: Tensor) -> _Shape:
    return tuple(weight.shape), weight.dtype, torch.get_num_threads()


def _choose(copies: Sequence[Copy]) -> None:
    """Say which kernel each copy takes, timed now for shapes that are new."""
    by_shape: dict[_Shape, list[Copy]] = defaultdict(list)
    for copy in copies:
        by_shape[_shape(copy.weight)].append(copy)
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
    best: dict[_Shape, list[tuple[float, str]]] = defaultdict(list)
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
            best[shape].append(min(found))
    _TIMING_S[0] += time.perf_counter() - started
    return {shape: _by_positions([name for _, name in found]) for shape, found in best.items()}


def _by_positions(names: Sequence[str]) -> tuple[str, ...]:
    """The kernel for every number of positions, given those for `_POSITIONS`."""
    nearest = [sum(timed < positions for timed in _POSITIONS) for positions in range(FEW + 1)]
    return tuple(names[min(index, len(names) - 1)] for index in nearest)


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
    size = sum(copy.weight.nbytes for copy in COPIES.values()) + sum(one.nbytes for one in ALSO_PACKED)
    return {"packing": {"bytes": size, "timing_s": round(_TIMING_S[0], 3), "kernels": kernels}}
