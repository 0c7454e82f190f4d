"""The running batch in fixed shapes: who sits where, when the shape changes, and what the host is told."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from marsbench.compiled.static import Shape, Stand, Steps
from marsbench.decoding.engine import Batch, Method, News, OnTokens, tell
from marsbench.decoding.generation import (
    PREFILL_POSITIONS,
    Finish,
    Generation,
    Meter,
    Request,
    as_list,
    end_of,
    split_eos,
)
from marsbench.decoding.outside import OnFinished
from marsbench.decoding.rows import Rows
from marsbench.errors import UserError
from marsbench.forward.cache import RaggedCache
from marsbench.forward.decoder import decoder_of
from marsbench.forward.modules import device_of


@dataclass
class _Seat:
    """A request in flight, as the host knows it: it keeps the tokens, so that nothing is asked twice."""

    index: int
    request: Request
    bar: float
    before: int  # forwards of the batch before the request's first
    tokens: list[int] = field(default_factory=list)
    settled_by: list[int] = field(default_factory=list)

    def length(self) -> int:
        """Prompt and tokens."""
        return len(self.request.prompt_ids) + len(self.tokens)

    def take(self, tokens: list[int], number: int, eos_ids: list[int]) -> tuple[list[int], Finish]:
        """Note the tokens of forward `number`: those that count, and what has ended the output, if anything has."""
        # A stop sequence may have begun before; nothing in front of that has to be looked at again.
        before = max((len(stop) for stop in self.request.stop), default=1) - 1
        begun = self.tokens[-before:] if before else []
        emitted, finish = end_of([*begun, *tokens], self.request, eos_ids)
        fresh = tokens[: emitted - len(begun)]
        self.tokens += fresh
        self.settled_by += [number - self.before] * len(fresh)
        return fresh, finish


class StaticBatch:
    """`Batch` in fixed shapes: the same requests, callbacks and tokens.

    Prompts are of all lengths, so they are forwarded eagerly, by a `Batch` that hands its rows over. They take the
    rows of a stand that are free; where it is too small, or more than twice too large, everybody moves to another.

    Args:
        run: what runs its steps, `Graphs` to have them compiled.

    The others are those of `Batch`; the method's windows have a fixed shape (`Method.most`).
    """

    def __init__(
        self,
        model: Any,
        method: Method,
        *,
        eos_id: int | Sequence[int],
        pad_id: int,
        on_finished: OnFinished,
        on_tokens: OnTokens | None = None,
        meter: Meter | None = None,
        prefill_positions: int = PREFILL_POSITIONS,
        run: Steps | None = None,
    ) -> None:
        self.model, self.method = model, method
        self.decoder = decoder_of(model)
        most = method.most()
        if most is None:
            raise UserError(
                f"the windows of method {method.name!r} have no fixed shape", fix="decode without --compile"
            )
        self._most = most
        self._eos_ids = as_list(eos_id)
        self._eos = torch.tensor(self._eos_ids, dtype=torch.long, device=device_of(model))
        self._pad_id, self._meter = pad_id, meter
        self._run = Steps() if run is None else run
        self._on_finished, self._on_tokens = on_finished, on_tokens
        self._prefill_positions = prefill_positions
        self._forwards = 1
        self._stand: Stand | None = None
        self._seats: dict[int, _Seat] = {}  # by row of the stand
        # A device works while the host reads what it did before.
        self._lag = int(self._eos.device.type == "cuda")
        self._under_way: deque[tuple[int, _Packed]] = deque()

    def __len__(self) -> int:
        return len(self._seats)

    @torch.inference_mode()
    def join(self, requests: Mapping[int, Request]) -> None:
        """Bring requests in; see `Batch.join`."""
        news = self._drain()
        for seat in self._seats.values():
            if seat.index in requests:
                raise UserError(
                    f"request {seat.index} is in flight already", fix="give every request an index of its own"
                )
        seats: dict[int, _Seat] = {}

        def first_tokens(index: int, tokens: list[int]) -> None:
            request, before = requests[index], self._forwards - 1
            seats[index] = _Seat(index, request, self.method.bar(request.threshold), before, tokens, [1] * len(tokens))
            if self._on_tokens is not None:
                news.append(partial(self._on_tokens, index, tokens))

        door = Batch(
            self.model,
            self.method,
            eos_id=self._eos_ids,
            pad_id=self._pad_id,
            on_finished=lambda index, generation: news.append(partial(self._on_finished, index, generation)),
            on_tokens=first_tokens,
            meter=self._meter,
            prefill_positions=self._prefill_positions,
        )
        door.join(requests)
        rows, cache = door.release()
        if rows is not None and len(rows):
            self._seat(rows, cache, [seats[index] for index in rows.index.tolist()])
        tell(news)

    @torch.inference_mode()
    def step(self) -> None:
        """One forward for every row."""
        if self._stand is None:
            return
        news: list[News] = []
        if not _fits(self._stand.shape, self._needed(list(self._seats.values()))):
            news += self._drain()
        if self._stand is not None:
            stand = self._make_room(list(self._seats.values()), self._stand.rows, self._stand.cache)
            self._forwards += 1
            packed = self._run(self.decoder, self.method, stand, self._eos)
            self._under_way.append((self._forwards, _Packed(packed)))
            if len(self._under_way) > self._lag:
                news += self._settle()
        tell(news)

    @torch.inference_mode()
    def leave(self, index: int) -> None:
        """Take a request out before its end; what it has come to is reported as cancelled."""
        news = self._drain()
        for row in [row for row, seat in self._seats.items() if seat.index == index]:
            news.append(self._retire(row, self._forwards, "cancelled"))
            self._freeze([row])
        tell(news)

    @torch.inference_mode()
    def set_threshold(self, index: int, threshold: float | None) -> None:
        """Change the threshold of a request in flight, from the next step on."""
        bar = self.method.bar(threshold)
        for row, seat in self._seats.items():
            if seat.index == index and self._stand is not None:
                seat.bar = bar
                self._stand.rows.bar[row] = bar

    def _seat(self, rows: Rows, cache: RaggedCache, newcomers: Sequence[_Seat]) -> None:
        """Give the rows of another batch their places."""
        stand = self._make_room([*self._seats.values(), *newcomers], rows, cache)
        free = [row for row in range(stand.shape.rows) if row not in self._seats][: len(newcomers)]
        stand.put(free, rows, cache, range(len(newcomers)))
        self._seats |= dict(zip(free, newcomers, strict=True))

    def _make_room(self, seats: Sequence[_Seat], like: Rows, cache: RaggedCache) -> Stand:
        """A stand that fits these requests, those in flight in their places: the one there is, or a new one."""
        needed = self._needed(seats)
        old = self._stand
        if old is not None and _fits(old.shape, needed):
            return old
        stand = self._run.stand(self.method, needed, self._most, like, cache)
        if old is not None:
            stand.put(range(len(self._seats)), old.rows, old.cache, list(self._seats))
            self._run.left(self.method, old)
        self._stand, self._seats = stand, dict(enumerate(self._seats.values()))
        return stand

    def _needed(self, seats: Sequence[_Seat]) -> Shape:
        """The shape of the next step of these requests."""
        # So many tokens can come with that step and with each whose tokens are not known yet.
        most = (1 + self._most.behind) * (1 + len(self._under_way))
        return Shape(
            rows=_bucket(len(seats), 1),
            length=_bucket(max(seat.length() for seat in seats) + most, 64, 96),
            thresholded=any(isfinite(seat.bar) for seat in seats),
            sampled=any(seat.request.temperature > 0 for seat in seats),
        )

    def _drain(self) -> list[News]:
        """Wait for every step that is under way."""
        return [one for _ in range(len(self._under_way)) for one in self._settle()]

    def _settle(self) -> list[News]:
        """Take in what a step has done."""
        number, packed = self._under_way.popleft()
        news: list[News] = []
        positions, stopped = 0, []
        for row, (has_ended, count, real, *tokens) in enumerate(packed.read()):
            seat = self._seats.get(row)
            if seat is None or not count:
                continue
            positions += real
            fresh, finish = seat.take(tokens[:count], number, self._eos_ids)
            if self._on_tokens is not None and fresh:
                news.append(partial(self._on_tokens, seat.index, fresh))
            if has_ended or finish != "length":
                news.append(self._retire(row, number, finish))
                stopped += [] if has_ended else [row]
        if self._meter is not None and self._stand is not None:
            self._meter.count(positions, self._stand.bytes(), prompt=False)
            self._meter.tick()
        self._freeze(stopped)
        return news

    def _freeze(self, rows: Sequence[int]) -> None:
        """Take rows out of the steps to come; without anybody left, there is no stand."""
        if not self._seats and self._stand is not None:
            self._run.left(self.method, self._stand)
            self._stand = None
            self._under_way.clear()
        elif rows and self._stand is not None:
            self._stand.freeze(rows)

    def _retire(self, row: int, number: int, finish: Finish) -> News:
        """Take out a request that has come to its end, and return the report on it."""
        seat = self._seats.pop(row)
        kept, eos = split_eos(seat.tokens, finish)
        generation = Generation(kept, seat.settled_by, number - seat.before, finish, eos)
        return partial(self._on_finished, seat.index, generation)


def _fits(has: Shape, needed: Shape) -> bool:
    """Whether a shape is enough, and not far too much."""
    enough = all(mine >= other for mine, other in zip(has, needed, strict=True))
    return enough and has.rows < 2 * needed.rows and has.length <= 2 * needed.length


def _bucket(least: int, *sizes: int) -> int:
    """The first of `sizes`, doubled again and again, that is `least` or more."""
    while max(sizes) < least:
        sizes = tuple(2 * size for size in sizes)
    return min(size for size in sizes if size >= least)


class _Packed:
    """A step's result on its way to the host."""

    def __init__(self, packed: Tensor) -> None:
        self._arrived = None
        if packed.device.type == "cuda":
            packed = torch.empty_like(packed, device="cpu", pin_memory=True).copy_(packed, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()
        self._packed = packed

    def read(self) -> list[list[int]]:
        """Wait for it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        rows: list[list[int]] = self._packed.tolist()
        return rows
