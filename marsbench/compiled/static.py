"""The decode loop in fixed shapes: the same methods and the same step as one graph, for `torch.compile`.

The eager loop fits every step to the rows: as many positions as the fullest row needs, no row that has ended. That
takes decisions between operations, and some 150 operations whose launch costs more than their work where a model is
small or a device is fast. Here a step has a shape of its own, a `Shape`: so many rows, so many slots, so many pending
tokens and drafts. Whatever a row lacks of that is filled up, and fillers are written to a slot that nobody sees; a row
that has ended is frozen. So propose, forward, accept and commit need no number from the device, and the host reads
one small tensor a step. Joining, leaving and changing the shape stay outside.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from marsbench.decoding.engine import Method, advance
from marsbench.decoding.rows import Extent, Most, Rows
from marsbench.forward.cache import RaggedCache
from marsbench.forward.decoder import Decoder


class Shape(NamedTuple):
    """What a step is made for; every step of one shape is the same graph."""

    rows: int
    length: int  # the most tokens that a row may come to
    thresholded: bool  # whether any row has a confidence to pass
    sampled: bool  # whether any row samples


class FixedCache(RaggedCache):
    """A cache that never grows: its spare slot, which nobody sees, is the last one."""

    fixed = True

    @classmethod
    def like(cls, other: RaggedCache, rows: int, slots: int) -> FixedCache:
        """An empty cache for the model whose keys and values `other` holds."""
        cache = cls()
        cache._rows, cache._capacity = rows, slots + 1
        cache._layers = [
            (keys.new_zeros(rows, slots + 1, *keys.shape[2:]), values.new_zeros(rows, slots + 1, *values.shape[2:]))
            for keys, values in other._layers
        ]
        return cache

    def alias(self) -> FixedCache:
        """The same stores, to be prepared for another forward."""
        cache = FixedCache()
        cache._rows, cache._capacity, cache._layers = self._rows, self._capacity, self._layers
        return cache

    def put(self, places: Tensor, other: RaggedCache, chosen: Tensor) -> None:
        """Copy rows `chosen` [n] of another cache to `places` [n]."""
        for mine, theirs in zip(self._layers, other._layers, strict=True):
            for store, source in zip(mine, theirs, strict=True):
                slots = min(store.shape[1], source.shape[1])
                store[places, :slots] = source[chosen, :slots]


class Stand:
    """Rows and caches of one shape, in buffers that are written in place."""

    def __init__(self, shape: Shape, most: Most, like: Rows, cache: RaggedCache) -> None:
        """Empty rows, as wide as the shape says; `like` and `cache` tell of dtypes, layers and heads."""
        self.shape = shape
        narrow = {"tokens": shape.length + 1, "born": 0, "drafts": most.drafted}
        fields: dict[str, Any] = {
            name: values.new_zeros(shape.rows, *([narrow[name]] if name in narrow else []))
            for name, values in like.tensors().items()
        }
        extent = Extent(
            pending=most.pending,
            drafted=most.drafted,
            length=shape.length,
            even=most.pending == 1 and not most.drafted,
            thresholded=shape.thresholded,
            sampled=shape.sampled,
            draft_pending=most.draft_pending,
            room=(shape.length, 1),
        )
        slots = shape.length + most.behind
        self.draft_cache = FixedCache.like(like.draft_cache, shape.rows, slots)
        self.rows = Rows(draft_cache=self.draft_cache, extent=extent, fixed=True, **fields)
        for values in (self.rows.start, self.rows.length, self.rows.end):
            values += 1  # an empty row is a prompt of one token that has come to its end
        self.cache = FixedCache.like(cache, shape.rows, slots)

    def put(self, places: Sequence[int], rows: Rows, cache: RaggedCache, chosen: Sequence[int]) -> None:
        """Copy rows `chosen` of others, and what they have cached, to `places`."""
        at, those = (torch.tensor(one, dtype=torch.long, device=rows.length.device) for one in (places, chosen))
        for name, values in self.rows.tensors().items():
            new = getattr(rows, name)[those]
            values[at] = _as_wide(new, values.shape[1]) if new.dim() == 2 else new
        self.cache.put(at, cache, those)
        self.draft_cache.put(at, rows.draft_cache, those)

    @property
    def dtype(self) -> torch.dtype | None:
        """Of the cached keys and values."""
        return self.cache.dtype

    @contextmanager
    def still(self) -> Iterator[None]:
        """Nobody moves meanwhile: steps compute as ever, and change nothing that counts."""
        ends = self.rows.end.clone()
        self.rows.end.copy_(self.rows.length)
        try:
            yield
        finally:
            self.rows.end.copy_(ends)

    def clear(self) -> None:
        """Nobody is there any more."""
        self.rows.end.copy_(self.rows.length)

    def bytes(self) -> int:
        """Memory that the caches hold, in bytes."""
        return self.cache.bytes() + self.draft_cache.bytes()

    def freeze(self, places: Sequence[int]) -> None:
        """Take these rows out of every step to come."""
        at = torch.tensor(places, device=self.rows.length.device)
        self.rows.end[at] = self.rows.length[at]


def _as_wide(values: Tensor, width: int) -> Tensor:
    """[N, T] as [N, width], cut or filled up with zeros."""
    return F.pad(values, (0, max(0, width - values.shape[1])))[:, :width]


def static_step(decoder: Decoder, method: Method, stand: Stand, eos: Tensor) -> Tensor:
    """One forward for every row of a stand; ended rows stay as they are.

    Returns:
        integer [N, 3 + K], what the host needs to know of each row: whether it has just ended, how many tokens are
        new, how many entries of its window were no fillers, and the tokens.
    """
    rows = replace(stand.rows, draft_cache=stand.draft_cache.alias())
    before = rows.length
    alive = before < rows.end
    window, accepted, ended = advance(decoder, method, rows, stand.cache.alias(), 0, eos)
    ended = ended & alive
    new = torch.where(alive, rows.length - before, 0)
    offset = torch.arange(accepted.ids.shape[1], device=before.device)
    tokens = rows.tokens.gather(1, (before.unsqueeze(1) + offset).clamp(max=rows.tokens.shape[1] - 1))
    real = alive * window.input_ids.shape[1] if window.real is None else (window.real & alive.unsqueeze(1)).sum(1)
    for name in ("length", "cached", "drafts", "drafted", "draft_cached"):
        mine, after = getattr(stand.rows, name), getattr(rows, name)
        if after is not mine:
            mine.copy_(torch.where(alive.unsqueeze(1) if mine.dim() == 2 else alive, after, mine))
    stand.rows.end.copy_(torch.where(ended, stand.rows.length, stand.rows.end))  # frozen: its end is not ahead of it
    return torch.cat([torch.stack([ended.long(), new, real], dim=1), tokens], dim=1)


class Steps:
    """Runs steps on stands, operation by operation."""

    def stand(self, method: Method, shape: Shape, most: Most, like: Rows, cache: RaggedCache) -> Stand:
        """A stand with nobody on it; the arguments are those of `Stand`, and the method that it is for."""
        return Stand(shape, most, like, cache)

    def left(self, method: Method, stand: Stand) -> None:
        """A stand is no longer needed."""

    def __call__(self, decoder: Decoder, method: Method, stand: Stand, eos: Tensor) -> Tensor:
        """One step; see `static_step`."""
        return static_step(decoder, method, stand, eos)
