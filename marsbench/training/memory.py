"""Memory in training: freed memory kept in the process, what is at hand, and what a forward pass leaves behind."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

# glibc's names and numbers (malloc.h): when to give memory back, how much to ask for, what to map by itself.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_LARGEST_MMAP_THRESHOLD = 32 * 2**20


def keep_freed_memory() -> None:
    """Tell glibc's allocator to reuse freed memory; does nothing with other allocators.

    A training step frees and allocates some hundred tensors of megabytes. By default each of them is new memory from
    the system, a page fault for every 4 KiB.
    """
    libc = _glibc()
    if libc is not None:
        libc.mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1)
        libc.mallopt(_TOP_PAD, 64 * 2**20)


def give_back_freed_memory() -> None:
    """Give what is kept of freed memory back to the system, wherever whole pages of it lie.

    Tensors of ever other sizes leave gaps that the next ones do not fit in, so what is kept grows from step to step.
    """
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    """The C library, where it is glibc."""
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "gnu_get_libc_version") else None


def at_hand(device: torch.device) -> int | None:
    """Bytes that are free on a device; None where nobody tells."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    if device.type != "cpu":
        return None
    try:
        import psutil

        free = int(psutil.virtual_memory().available)
    except Exception:  # psutil is missing, or raises its own on a system that hides such numbers
        return None
    limited = _left_in_container(Path("/sys/fs/cgroup"))
    return free if limited is None else min(free, limited)


def resident(device: torch.device) -> int | None:
    """Bytes that this process holds on a device; None where nobody tells."""
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    try:
        import psutil

        return int(psutil.Process().memory_info().rss)
    except Exception:  # as above
        return None


def peak() -> int | None:
    """The most bytes that this process ever held, on the GPU where there is one; None where nobody tells."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_reserved())
    try:
        import resource
    except ImportError:  # Windows
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024  # elsewhere it counts in KiB


def _left_in_container(group: Path) -> int | None:
    """What a container's limit leaves, files in memory that can be dropped not counted; None where there is none."""
    try:
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        used = int((group / "memory.current").read_text(encoding="ascii"))
        facts = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
        return None if limit == "max" else max(0, int(limit) - used + int(facts.get("inactive_file", 0)))
    except (OSError, ValueError):
        return None


def bytes_kept(call: Callable[[], Tensor], weights: Iterable[Tensor]) -> int:
    """Bytes that a forward pass keeps for the backward pass: every storage once, those of `weights` not counted."""
    own = {weight.untyped_storage().data_ptr() for weight in weights}
    kept: dict[int, int] = {}

    def keep(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return saved.detach()  # an output that its own node holds on to is never freed

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        result = call()  # held until the sum is done, so that no storage is freed and its place reused
    del result
    return sum(kept.values())
