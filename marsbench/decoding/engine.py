"""The running batch, and `decode`, which sends a list of requests through one.

Every method runs through this loop and this cache; a method only says what to put after the committed tokens
(`propose`) and which of the answers to keep (`accept`). Rows advance independently, a row that is finished leaves the
batch, and new ones may join it at any time. A batch's tensors lie on the device; a `Seat` for each row, on the
host, holds its request and tokens.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch

from marsbench.decoding.acceptance import confidence_needed
from marsbench.decoding.generation import PREFILL_POSITIONS, Generation, Meter, Request, as_list, end_of
from marsbench.decoding.requests import NewTokens, Seat, check_requests, groups_of, laid_out
from marsbench.decoding.step import FittedRows, Method, forward
from marsbench.decoding.windows import leading_windows
from marsbench.errors import UserError, integer
from marsbench.forward.adapter import parted
from marsbench.forward.decoder import Decoder, decoder_of
from marsbench.forward.limits import check_ids, check_mask_id, context_length
from marsbench.forward.modules import device_of

__all__ = ["Batch", "KindOfBatch", "Method", "OnTokens", "check_requests", "context_length", "decode", "forward"]

# Called with a request's index and what it has come to.
OnFinished = Callable[[int, Generation], None]
# Called with a request's index and the tokens that a forward has just added, as they come (an EOS may be among them).
OnTokens = Callable[[int, list[int]], None]
Notice = Callable[[], None]  # a callback with its arguments bound, called when the batch is in order
Shapes = Callable[[Decoder, Method, torch.device], FittedRows]  # makes what holds the rows; as yet there are none


class OutsideMethod(ABC):
    """A reference point that brings a loop of its own: the same requests, answers cut by the same rules."""

    name: ClassVar[str]
    one_row: ClassVar[bool] = False  # decodes one sequence at a time

    def confidence_needed(self, threshold: float | None) -> float:
        return confidence_needed(threshold, None, self.name)

    @abstractmethod
    def continue_batch(
        self, model: Any, requests: Sequence[Request], eos_ids: list[int], pad_id: int, meter: Meter | None = None
    ) -> list[tuple[list[int], list[int]]]:
        """Continue a batch greedily, each request to its limit at least: its new tokens, and tokens per forward."""


class Batch:
    """Rows in flight. `join` brings requests in, `step` moves every row forward, finished rows leave by themselves.

    The model, in eval mode, is looked at when the batch is made: what is written to it, and what hooks come, counts for
    the next batch. `eos_id` is one token that ends a sequence, or several; `pad_id` fills the unused ends of rows.
    `on_finished` is called with a request's index and its generation, `on_tokens` with its new tokens after every
    forward. Callbacks come last, when all rows are in their places: they may `join` and `leave` as they like, and one
    that raises harms no other request. `shapes` runs the steps in fixed shapes, such as `Graphs`; None = every step is
    fitted.

    Prompts are forwarded in parts of at most `prefill_positions` (rows times the longest prompt among them), which
    bounds the memory that newcomers need: in groups of rows, and a longer row piece by piece, where the method's
    `causal_prompt` allows it. To a row, it is one forward all the same.
    """

    def __init__(
        self, model: Any, method: Method, *, eos_id: int | Sequence[int], pad_id: int, on_finished: OnFinished,
        on_tokens: OnTokens | None = None, meter: Meter | None = None, prefill_positions: int = PREFILL_POSITIONS,
        shapes: Shapes | None = None,
    ) -> None:  # fmt: skip
        integer(prefill_positions, "prefill positions", least=1)
        check_ids(model, pad=pad_id)
        check_mask_id(model, method)
        for token in as_list(eos_id):
            integer(token, "EOS id")  # one that there is no token of ends nothing
        self.model, self.method = model, method
        self.decoder = decoder_of(model)
        self._device = device_of(model)
        self._running = FittedRows() if shapes is None else shapes(self.decoder, method, self._device)
        self._eos_ids, self._pad_id = frozenset(as_list(eos_id)), pad_id
        self._on_finished, self._on_tokens = on_finished, on_tokens
        self._meter, self._prefill_positions = meter, prefill_positions
        self._forwards = 1  # the number of the latest forward; from 1, as 0 is EMPTY in `settled_by`
        self._under_way: deque[tuple[int, Callable[[], list[NewTokens]]]] = deque()  # steps by their numbers

    def __len__(self) -> int:
        return len(self._running.seats)

    def __contains__(self, index: object) -> bool:
        return any(seat.index == index for seat in self._running.seats.values())

    def join(self, requests: Mapping[int, Request]) -> None:
        """Bring requests in under indices of the caller's choice: all of them, or none and a `UserError`."""
        for _ in self.joining(requests):
            pass

    @torch.inference_mode()
    def joining(self, requests: Mapping[int, Request], most: int | None = None) -> Iterator[None]:
        """`join` in pieces of `most` positions; no other joins meanwhile, and a caller that stops brings none in."""
        if not requests:
            return
        most = most or self._prefill_positions
        check_requests(list(requests.values()), self.model)
        for index in requests:
            if index in self:
                raise UserError(f"request {index} is in flight already", fix="give every request an index of its own")
        groups = []
        for part in groups_of(requests, most):
            needed = self.method.confidence_needed
            seats = [Seat(index, request, needed(request.threshold)) for index, request in part.items()]
            rows = laid_out(seats, pad_id=self._pad_id, device=self._device)
            rows.prefill_positions = most
            groups.append(FittedRows(rows, seats))
        for group in groups:
            is_long = group.rows.extent.pending > most and self.method.causal_prompt
            for window in leading_windows(group.rows) if is_long else ():
                forward(self.decoder, group.rows.cache, window)
                if self._meter is not None:
                    self._meter.count(window.input_ids.numel(), group.bytes(), prompt=True)
                yield
        notices = self._read_all()
        try:
            came = [each for group in groups for each in self._prefill(group)]
            if self._meter is not None:
                self._meter.tick()
            if going_on := [group for group in groups if group.seats]:
                self._running.take_in(going_on)
            notices += came
        finally:
            call_all(notices)

    @torch.inference_mode()
    def step(self) -> None:
        notices: list[Notice] = []
        try:
            if not self._running.fits(len(self._under_way)):
                notices += self._read_all()
                self._running.make_room()
            if len(self):
                new = self._running.step(self.decoder, self.method, self._forwards + 1)
                self._forwards += 1  # one that fails does not count
                self._under_way.append((self._forwards, new))
                if len(self._under_way) > self._running.lag:
                    notices += self._read_oldest()
        finally:
            call_all(notices)

    @torch.inference_mode()
    def leave(self, index: int) -> None:
        """Take a request out before its end; what it has come to is reported as cancelled."""
        notices = self._read_all()
        for row in [row for row, seat in self._running.seats.items() if seat.index == index]:
            seat = self._running.seats.pop(row)
            notices.append(partial(self._on_finished, index, seat.generation("cancelled", self._forwards)))
            self._running.take_out([row])
        call_all(notices)

    @torch.inference_mode()
    def turn(self, knobs: Mapping[int, tuple[float | None, int, bool]]) -> None:
        """Change how several requests in flight decode, from the next step on: by index, the threshold, and for
        `methods.mixed` the tokens that one forward settles at most, and whether guesses are checked before they count.
        """
        turned = {}
        for row, seat in self._running.seats.items():
            if seat.index in knobs:
                threshold, window, verified = knobs[seat.index]
                turned[row] = self.method.confidence_needed(threshold), integer(window, "window", least=1), verified
        for row, (needed, *_) in turned.items():
            self._running.seats[row].needed = needed
        if turned:
            self._running.rows.turn(turned)

    def _prefill(self, group: FittedRows) -> list[Notice]:
        for seat in group.seats.values():
            seat.before = self._forwards - 1  # others may have stepped between two pieces
        new = group.step(self.decoder, self.method, self._forwards)
        return self._settle(group, self._forwards, new(), prompt=True)

    def _read_all(self) -> list[Notice]:
        return [each for _ in range(len(self._under_way)) for each in self._read_oldest()]

    def _read_oldest(self) -> list[Notice]:
        if not len(self):  # the requests that it was for have left
            self._under_way.clear()
            return []
        number, new = self._under_way.popleft()
        return self._settle(self._running, number, new())

    def _settle(self, group: FittedRows, number: int, new: list[NewTokens], *, prompt: bool = False) -> list[Notice]:
        """Note what forward `number` has brought to some rows, and take out those that have ended; the callbacks."""
        notices: list[Notice] = []
        positions, gone = 0, []
        for row, brought in enumerate(new):
            if (seat := group.seats.get(row)) is None:
                continue
            positions += brought.positions
            fresh, finish = seat.take(brought, self._eos_ids)
            if self._on_tokens is not None and fresh:
                notices.append(partial(self._on_tokens, seat.index, fresh))
            if finish is not None:
                notices.append(partial(self._on_finished, seat.index, seat.generation(finish, number)))
                gone.append(row)
                del group.seats[row]
        if self._meter is not None:
            self._meter.count(positions, group.bytes(), prompt=prompt)
            if not prompt:
                self._meter.tick()
        if gone:
            group.take_out(gone)
        return notices


KindOfBatch = Callable[..., Batch]


def call_all(notices: Sequence[Notice]) -> None:
    """Make all callbacks, in order; what one of them raises is raised when all have been called."""
    failures = []
    for call in notices:
        try:
            call()
        except BaseException as error:
            failures.append(error)
    if failures:
        raise failures[0]


def decode(
    model: Any, method: Method | OutsideMethod, requests: Sequence[Request], *, eos_id: int | Sequence[int],
    pad_id: int, batch_size: int = 16, on_finished: OnFinished = lambda index, generation: None,
    on_tokens: OnTokens | None = None, meter: Meter | None = None, prefill_positions: int = PREFILL_POSITIONS,
    kind: KindOfBatch | None = None,
) -> list[Generation]:  # fmt: skip
    """Continue every request, `batch_size` rows at once at most; the answers come in the order of the requests.

    Prompts join in order of length, so that little is wasted on padding, and as soon as a quarter of the batch is free.
    Arguments are as for `Batch`, which `kind` makes: `Batch` itself, or `Graphs().batch` for compiled steps. An outside
    method tells no tokens, has its own way with prompts, and its meter only ticks. `UserError` for a request that the
    model cannot run.
    """
    integer(batch_size, "batch size", least=1)
    integer(prefill_positions, "prefill positions", least=1)
    check_requests(requests, model)
    generations: dict[int, Generation] = {}

    def finished(index: int, generation: Generation) -> None:
        generations[index] = generation
        on_finished(index, generation)

    waiting = sorted(range(len(requests)), key=lambda index: len(requests[index].prompt_ids))
    if isinstance(method, OutsideMethod):
        in_order = [(index, requests[index]) for index in waiting]
        _decode_outside(parted(model)[0], method, in_order, as_list(eos_id), pad_id, batch_size, finished, meter)
    else:
        batch = (kind or Batch)(
            model, method, eos_id=eos_id, pad_id=pad_id, on_finished=finished, on_tokens=on_tokens, meter=meter,
            prefill_positions=prefill_positions,
        )  # fmt: skip
        while waiting or len(batch):
            free = batch_size - len(batch)
            if waiting and free >= max(1, batch_size // 4):
                batch.join({index: requests[index] for index in waiting[:free]})
                waiting = waiting[free:]
            batch.step()
    return [generations[index] for index in range(len(requests))]


def _decode_outside(
    model: Any, method: OutsideMethod, requests: Sequence[tuple[int, Request]], eos_ids: list[int], pad_id: int,
    batch_size: int, on_finished: OnFinished, meter: Meter | None,
) -> None:  # fmt: skip
    """`decode` for an outside method: requests by their indices, in the order in which they are batched."""
    if method.one_row and batch_size > 1:
        raise UserError(f"method {method.name!r} decodes one sequence at a time", fix="give a batch size of 1")
    if any(request.temperature for _, request in requests):
        raise UserError(f"method {method.name!r} is greedy", fix="give temperature 0")
    for _, request in requests:
        method.confidence_needed(request.threshold)
    for first in range(0, len(requests), batch_size):
        lot = requests[first : first + batch_size]
        answers = method.continue_batch(model, [request for _, request in lot], eos_ids, pad_id, meter)
        for (index, request), (tokens, accepted) in zip(lot, answers, strict=True):
            # Cut at the request's own end, and only the forwards up to there count.
            emitted, finish = end_of(tokens[: request.max_new_tokens], request, eos_ids)
            settled_by = [number for number, count in enumerate(accepted, 1) for _ in range(count)][:emitted]
            on_finished(index, Generation.of(tokens[:emitted], settled_by, settled_by[-1], finish))
