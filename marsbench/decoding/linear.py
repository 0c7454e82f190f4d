"""One linear map, by the fastest of torch's kernels for its size. All read the weight as it lies, [out, in].

A decoding step multiplies few positions by weights that do not fit into a CPU's cache: its time is the time to read
them. oneDNN reads such weights faster than `F.linear` does, which has no equal where the weight fits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LARGE = 1 << 19  # elements of a weight, from which on reading it is what takes the time
FEW = 64  # positions, up to which it is
_ORDINARY = (nn.Parameter, Tensor)  # a subclass has a linear map of its own
_HAS_ONEDNN: bool = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")  # type: ignore[no-untyped-call]


def linear(values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear`: values [..., in], weight [out, in] and bias [out] to [..., out], up to rounding."""
    if weight.numel() < LARGE or not reads_with_onednn(values, weight):
        return F.linear(values, weight, bias)
    return _compiled(values, weight, bias) if torch.compiler.is_compiling() else _by_onednn(values, weight, bias)


def reads_with_onednn(values: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN takes this linear map: few positions in fp32 on a CPU, a large weight, and no gradient wanted."""
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
