"""What a forward pass is given and gives: a window of token entries, who sees whom in it, and the model's answer."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, wraps
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from marsbench.forward.draft_head import HeadInUse

ALIGNED = 16  # elements of a mask's row


class Window(NamedTuple):
    """What a method wants forwarded: W entries a row.

    Entry j of a row goes into the cache slot `begin` + j of that row, and sees every slot before `begin`. Where
    `begin` lies before the end of what is cached, the entries up to there are fillers.
    """

    input_ids: Tensor  # [N, W]
    position: Tensor  # [N, W]
    begin: Tensor  # [N]
    slots: int  # the slots that the furthest row needs, its window included
    visible: Tensor  # bool [W, W], which entries an entry sees, the same for all rows
    real: Tensor | None = None  # bool [N, W], entries that are no fillers; None = all
    # The entry from which on all are masks, for all rows or of each [N]; None = there are none.
    masks_begin: int | Tensor | None = None


def places(entries: Tensor, width: int) -> Tensor:
    """Where the entries [N, K] of windows of a width lie, one window behind the other: [N * K]."""
    return (entries + width * torch.arange(len(entries), device=entries.device).unsqueeze(1)).flatten()


def at_entries(values: Tensor, entries: Tensor) -> Tensor:
    """Of values [N, W, V], those at some entries [N, K] of each row: [N, K, V]."""
    count, width, size = values.shape  # whole vectors are copied: `gather` would look each number up
    return values.flatten(0, 1).index_select(0, places(entries, width)).view(count, entries.shape[1], size)


@dataclass(frozen=True)
class Answer:
    """The model's answer to a window. Logits are computed only for the entries that are asked for."""

    hidden: Tensor  # [N, W, H], as the LM head reads it; meaningless for fillers
    lm_head: Callable[[Tensor], Tensor]
    head: HeadInUse | None = None  # behind the masks

    def states(self, entries: Tensor) -> Tensor:
        return at_entries(self.hidden, entries)

    def logits(self, entries: slice | Tensor) -> Tensor:
        """Logits [N, K, V] at some of the window's entries: the same ones of every row, or each row's own [N, K]."""
        return self.lm_head(self.hidden[:, entries] if isinstance(entries, slice) else self.states(entries))


_RECORDING = [False]


@contextmanager
def recording() -> Iterator[None]:
    """Operations become part of a graph that reads memory where it lies, for the time of a `with` block."""
    _RECORDING[0] = True
    try:
        yield
    finally:
        _RECORDING[0] = False


def makes_a_graph() -> bool:
    """Whether operations are recorded or compiled: then nothing may be among them that is kept for a while only."""
    return _RECORDING[0] or torch.compiler.is_compiling()


WIDEST_KEPT = 256  # entries
KEPT: list[Any] = []  # what keeps, of every function
_Make = TypeVar("_Make", bound=Callable[..., Any])


def kept(make: _Make) -> _Make:
    """Make once what a function gives for shapes, of which a window's width comes first, but not in a graph."""
    keeping = lru_cache(maxsize=64)(make)
    KEPT.append(keeping)

    @wraps(make)
    def made(width: int, /, *shape: Any) -> Any:
        return (keeping if width <= WIDEST_KEPT and not makes_a_graph() else make)(width, *shape)

    return cast("_Make", made)


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
    return max(torch.finfo(dtype).min, -1e30)


def sliding_mask(full: Tensor, window: Window, relative: Tensor, reach: int) -> Tensor:
    """An `additive_mask` [N, 1, W, S] for layers in which an entry sees `reach` positions, its own among them."""
    if window.slots <= reach:
        return full
    slots, width = torch.arange(relative.shape[1], device=relative.device), window.position.shape[1]
    of_entry = window.position.gather(1, relative.clamp(0, width - 1))
    position = torch.where(relative < 0, slots, of_entry)  # [N, S]
    far = position.unsqueeze(1) <= window.position.unsqueeze(2) - reach
    return full.masked_fill(far.unsqueeze(1), lowest_of(full.dtype))


def without_cudnn_attention() -> None:
    """Keep torch from cuDNN's attention, which it prefers on H100 and H200.

    Its backward pass gives NaN with a mask for some lengths (pytorch/pytorch#196678), and its forward pass is planned
    anew, for tens of milliseconds, for every number of keys: decoding meets a new one at every step.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
