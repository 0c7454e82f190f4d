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

from marsbench.decoding.cache import RaggedCache
from marsbench.decoding.decoder import Decoder, decoder_of
from marsbench.decoding.generation import Finish, Generation, Meter, Request, as_list, end_of, split_eos
from marsbench.decoding.modules import device_of
from marsbench.decoding.outside import OnFinished, OutsideMethod, decode_outside
from marsbench.decoding.rows import EMPTY, PROMPT, Accepted, Answer, Rows, Window
from marsbench.errors import UserError

# Called with a request's index and the tokens that a forward has just added, as they come (an EOS may be among them).
OnTokens = Callable[[int, list[int]], None]
News = Callable[[], None]  # a callback with what it is to be told, called when the batch is in order


class Method(Protocol):
    """A decoding method: functions of the rows in flight, without a state of its own."""

    name: ClassVar[str]

    def bar(self, threshold: float | None) -> float:
        """The confidence that a request's threshold asks for; `UserError` where the method cannot take it."""
        ...

    def propose(self, rows: Rows) -> Window:
        """Say what to forward."""
        ...

    def accept(self, rows: Rows, window: Window, answer: Answer) -> Accepted:
        """Read the answer, say what to keep of it, and note the drafts for the next window in `rows`."""
        ...


class Batch:
    """Rows in flight. `join` brings requests in, `step` moves every row forward, finished rows leave by themselves.

    Callbacks come last, when all rows are in their places: they may `join` and `leave` as they like, and one that
    raises harms nobody else.

    A server would call `join` as requests come, `step` in between, and `set_threshold` when a user turns the knob.
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
    ) -> None:
        self.model, self.method = model, method
        self.decoder = decoder_of(model)
        self._eos_ids = as_list(eos_id)
        self._eos = torch.tensor(self._eos_ids, dtype=torch.long, device=device_of(model))
        self._pad_id = pad_id
        self._on_finished, self._on_tokens = on_finished, on_tokens
        self._meter = meter
        self._requests: dict[int, Request] = {}
        self._forwards = 1  # the number of the latest forward; `born` tells 0 from it
        self._rows: Rows | None = None
        self._cache = RaggedCache()

    def __len__(self) -> int:
        return len(self._requests)

    @torch.inference_mode()
    def join(self, requests: Mapping[int, Request]) -> None:
        """Bring requests in, each under an index of the caller's choice, with one forward over their prompts.

        Raises:
            UserError: a request that the model cannot run, or an index that is in flight already; nobody joins then.
        """
        if not requests:
            return
        check_requests(list(requests.values()), self.model)
        for index in requests.keys() & self._requests.keys():
            raise UserError(f"request {index} is in flight already", fix="give every request an index of its own")
        rows = _rows(requests, self.method, self._forwards - 1, self._pad_id, device_of(self.model))
        cache = RaggedCache()
        self._requests.update(requests)
        try:
            news = self._advance(rows, cache, prompt=True)
        except BaseException:  # whatever went wrong with their prompts, nobody has joined
            for index in requests:
                self._requests.pop(index, None)
            raise
        if self._rows is None or not len(self._rows):
            self._rows, self._cache = rows, cache
        elif len(rows):
            self._cache.extend(cache)
            self._rows.extend(rows)
        _tell(news)

    @torch.inference_mode()
    def step(self) -> None:
        """One forward for every row."""
        if self._rows is None or not len(self._rows):
            return
        self._forwards += 1
        _tell(self._advance(self._rows, self._cache, prompt=False))

    @torch.inference_mode()
    def leave(self, index: int) -> None:
        """Take a request out before its end; what it has come to is reported as cancelled."""
        if self._rows is not None and index in self._requests:
            gone = self._rows.index == index
            _tell(self._retire(self._rows, self._cache, gone, unfinished="cancelled"))

    @torch.inference_mode()
    def set_threshold(self, index: int, threshold: float | None) -> None:
        """Change the threshold of a request in flight, from the next step on."""
        bar = self.method.bar(threshold)
        if self._rows is not None and index in self._requests:
            self._rows.bar.masked_fill_(self._rows.index == index, bar)
            self._rows.measure()

    def _advance(self, rows: Rows, cache: RaggedCache, *, prompt: bool) -> list[News]:
        """Move rows forward by one window; returns what there is to tell once everything is in its place."""
        window = self.method.propose(rows)
        answer = forward(self.decoder, cache, window)
        accepted = self.method.accept(rows, window, answer)
        if self._meter is not None:
            self._meter.count(_positions(window), cache.bytes() + rows.draft_cache.bytes(), prompt=prompt)
        before = rows.length
        ended = commit(rows, accepted, self._forwards, self._eos)
        (any_ended,) = rows.measure(ended.any().long())
        if self._meter is not None:
            self._meter.tick()
        news: list[News] = []
        if self._on_tokens is not None or any(request.stop for request in self._requests.values()):
            news, ended = self._fresh_tokens(rows, before, ended)
            any_ended = bool(ended.any())
        return [*news, *(self._retire(rows, cache, ended) if any_ended else [])]

    def _fresh_tokens(self, rows: Rows, before: Tensor, ended: Tensor) -> tuple[list[News], Tensor]:
        """The new tokens of every row, and which rows have ended, those that came to a stop sequence among them."""
        news: list[News] = []
        ended = ended.clone()
        for row, index in enumerate(rows.index.tolist()):
            start, old, length = int(rows.start[row]), int(before[row]), int(rows.length[row])
            tokens = rows.tokens[row, start:length].tolist()
            emitted, finish = end_of(tokens, self._requests[index], self._eos_ids)
            ended[row] |= finish != "length"
            fresh = tokens[old - start : emitted]
            if self._on_tokens is not None and fresh:
                news.append(partial(self._on_tokens, index, fresh))
        return news, ended

    def _retire(self, rows: Rows, cache: RaggedCache, ended: Tensor, *, unfinished: Finish = "length") -> list[News]:
        """Take out the rows that have ended, close the gaps they leave, and return the reports on them."""
        news: list[News] = []
        for row in ended.nonzero().flatten().tolist():
            index, start, length = int(rows.index[row]), int(rows.start[row]), int(rows.length[row])
            tokens, born = rows.tokens[row, start:length].tolist(), rows.born[row, start:length].tolist()
            emitted, finish = end_of(tokens, self._requests.pop(index), self._eos_ids, unfinished)
            before = int(rows.joined[row])
            settled_by = [number - before for number in born[:emitted]]
            kept, eos = split_eos(tokens[:emitted], finish)
            generation = Generation(kept, settled_by, self._forwards - before, finish, eos)
            news.append(partial(self._on_finished, index, generation))
        alive = (~ended).nonzero().flatten()
        holes = ended[: len(alive)].nonzero().flatten()
        movers = alive[alive >= len(alive)]
        for store in (cache, rows.draft_cache):
            store.move(movers, holes, len(alive))
        order = torch.arange(len(alive), device=alive.device)
        order[holes] = movers
        rows.take(order)
        return news


def _tell(news: Sequence[News]) -> None:
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
    """
    if batch_size < 1:
        raise UserError(f"batch size {batch_size} holds no row", fix="give 1 or more")
    check_requests(requests, model)
    if isinstance(method, OutsideMethod):
        return decode_outside(model, method, requests, as_list(eos_id), pad_id, batch_size, on_finished, meter)
    generations: dict[int, Generation] = {}

    def finished(index: int, generation: Generation) -> None:
        generations[index] = generation
        on_finished(index, generation)

    batch = Batch(model, method, eos_id=eos_id, pad_id=pad_id, on_finished=finished, on_tokens=on_tokens, meter=meter)
    waiting = sorted(range(len(requests)), key=lambda index: len(requests[index].prompt_ids))
    while waiting or len(batch):
        free = batch_size - len(batch)
        if waiting and free >= max(1, batch_size // 4):
            batch.join({index: requests[index] for index in waiting[:free]})
            waiting = waiting[free:]
        batch.step()
    return [generations[index] for index in range(len(requests))]


def _positions(window: Window) -> int:
    """The entries that a window covers over all rows, fillers left out."""
    return window.input_ids.numel() if window.real is None else int(window.real.sum())


def forward(decoder: Decoder, cache: RaggedCache, window: Window) -> Answer:
    """One pass over a window."""
    width, slots = window.input_ids.shape[1], window.slots
    offset = torch.arange(max(slots, width), device=window.begin.device)
    # A short prompt's fillers lie before its first token: they go to a slot of their own behind all others.
    places = window.begin.unsqueeze(1) + offset[:width]
    cache.prepare(torch.where(places < 0, slots, places), slots)
    # Relative to its row's window, a slot is -1 (before it), 0 to W - 1 (an entry), or W (behind it).
    relative = (offset[:slots] - window.begin.unsqueeze(1)).clamp(-1, width)
    return decoder(cache, window, relative)


def commit(rows: Rows, accepted: Accepted, forward_number: int, eos: Tensor) -> Tensor:
    """Write the accepted tokens down and move the cursors; returns which rows have come to their end, bool [N]."""
    spare, count = rows.tokens.shape[1] - 1, accepted.ids.shape[1]
    inside = accepted.chosen & (accepted.position < rows.end.unsqueeze(1))
    at = torch.where(inside, accepted.position, spare)
    rows.tokens.scatter_(1, at, accepted.ids)
    rows.born.scatter_(1, at, forward_number)
    before = rows.length
    rows.length = torch.minimum(before + accepted.advance, rows.end)
    rows.cached = rows.cached + accepted.kept
    offset = torch.arange(count, device=at.device)
    fresh = (before.unsqueeze(1) + offset).clamp(max=spare)
    is_eos = torch.isin(rows.tokens.gather(1, fresh), eos) & (fresh < rows.length.unsqueeze(1))
    return is_eos.any(1) | (rows.length >= rows.end)


def _rows(requests: Mapping[int, Request], method: Method, joined: int, pad_id: int, device: torch.device) -> Rows:
    """Lay requests out, one row each."""
    chosen = list(requests.values())
    start = torch.tensor([len(request.prompt_ids) for request in chosen])
    end = start + torch.tensor([request.max_new_tokens for request in chosen])
    tokens = torch.full((len(chosen), int(end.max()) + 1), pad_id)
    for row, request in enumerate(chosen):
        tokens[row, : len(request.prompt_ids)] = torch.tensor(request.prompt_ids)
    prompt = torch.arange(tokens.shape[1]) < start.unsqueeze(1)
    none = torch.zeros_like(start)
    rows = Rows(
        tokens=tokens,
        born=torch.where(prompt, PROMPT, EMPTY),
        length=start.clone(),
        cached=none,
        start=start,
        end=end,
        bar=torch.tensor([method.bar(request.threshold) for request in chosen], dtype=torch.float32),
        temperature=torch.tensor([request.temperature for request in chosen], dtype=torch.float32),
        seed=torch.tensor([request.seed for request in chosen]),
        joined=none + joined,
        index=torch.tensor(list(requests)),
        drafts=tokens[:, :0],
        drafted=none,
        draft_cached=none,
    )
    for name, values in rows.tensors().items():
        setattr(rows, name, values.to(device))
    rows.measure()
    return rows


def context_length(model: Any) -> int:
    """The longest sequence that the model's positions allow."""
    return int(getattr(model.config, "max_position_embeddings", 1 << 30))


def check_requests(requests: Sequence[Request], model: Any, *, where: str = "request {}") -> None:
    """Refuse requests that no method could run, naming the first that is wrong by `where` and its number."""
    vocabulary, context = model.get_input_embeddings().num_embeddings, context_length(model)
    for number, request in enumerate(requests, 1):
        place = where.format(number)
        if not request.prompt_ids:
            raise UserError("the prompt is empty", where=place, fix="give at least one token id")
        if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= vocabulary:
            raise UserError(
                f"a prompt id lies outside the vocabulary of {vocabulary}",
                where=place,
                fix="tokenize the prompt with this checkpoint's tokenizer",
            )
        if request.max_new_tokens < 1:
            raise UserError("max_new_tokens must be at least 1", where=place, fix="ask for one token or more")
        if not request.temperature >= 0:
            raise UserError("temperature must be 0 or more", where=place, fix="give 0 for greedy decoding")
        if any(not stop for stop in request.stop):
            raise UserError("a stop sequence is empty", where=place, fix="leave it out")
        if len(request.prompt_ids) + request.max_new_tokens > context:
            raise UserError(
                f"prompt of {len(request.prompt_ids)} and limit of {request.max_new_tokens} tokens exceed the model's "
                f"context of {context}",
                where=place,
                fix="shorten the prompt or lower max_new_tokens",
            )
