"""Which of torch's attention kernels are left out; training and decoding see to it before their first forward pass."""

from __future__ import annotations

import torch


def without_cudnn_attention() -> None:
    """Keep torch from cuDNN's attention, which it prefers on H100 and H200; other kernels take its place.

    Its backward pass gives NaN with a mask for some lengths, where all scores of a query are low, as they are in
    Qwen2.5 (pytorch/pytorch#196678). Its forward pass is planned anew for every number of keys, tens of milliseconds
    each time, and decoding meets a new number at every step.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
