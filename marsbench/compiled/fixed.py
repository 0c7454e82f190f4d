"""Rows in fixed shapes: the same methods and the same step as one graph, for `torch.compile` and CUDA graphs.

The eager loop fits every step to the rows. That takes decisions between operations, and some 150 operations whose
launch costs more than their work where a model is small or a device is fast. Here a step has a `Shape`: so many rows,
slots, pending tokens and drafts. Fillers are written to a slot that no row sees; a row that has ended is frozen. So
propose, forward, accept and commit need no number from the device, and the host reads one small tensor a step.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import isfinite
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from marsbench.decoding.requests import NewTokens, Seat
from marsbench.decoding.rows import Extent, Most, Rows
from marsbench.decoding.step import FittedRows, Method, advance, pack_tokens, unpack_tokens
from marsbench.forward.cache import RaggedCache
from marsbench.forward.decoder import Decoder
from marsbench.forward.joined import parts_for


class Shape(NamedTuple):
    """What a step is made for; every step of one shape is the same graph."""

    rows: int
    length: int  # the most tokens that a row may come to
    thresholded: bool  # whether any row has a confidence to pass
    sampled: bool  # whether any row samples
    cut: bool = False  # whether any row samples from a part of the tokens only

    def fits(self, needed: "Shape") -> bool:
        enough = all(mine >= other for mine, other in zip(self, needed, strict=True))
        return enough and self.rows < 2 * needed.rows and self.length <= 2 * needed.length


class FixedCache(RaggedCache):
    """A cache that never grows: its spare slot, which no row sees, is the last one."""

    fixed = True

    @classmethod
    def like(cls, other: RaggedCache, rows: int, slots: int) -> "FixedCache":
        cache = cls()
        cache._rows, cache._capacity = rows, slots + 1
        for keys, values in other._layers:
            cache.parts = parts = parts_for(keys, rows, slots + 1)
            if parts is None:
                both = [store.new_zeros(rows, slots + 1, *store.shape[2:]) for store in (keys, values)]
            else:
                cache._capacity = parts.number * parts.length
                cache._both.append(keys.new_zeros(rows, cache._capacity, 2, *keys.shape[2:]))
                both = list(cache._both[-1].unbind(2))
            cache._layers.append((both[0], both[1]))
        return cache

    def alias(self) -> "FixedCache":
        cache = FixedCache()
        cache._rows, cache._capacity, cache._layers = self._rows, self._capacity, self._layers
        cache.parts, cache._both = self.parts, self._both
        return cache

    def put(self, places: Tensor, other: RaggedCache, chosen: Tensor) -> None:
        for mine, theirs in zip(self._layers, other._layers, strict=True):
            for store, source in zip(mine, theirs, strict=True):
                slots = min(store.shape[1], source.shape[1])
                store[places, :slots] = source[chosen, :slots]


class Stand:
    """Rows and caches of one shape, in buffers that are written in place."""

    def __init__(self, shape: Shape, most: Most, like: Rows) -> None:
        """Empty rows, as wide as the shape says; `like` tells of dtypes, layers and heads."""
        self.shape = shape
        narrow = {"tokens": shape.length + 1, "settled_by": 0, "drafts": most.drafted}
        fields: dict[str, Any] = {
            name: values.new_zeros(shape.rows, *([narrow[name]] if name in narrow else values.shape[1:]))
            for name, values in like.tensors().items()
        }
        extent = Extent(
            pending=most.pending, drafted=most.drafted, length=shape.length,
            even=most.pending == 1 and not most.drafted, thresholded=shape.thresholded, sampled=shape.sampled,
            cut=shape.cut, draft_pending=most.draft_pending, room=(shape.length, 1), windows=(most.drafted + 1, 1),
            groups=(-1, 0),
        )  # fmt: skip
        self.caches = [FixedCache.like(cache, shape.rows, shape.length + most.behind) for cache in like.caches]
        self.rows = Rows(**fields, cache=self.caches[0], draft_cache=self.caches[1], extent=extent, fixed=True)
        for values in (self.rows.start, self.rows.length, self.rows.end):
            values += 1  # an empty row is a prompt of one token that has come to its end

    def put(self, places: Sequence[int], rows: Rows, chosen: Iterable[int]) -> None:
        """Copy rows `chosen` of others, and what they have cached, to `places`."""
        device = rows.length.device
        at, those = (torch.tensor([*values], dtype=torch.long, device=device) for values in (places, chosen))
        for name, values in self.rows.tensors().items():
            new = getattr(rows, name)[those]
            if new.dim() == 2:  # as wide as here, cut or filled up with zeros
                new = F.pad(new, (0, max(0, values.shape[1] - new.shape[1])))[:, : values.shape[1]]
            values[at] = new
        for mine, theirs in zip(self.caches, rows.caches, strict=True):
            mine.put(at, theirs, those)

    @contextmanager
    def still(self) -> Iterator[None]:
        """No row grows meanwhile: steps compute as ever, and change nothing that counts."""
        ends = self.rows.end.clone()
        self.clear()
        try:
            yield
        finally:
            self.rows.end.copy_(ends)

    def clear(self) -> None:
        self.rows.end.copy_(self.rows.length)

    def bytes(self) -> int:
        return sum(cache.bytes() for cache in self.caches)


def static_step(decoder: Decoder, method: Method, stand: Stand) -> Tensor:
    """One forward for every row of a stand, ended rows staying as they are; what `pack_tokens` says of it."""
    cache, draft_cache = (kept.alias() for kept in stand.caches)
    rows = replace(stand.rows, cache=cache, draft_cache=draft_cache)
    before = rows.length
    alive = before < rows.end
    window, accepted = advance(decoder, method, rows, 0)
    new = pack_tokens(rows, before, window, accepted, alive)
    for name in ("length", "cached", "drafts", "drafted", "groups", "draft_cached"):
        mine, after = getattr(stand.rows, name), getattr(rows, name)
        if after is not mine:
            mine.copy_(torch.where(alive.unsqueeze(1) if mine.dim() == 2 else alive, after, mine))
    return new


class Steps:
    def __call__(self, decoder: Decoder, method: Method, device: torch.device) -> "FixedRows":
        return FixedRows(self, decoder, method)

    def spare(self, decoder: Decoder, method: Method, shape: Shape, like: FittedRows) -> Stand | None:
        """A stand that another batch has left."""

    def left(self, decoder: Decoder, method: Method, stand: Stand) -> None:
        """A stand is no longer needed."""

    def step_on(self, decoder: Decoder, method: Method, stand: Stand) -> Callable[[], Tensor]:
        return lambda: static_step(decoder, method, stand)


class FixedRows(FittedRows):
    """A stand, and which request has which row. If it is too small, or more than twice too large, all move to another.

    Prompts are forwarded in shapes that are fitted to them. Where a device `records` steps, one is under way while the
    one before is read, and a stand is long enough for its requests' ends at once; else it grows with them.
    """

    def __init__(self, steps: Steps, decoder: Decoder, method: Method, *, records: bool = False) -> None:
        most = method.most()
        assert most is not None, "`why_not` has been asked"
        super().__init__()
        self.lag = int(records)
        self._steps, self._decoder, self._method = steps, decoder, method
        self._most = most
        self.stand: Stand | None = None
        self._step: Callable[[], Tensor] | None = None

    def fits(self, ahead: int) -> bool:
        return self.stand is not None and self.stand.shape.fits(self._needed(self.seats.values(), ahead))

    def make_room(self) -> None:
        if self.seats:
            self._move([*self.seats.values()], self)

    def step(self, decoder: Decoder, method: Method, number: int) -> Callable[[], list[NewTokens]]:
        assert self._step is not None, "the batch is not empty"
        read = _on_its_way(self._step())
        return lambda: unpack_tokens(read(), number)

    def take_in(self, newcomers: Sequence[FittedRows]) -> None:
        seats = [*self.seats.values(), *(seat for group in newcomers for seat in group.seats.values())]
        if self.stand is None or not self.stand.shape.fits(self._needed(seats, 0)):
            self._move(seats, newcomers[0])
        assert self.stand is not None, "there is room now"
        free = [row for row in range(self.stand.shape.rows) if row not in self.seats]
        for group in newcomers:
            places, free = free[: len(group.seats)], free[len(group.seats) :]
            self.stand.put(places, group.rows, group.seats)
            self.seats |= dict(zip(places, group.seats.values(), strict=True))

    def take_out(self, gone: Sequence[int]) -> None:
        """See `FittedRows`: rows that are out stay as they are; when all are out, there is no stand."""
        if self.seats:
            at = torch.tensor(gone, device=self.rows.length.device)
            self.rows.end[at] = self.rows.length[at]
        else:
            self._leave()

    def _move(self, seats: Sequence[Seat], like: FittedRows) -> None:
        shape = self._needed(seats, 0)
        spare = self._steps.spare(self._decoder, self._method, shape, like)
        stand = Stand(shape, self._most, like.rows) if spare is None else spare
        if self.stand is not None:
            stand.put(range(len(self.seats)), self.rows, self.seats)
            self._leave()
        self.stand, self._rows, self.seats = stand, stand.rows, dict(enumerate(self.seats.values()))
        self._step = self._steps.step_on(self._decoder, self._method, stand)

    def _leave(self) -> None:
        assert self.stand is not None, "the batch was not empty"
        self._steps.left(self._decoder, self._method, self.stand)
        self.stand = self._step = self._rows = None

    def _needed(self, seats: Collection[Seat], ahead: int) -> Shape:
        if self.lag:
            length = max(seat.end for seat in seats)
        else:  # so many tokens can come with that step, and with each whose tokens are not known yet
            length = max(seat.length for seat in seats) + (self._most.behind + 1) * (1 + ahead)
        return Shape(
            rows=_bucket(len(seats), 1),
            length=_bucket(length, *((64,) if self.lag else (64, 96))),
            thresholded=any(isfinite(seat.needed) for seat in seats),
            sampled=any(seat.request.temperature > 0 for seat in seats),
            cut=any(seat.request.is_cut for seat in seats),
        )


def _bucket(least: int, *sizes: int) -> int:
    """The first of `sizes`, doubled again and again, that is `least` or more."""
    while max(sizes) < least:
        sizes = tuple(2 * size for size in sizes)
    return min(size for size in sizes if size >= least)


def _on_its_way(numbers: Tensor) -> Callable[[], list[list[int]]]:
    if numbers.device.type != "cuda":
        return numbers.tolist
    copied = torch.empty_like(numbers, device="cpu", pin_memory=True).copy_(numbers, non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record()

    def read() -> list[list[int]]:
        arrived.synchronize()
        rows: list[list[int]] = copied.tolist()
        return rows

    return read
