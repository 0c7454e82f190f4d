"""Keeps freed memory in the process, so that every training step need not ask the operating system for it anew."""

from __future__ import annotations

import ctypes

# glibc's names and numbers (malloc.h): when to give memory back, how much to ask for, what to map by itself.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_LARGEST_MMAP_THRESHOLD = 32 * 2**20


def keep_freed_memory() -> None:
    """Tell glibc's allocator to reuse freed memory; does nothing with other allocators.

    A training step frees and allocates some hundred tensors of megabytes. By default each of them is new memory from
    the system, a page fault for every 4 KiB.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt") or not hasattr(libc, "gnu_get_libc_version"):
        return
    libc.mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1)
    libc.mallopt(_TOP_PAD, 64 * 2**20)
