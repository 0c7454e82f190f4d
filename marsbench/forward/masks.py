"""Attention: who sees whom, as what it adds to its scores, and which of torch's kernels are left out."""

import torch
import torch.nn.functional as F
from torch import Tensor

from marsbench.forward.window import Window

ALIGNED = 16  # elements of a mask's row


def additive_mask(visible: Tensor, relative: Tensor, dtype: torch.dtype, *, copies: int = 1) -> Tensor:
    """What attention adds to its scores, [N, 1, copies * W, S], or [N, 1, 1, S] where W is 1.

    `visible` bool [W, W] says which entries of its window an entry sees (itself always), `relative` integer [N, S]
    which entry a slot holds: -1 is seen by all entries, W by none. The entries are repeated `copies` times.
    """
    width, slots, lowest = len(visible), relative.shape[1], lowest_of(dtype)
    if relative.device.type != "cpu":  # whose kernels would copy a mask with rows of another length, in every layer
        relative = F.pad(relative, (0, -slots % ALIGNED), value=width)
    if width == 1:  # of the slots, only those behind the window are hidden
        return (relative.clamp(min=0).to(dtype) * lowest)[:, None, None, :slots]
    table = torch.full((copies, width, width + 2), lowest, dtype=dtype, device=relative.device)
    table[:, :, 0] = 0
    table[:, :, 1:-1].masked_fill_(visible, 0)
    return table.flatten(0, 1)[:, relative + 1].transpose(0, 1).unsqueeze(1)[..., :slots]


def lowest_of(dtype: torch.dtype) -> float:
    """What hides a slot: low enough that nothing is left of it, and finite when kernels scale it, as by log2(e)."""
    return max(torch.finfo(dtype).min, -1e30)


def sliding_mask(full: Tensor, window: Window, relative: Tensor, reach: int) -> Tensor:
    """An `additive_mask` [N, 1, W, S] for layers in which an entry sees `reach` positions, its own among them.

    What was cached before the window lies in the slot of its position; the window's entries say their own.
    """
    if window.slots <= reach:
        return full
    slots, width = torch.arange(relative.shape[1], device=relative.device), window.position.shape[1]
    of_entry = window.position.gather(1, relative.clamp(0, width - 1))
    position = torch.where(relative < 0, slots, of_entry)  # [N, S]
    far = position.unsqueeze(1) <= window.position.unsqueeze(2) - reach
    return full.masked_fill(far.unsqueeze(1), lowest_of(full.dtype))


def without_cudnn_attention() -> None:
    """Keep torch from cuDNN's attention, which it prefers on H100 and H200; other kernels take its place.

    Its backward pass gives NaN with a mask for some lengths, where all scores of a query are low, as they are in
    Qwen2.5 (pytorch/pytorch#196678). Its forward pass is planned anew for every number of keys, tens of milliseconds
    each time, and decoding meets a new number at every step.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
