"""One linear map, by the fastest kernel there is for its size.

A decoding step multiplies few positions by weights that do not fit into a CPU's cache: its time is the time to read
them, and `F.linear` takes two to six times that, because oneDNN reorders the weight at every call. Three ways around
it: one or two positions as the narrow right side of a product, weight first (one is doubled: a vector would take a
kernel for vectors, which is slow again); oneDNN called directly; and oneDNN on a copy of the weight that was reordered
once (`packed`). Which is fastest depends on the machine and the number of positions, and is measured where weights are
packed. Where the weight fits into the cache, none of them gains anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LARGE = 1 << 18  # elements of a weight, from which on reading it is what takes the time
FEW = 64  # positions, up to which it is
PACKED_FOR = 16  # positions that oneDNN is told of when it chooses the order of a copy
NARROW = 2  # positions, up to which they are best on the right of a weight that is not packed
ORDINARY = (nn.Parameter, Tensor)  # a subclass has a linear map of its own
HAS_ONEDNN: bool = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")  # type: ignore[no-untyped-call]


@dataclass(eq=False)
class Copy:
    """A weight's packed copy, and what tells whether it is still of that weight; see `packed`."""

    weight: Tensor
    version: int  # of the weight, when it was packed
    place: int  # where it lay
    probe: Tensor  # a view of a few of its values
    values: Tensor  # what they were
    packed: Tensor
    kernels: tuple[str, ...] = ()  # which to take, by positions from 0 to FEW

    def is_of(self, weight: Tensor) -> bool:
        """Whether `weight` is the same one, and nothing that keeps count has written to it."""
        return weight is self.weight and weight._version == self.version and weight.data_ptr() == self.place


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
        and type(weight) in ORDINARY
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


def packed_for_good(weight: Tensor) -> Tensor | None:
    """A bf16 weight [out, in] that nobody writes to, in the order in which oneDNN reads it; None where it cannot."""
    if weight.device.type != "cpu" or not weight.numel() or not reads_bf16():
        return None
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), PACKED_FOR)
    return packed


Kernel = Callable[[Tensor, Copy, Tensor | None], Tensor]
KERNELS: dict[str, Kernel] = {
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
