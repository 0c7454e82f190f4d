"""Memory in training: how many sequences of a batch go through the model at once, by the memory at hand.

A batch is cut into pieces of neighbouring rows. The losses are means over rows, so a piece counts by its share of them:
loss and gradient are the whole batch's, up to rounding. How much fits is measured: a forward pass shows how many bytes
each token keeps for the backward pass.
"""

import ctypes
import resource
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import psutil
import torch
from torch import Tensor, nn

from marsbench.training.objectives import IGNORED, most_logits
from marsbench.training.stages import Recipe

# Of the memory that is left, for what the forward pass keeps; gradients on their way back and gaps take the rest.
_SHARE = 0.6
_FULL = 0.6  # of the limit: a process that holds more after a step gives back what it keeps of freed memory
_BYTES_PER_LOGIT = 4 * 4  # of a chunk: logits in fp32, their softmax, and the gradients of both
_MOMENTS = 3  # what the first step adds to every trained weight: a gradient and AdamW's two moments, in fp32

Batch = dict[str, Tensor]


class Fitting:
    """How many entries of a batch go at once: measured at the first step, and kept when the training is resumed."""

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        assert recipe.pretrained is not None, "the world's batches are not cut"
        self.noisy = recipe.block_size is not None
        self.longest = recipe.pretrained.max_length
        gib = recipe.pretrained.memory_gib
        # A limit in a scale's file is for a machine that others use too; a GPU's memory is the training's alone.
        self.limit = None if gib is None or device.type != "cpu" else int(gib * 2**30)
        self.device = device
        self.most: int | None = None

    def cut(self, batch: Batch, loss: Callable[..., Tensor], weights: Sequence[nn.Parameter]) -> list[Batch]:
        if self.most is None:
            self.most = self.room(loss, weights)
        return pieces(batch, self.most, noisy=self.noisy)

    def room(self, loss: Callable[..., Tensor], weights: Sequence[nn.Parameter]) -> int:
        """How many entries have room at once; `loss` is called with small batches, nothing is drawn."""
        free, device = at_hand(self.device), self.device
        assert free is not None, "batches are cut where it is known"
        room = free if self.limit is None else min(free, self.limit - resident())

        def kept(rows: int, length: int) -> int:
            ids = torch.ones(rows, length, dtype=torch.long, device=device)
            return bytes_kept(lambda: loss(input_ids=ids, labels=ids), weights)

        # What is kept once, as are bf16 copies of the weights, is told from what every row leaves behind.
        short = max(2, self.longest // 4)
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            one, two, long = kept(1, short), kept(2, short), kept(1, self.longest)
        once = max(0, 2 * one - two)
        per_entry = max(1, long - once) / (self.longest * (1 + self.noisy))
        trained = sum(parameter.numel() for parameter in weights if parameter.requires_grad)
        room -= once + _BYTES_PER_LOGIT * most_logits(device) + _MOMENTS * 4 * trained
        return max(1, int(_SHARE * room / per_entry))

    def make_room(self) -> None:
        if self.limit is not None and resident() > _FULL * self.limit:
            give_back_freed_memory()

    def facts(self) -> dict[str, int]:
        return {} if self.most is None else {"entries_at_once": self.most}


def row_sizes(labels: Tensor, *, noisy: bool) -> Tensor:
    """Entries that each row takes, integer [N]: up to its last label, and its noisy copies where there are some."""
    labelled = labels != IGNORED
    place = torch.arange(1, labels.shape[1] + 1, device=labels.device)
    return (labelled * place).amax(1).clamp(min=1) + (labelled.sum(1) if noisy else 0)


def pieces(batch: Batch, most: int, *, noisy: bool) -> list[Batch]:
    """A batch in pieces of `most` entries or of one row, in order, each cut behind its last label."""
    sizes, cut, first = row_sizes(batch["labels"], noisy=noisy).tolist(), list[Batch](), 0
    for end in range(1, len(sizes) + 1):
        if end == len(sizes) or max(sizes[first : end + 1]) * (end + 1 - first) > most:
            rows = {name: values[first:end] for name, values in batch.items()}
            width = int(row_sizes(rows["labels"], noisy=False).max())
            cut.append({name: values[:, :width] if values.dim() == 2 else values for name, values in rows.items()})
            first = end
    return cut


# glibc's names and numbers (malloc.h): when to give memory back, how much to ask for, what to map by itself.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_LARGEST_MMAP_THRESHOLD = 32 * 2**20
_LIBC = ctypes.CDLL(None)  # another library than glibc has no such functions


def keep_freed_memory() -> None:
    """Tell glibc to reuse freed memory: a step takes hundreds of tensors, each with a page fault for every 4 KiB."""
    if hasattr(_LIBC, "mallopt"):
        _LIBC.mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        _LIBC.mallopt(_TRIM_THRESHOLD, 2**31 - 1)
        _LIBC.mallopt(_TOP_PAD, 64 * 2**20)


def give_back_freed_memory() -> None:
    """Give back whole pages of what is kept: tensors of many sizes leave gaps that the next ones do not fit in."""
    if hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(0)


def at_hand(device: torch.device) -> int | None:
    """Bytes that are free on a device; None where the system does not tell."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    if device.type != "cpu":
        return None
    free = int(psutil.virtual_memory().available)
    limited = _left_in_container(Path("/sys/fs/cgroup"))
    return free if limited is None else min(free, limited)


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


def peak() -> int:
    """The most bytes that this process ever held, on the GPU where there is one."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_reserved())
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024  # elsewhere it counts in KiB


def _left_in_container(group: Path) -> int | None:
    """Bytes that a container's limit leaves, files in memory that can be dropped not counted; None without a limit."""
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
