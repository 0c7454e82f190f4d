"""The one decode loop: propose -> forward -> accept -> commit, with a cursor per row.

Every method runs through this loop and this cache; a method only says what to put after the committed tokens
(`propose`) and which of the answers to keep (`accept`). Rows of a batch advance independently, a row that is
finished leaves the batch, and new ones may join it at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

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
from marsbench.decoding.outside import OnFinished, OutsideMethod, decode_outside
from marsbench.decoding.prefill import check_prefill_positions, groups_of, leading_windows
from marsbench.decoding.reading import Newest, newest, take_out
from marsbench.decoding.requests import check_requests, context_length, laid_out
from marsbench.decoding.rows import Accepted, Most, Rows
from marsbench.errors import UserError
from marsbench.forward.adapter import parted
from marsbench.forward.cache import RaggedCache
from marsbench.forward.decoder import Decoder, decoder_of
from marsbench.forward.modules import device_of
from marsbench.forward.window import Answer, Window

__all__ = ["Batch", "Method", "OnTokens", "check_requests", "commit", "context_length", "decode", "forward"]

# Called with a request's index and the tokens that a forward has just added, as they come (an EOS may be among them).
OnTokens = Callable[[int, list[int]], None]
News = Callable[[], None]  # a callback with what it is to be told, called when the batch is in order


class Method(Protocol):
    """A decoding method: functions of the rows in flight, without a state of its own."""

    name: ClassVar[str]
    causal_prompt: ClassVar[bool]  # whether plain causal windows may cache a long prompt's beginning before `propose`

    def bar(self, threshold: float | None) -> float:
        """The confidence that a request's threshold asks for; `UserError` where the method cannot take it."""
        ...

    def most(self) -> Most | None:
        """What its steps need at most, None where no bound can be given: then it has no static step."""
        ...

    def propose(self, rows: Rows) -> Window:
        """Say what to forward."""
        ...

    def accept(self, rows: Rows, window: Window, answer: Answer) -> Accepted:
        """Read the answer, say what to keep of it, and note the drafts for the next window in `rows`."""
        ...


class Batch:
    """Rows in flight. `join` brings requests in, `step` moves every row forward, finished rows leave by themselves.

    The model is looked at when the batch is made. Until the last row has left, nobody may write to it, hang anything on
    it, or take anything off: what changes counts for the next batch.

    Callbacks come last, when all rows are in their places: they may `join` and `leave` as they like, and one that
    raises harms nobody else.

    A server would call `join` as requests come, `step` in between, and `set_threshold` when a user turns the knob.

    Prompts are forwarded in parts of at most `prefill_positions` (rows times the longest prompt among them; what a
    method guesses behind the prompts comes on top), which bounds the memory that newcomers need: in groups of rows, and
    a longer row piece by piece, where the method's `causal_prompt` allows it. To a row, it is one forward all the same.
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
    ) -> None:
        check_prefill_positions(prefill_positions)
        self.model, self.method = model, method
        self.decoder = decoder_of(model)
        self._eos_ids = as_list(eos_id)
        self._eos = torch.tensor(self._eos_ids, dtype=torch.long, device=device_of(model))
        self._pad_id = pad_id
        self._on_finished, self._on_tokens = on_finished, on_tokens
        self._meter, self._prefill_positions = meter, prefill_positions
        self._requests: dict[int, Request] = {}
        self._forwards = 1  # the number of the latest forward; `born` tells 0 from it
        self._rows: Rows | None = None
        self._cache = RaggedCache()

    def __len__(self) -> int:
        return len(self._requests)

    @torch.inference_mode()
    def join(self, requests: Mapping[int, Request]) -> None:
        """Bring requests in, each under an index of the caller's choice: all of them, or nobody where one fails.

        Raises:
            UserError: a request that the model cannot run, or an index that is in flight already.
        """
        if not requests:
            return
        check_requests(list(requests.values()), self.model)
        for index in requests.keys() & self._requests.keys():
            raise UserError(f"request {index} is in flight already", fix="give every request an index of its own")
        newcomers = [(self._laid_out(group), RaggedCache()) for group in groups_of(requests, self._prefill_positions)]
        self._requests.update(requests)
        try:
            news = [told for rows, cache in newcomers for told in self._prefill(rows, cache)]
            if self._meter is not None:
                self._meter.tick()
            self._take_in(newcomers)
        except BaseException:  # whatever went wrong with their prompts, nobody has joined
            for index in requests:
                self._requests.pop(index, None)
            raise
        tell(news)

    @torch.inference_mode()
    def step(self) -> None:
        """One forward for every row."""
        if self._rows is None or not len(self._rows):
            return
        self._forwards += 1
        tell(self._advance(self._rows, self._cache, prompt=False))

    @torch.inference_mode()
    def leave(self, index: int) -> None:
        """Take a request out before its end; what it has come to is reported as cancelled."""
        if self._rows is not None and index in self._requests:
            gone = self._rows.index == index
            tell(self._retire(self._rows, self._cache, gone, unfinished="cancelled"))

    def release(self) -> tuple[Rows | None, RaggedCache]:
        """Hand over the rows in flight and what they have cached; the batch is empty then."""
        rows, cache = self._rows, self._cache
        self._rows, self._cache = None, RaggedCache()
        self._requests.clear()
        return rows, cache

    @torch.inference_mode()
    def set_threshold(self, index: int, threshold: float | None) -> None:
        """Change the threshold of a request in flight, from the next step on."""
        bar = self.method.bar(threshold)
        if self._rows is not None and index in self._requests:
            self._rows.bar.masked_fill_(self._rows.index == index, bar)
            self._rows.measure()

    @torch.inference_mode()
    def turn(self, knobs: Mapping[int, tuple[float | None, int, bool]]) -> None:
        """Change how several requests in flight decode, where the method lets rows differ.

        Args:
            knobs: index of a request -> its threshold, the tokens that one forward settles at most, and whether guesses
                are checked before they count.
        """
        rows, turned = self._rows, {index: knobs[index] for index in knobs.keys() & self._requests.keys()}
        if rows is None or not turned:
            return
        for index, (threshold, window, verified) in turned.items():
            chosen = rows.index == index
            rows.bar.masked_fill_(chosen, self.method.bar(threshold))
            rows.window.masked_fill_(chosen, window)
            rows.verified.masked_fill_(chosen, verified)
            if not verified:  # nobody would check them
                rows.drafted.masked_fill_(chosen, 0)
        rows.measure()

    def _laid_out(self, requests: Mapping[int, Request]) -> Rows:
        """Rows of their own for some requests; `UserError` for a threshold that the method cannot take."""
        bars = [self.method.bar(request.threshold) for request in requests.values()]
        rows = laid_out(requests, bars, joined=self._forwards - 1, pad_id=self._pad_id, device=device_of(self.model))
        rows.prefill_positions = self._prefill_positions
        return rows

    def _prefill(self, rows: Rows, cache: RaggedCache) -> list[News]:
        """The forward over the prompts of rows that have a cache of their own, as far as need be in pieces."""
        if rows.extent.pending > rows.prefill_positions and self.method.causal_prompt:
            for window in leading_windows(rows):
                forward(self.decoder, cache, window)
                if self._meter is not None:
                    self._meter.count(window.input_ids.numel(), cache.bytes(), prompt=True)
        return self._advance(rows, cache, prompt=True)

    def _take_in(self, newcomers: list[tuple[Rows, RaggedCache]]) -> None:
        """Put the newcomers that have not ended yet behind the rows in flight."""
        own = [] if self._rows is None else [(self._rows, self._cache)]
        lots = [lot for lot in (*own, *newcomers) if len(lot[0])]
        if not lots:
            return
        (rows, cache), *others = lots
        try:
            if others:
                cache.extend(*(theirs for _, theirs in others))
                rows.extend(*(theirs for theirs, _ in others))
        except BaseException:  # there was no memory for them
            for store in (cache, rows.draft_cache):
                store.keep(len(rows), rows.extent.length)
            raise
        self._rows, self._cache = rows, cache

    def _advance(self, rows: Rows, cache: RaggedCache, *, prompt: bool) -> list[News]:
        """Move rows forward by one window; returns what there is to tell once everything is in its place."""
        before = rows.length
        window, accepted, ended = advance(self.decoder, self.method, rows, cache, self._forwards, self._eos)
        any_ended, *entries = rows.measure(ended.any().long(), *self._to_count(window))
        if self._meter is not None:
            (positions,) = entries or [window.input_ids.numel()]
            self._meter.count(positions, cache.bytes() + rows.draft_cache.bytes(), prompt=prompt)
            if not prompt:
                self._meter.tick()
        news: list[News] = []
        stops = [len(stop) for request in self._requests.values() for stop in request.stop]
        if self._on_tokens is not None or stops:
            behind = max(stops, default=1) - 1
            news, stopped = self._newest(newest(rows, before, accepted.ids.shape[1], behind))
            if any(stopped):
                any_ended, ended = 1, ended | torch.tensor(stopped, device=ended.device)
        return [*news, *(self._retire(rows, cache, ended) if any_ended else [])]

    def _to_count(self, window: Window) -> list[Tensor]:
        """What has to be read for the meter: how many of the entries are no fillers, where some are."""
        return [] if self._meter is None or window.real is None else [window.real.sum()]

    def _newest(self, ends: Sequence[Newest]) -> tuple[list[News], list[bool]]:
        """The reports on new tokens, and which rows have come to an EOS or a stop sequence."""
        news: list[News] = []
        stopped = []
        for index, tokens, known in ends:
            emitted, finish = end_of(tokens, self._requests[index], self._eos_ids)
            stopped.append(finish != "length")
            if self._on_tokens is not None and emitted > known:
                news.append(partial(self._on_tokens, index, tokens[known:emitted]))
        return news, stopped

    def _retire(self, rows: Rows, cache: RaggedCache, ended: Tensor, *, unfinished: Finish = "length") -> list[News]:
        """Take out the rows that have ended, and return the reports on them."""
        news: list[News] = []
        for index, tokens, born, joined in take_out(rows, cache, ended):
            emitted, finish = end_of(tokens, self._requests.pop(index), self._eos_ids, unfinished)
            settled_by = [number - joined for number in born[:emitted]]
            kept, eos = split_eos(tokens[:emitted], finish)
            generation = Generation(kept, settled_by, self._forwards - joined, finish, eos)
            news.append(partial(self._on_finished, index, generation))
        return news


class RunningBatch(Protocol):
    """What a batch of any kind can do; see `Batch`."""

    def __len__(self) -> int: ...

    def join(self, requests: Mapping[int, Request]) -> None: ...

    def step(self) -> None: ...

    def leave(self, index: int) -> None: ...

    def set_threshold(self, index: int, threshold: float | None) -> None: ...


KindOfBatch = Callable[..., RunningBatch]


def tell(news: Sequence[News]) -> None:
    """Call everybody back, in order; what a callback raises is raised when all have been called."""
    failures = []
    for call in news:
        try:
            call()
        except BaseException as error:
            failures.append(error)
    if failures:
        raise failures[0]


def decode(
    model: Any,
    method: Method | OutsideMethod,
    requests: Sequence[Request],
    *,
    eos_id: int | Sequence[int],
    pad_id: int,
    batch_size: int = 16,
    on_finished: OnFinished = lambda index, generation: None,
    on_tokens: OnTokens | None = None,
    meter: Meter | None = None,
    prefill_positions: int = PREFILL_POSITIONS,
    kind: KindOfBatch | None = None,
) -> list[Generation]:
    """Continue every request; the answers come in the order of the requests.

    Prompts join in order of length, so that little is wasted on padding; new ones join as soon as a quarter of the
    batch has become free.

    Args:
        model: a causal language model of transformers, in eval mode.
        method: how to propose and accept.
        requests: what to continue.
        eos_id: the token that ends a sequence, or several of which any does.
        pad_id: any id; fills the unused ends of rows.
        batch_size: rows in flight at once, at most.
        on_finished: called with a request's index and its generation as soon as a row is finished.
        on_tokens: called with a request's index and its new tokens after every forward.
        meter: counts the work; of an outside method's, it only hears the ticks.
        prefill_positions: prompts' positions in one forward, at most; see `Batch`. An outside method has its own way.
        kind: makes the batch, given what `Batch` is: `Batch` itself, or `Graphs.batch` for compiled steps.

    Raises:
        UserError: a request that the model cannot run, or a bound that holds nothing.
    """
    if batch_size < 1:
        raise UserError(f"batch size {batch_size} holds no row", fix="give 1 or more")
    check_prefill_positions(prefill_positions)
    check_requests(requests, model)
    if isinstance(method, OutsideMethod):
        return decode_outside(
            parted(model)[0], method, requests, as_list(eos_id), pad_id, batch_size, on_finished, meter
        )
    generations: dict[int, Generation] = {}

    def finished(index: int, generation: Generation) -> None:
        generations[index] = generation
        on_finished(index, generation)

    batch = (kind or Batch)(
        model, method, eos_id=eos_id, pad_id=pad_id, on_finished=finished, on_tokens=on_tokens, meter=meter,
        prefill_positions=prefill_positions,
    )  # fmt: skip
    waiting = sorted(range(len(requests)), key=lambda index: len(requests[index].prompt_ids))
    while waiting or len(batch):
        free = batch_size - len(batch)
        if waiting and free >= max(1, batch_size // 4):
            batch.join({index: requests[index] for index in waiting[:free]})
            waiting = waiting[free:]
        batch.step()
    return [generations[index] for index in range(len(requests))]


def advance(
    decoder: Decoder, method: Method, rows: Rows, cache: RaggedCache, number: int, eos: Tensor
) -> tuple[Window, Accepted, Tensor]:
    """Propose, forward, accept, commit: the one step of every method, forward `number` of its rows.

    Returns:
        What was forwarded, what was accepted, and which rows have come to their end, bool [N].
    """
    window = method.propose(rows)
    accepted = method.accept(rows, window, forward(decoder, cache, window))
    return window, accepted, commit(rows, accepted, number, eos)


def forward(decoder: Decoder, cache: RaggedCache, window: Window) -> Answer:
    """One pass over a window."""
    width, slots = window.input_ids.shape[1], window.slots
    offset = torch.arange(max(slots, width), device=window.begin.device)
    # A short prompt's fillers lie before its first token: they go to a slot of their own behind all others.
    places = window.begin.unsqueeze(1) + offset[:width]
    nowhere = places < 0
    if cache.fixed and window.real is not None:  # leaving fillers out would take a shape that depends on values
        nowhere, window = nowhere | ~window.real, window._replace(real=None)
    cache.prepare(torch.where(nowhere, slots, places), slots)
    # Relative to its row's window, a slot is -1 (before it), 0 to W - 1 (an entry), or W (behind it).
    relative = (offset[:slots] - window.begin.unsqueeze(1)).clamp(-1, width)
    return decoder(cache, window, relative)


def commit(rows: Rows, accepted: Accepted, forward_number: int, eos: Tensor) -> Tensor:
    """Write the accepted tokens down and move the cursors; returns which rows have come to their end, bool [N]."""
    spare, count = rows.tokens.shape[1] - 1, accepted.ids.shape[1]
    inside = accepted.chosen & (accepted.position < rows.end.unsqueeze(1))
    at = torch.where(inside, accepted.position, spare)
    rows.tokens.scatter_(1, at, accepted.ids)
    if not rows.fixed:  # else the host notes it
        rows.born.scatter_(1, at, forward_number)
    before = rows.length
    rows.length = torch.minimum(before + accepted.advance, rows.end)
    rows.cached = rows.cached + accepted.kept
    offset = torch.arange(count, device=at.device)
    fresh = (before.unsqueeze(1) + offset).clamp(max=spare)
    is_eos = torch.isin(rows.tokens.gather(1, fresh), eos) & (fresh < rows.length.unsqueeze(1))
    return (is_eos.any(1) & ~rows.endless) | (rows.length >= rows.end)
