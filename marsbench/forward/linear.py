"""One linear map, by the fastest of torch's kernels for its size. All read the weight as it lies, [out, in].

A decoding step multiplies few positions by weights that do not fit into a CPU's cache: its time is the time to read
them, and `F.linear` takes two to six times that. One or two positions are read fastest as the narrow right side of a
product, weight first (one is doubled: a vector would take a kernel for vectors, which is slow again); more of them by
oneDNN. Where the weight fits, neither gains anything.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LARGE = 1 << 18  # elements of a weight, from which on reading it is what takes the time
FEW = 64  # positions, up to which it is
NARROW = 2  # positions, up to which they are best on the right
_ORDINARY = (nn.Parameter, Tensor)  # a subclass has a linear map of its own
_HAS_ONEDNN: bool = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")  # type: ignore[no-untyped-call]


def linear(values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear`: values [..., in], weight [out, in] and bias [out] to [..., out], up to rounding."""
    if weight.numel() < LARGE or not is_read_slowly(values, weight):
        return F.linear(values, weight, bias)
    if values.numel() <= NARROW * weight.shape[1]:
        return _on_the_right(values, weight, bias)
    return _compiled(values, weight, bias) if torch.compiler.is_compiling() else _by_onednn(values, weight, bias)


def is_read_slowly(values: Tensor, weight: Tensor) -> bool:
    """Whether `F.linear` is not the way to take: few positions in fp32 on a CPU, a large weight, no gradient wanted."""
    return (
        _HAS_ONEDNN
        and weight.numel() >= LARGE
        and 0 < values.numel() <= FEW * weight.shape[1]
        and values.dtype is torch.float32
        and weight.dtype is torch.float32
        and values.device.type == "cpu"
        and weight.device.type == "cpu"
        and type(weight) in _ORDINARY
        and not torch.is_grad_enabled()
    )


def _on_the_right(values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """For one or two positions."""
    flat = values.reshape(-1, weight.shape[1]).contiguous()  # lying across, as results do, it is read slowly again
    narrow = flat if len(flat) == NARROW else torch.cat((flat, flat))
    mapped = (weight @ narrow.t()).t()[: len(flat)].view(*values.shape[:-1], -1)
    return mapped if bias is None else mapped + bias


def _by_onednn(values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    mapped: Tensor = torch.ops.mkldnn._linear_pointwise(values, weight, bias, "none", [], "")
    return mapped


# Inductor has a lowering of oneDNN's operation for weights that it has packed itself, and fails on others: it gets to
# see an operation of ours, which it calls as it is.
_compiled = torch.library.custom_op(
    "marsbench::linear", _by_onednn, mutates_args=(), schema="(Tensor values, Tensor weight, Tensor? bias) -> Tensor"
)


@_compiled.register_fake
def _shape_of_linear(values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return values.new_empty(*values.shape[:-1], weight.shape[0])
