"""The one decode loop: propose -> forward -> accept -> commit, with a cursor per row.

Every method runs through this loop and this cache; a method only says what to put after the committed tokens
(`propose`) and which of the answers to keep (`accept`). Rows of a batch advance independently, and a row that is
finished leaves the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from marsbench.decoding.cache import RaggedCache
from marsbench.decoding.generation import Finish, Generation, Request
from marsbench.errors import UserError

PROMPT = -1  # `born` of a prompt token
EMPTY = 0  # `born` of a position that holds no token yet


@dataclass
class Rows:
    """The rows in flight, one per sequence.

    T is the longest a row may get, plus one: the last column is a spare that takes every write that must not count.
    """

    tokens: Tensor  # [N, T], prompt and committed tokens
    born: Tensor  # [N, T], the forward (from 1) that committed a token; PROMPT or EMPTY
    length: Tensor  # [N], tokens committed without a gap
    cached: Tensor  # [N], leading tokens whose keys and values are in the cache
    start: Tensor  # [N], length of the prompt
    end: Tensor  # [N], the length at which the row must stop
    bar: Tensor  # fp32 [N], the confidence to pass
    index: Tensor  # [N], which request the row answers

    def take(self, chosen: Tensor) -> None:
        """Keep the rows `chosen` (indices), in that order."""
        for name, values in vars(self).items():
            setattr(self, name, values[chosen])


class Window(NamedTuple):
    """What a method wants forwarded: W entries a row, placed after the row's cached tokens."""

    input_ids: Tensor  # [N, W]
    position: Tensor  # [N, W]
    keep: Tensor  # [N], leading entries that are committed tokens and stay in the cache
    read: Tensor  # [N, K], the entries whose logits are needed
    visible: Tensor | None = None  # bool [N, W, W], who sees whom inside the window; None = causal


class Accepted(NamedTuple):
    """The tokens that a forward settled: K candidates a row, of which `chosen` are committed."""

    ids: Tensor  # [N, K]
    position: Tensor  # [N, K]
    chosen: Tensor  # bool [N, K]


class Method(Protocol):
    """A decoding method: two pure functions of the rows in flight."""

    name: ClassVar[str]

    def bar(self, threshold: float | None) -> float:
        """The confidence that a request's threshold asks for; `UserError` where the method cannot take it."""
        ...

    def propose(self, rows: Rows) -> Window:
        """Say what to forward."""
        ...

    def accept(self, rows: Rows, window: Window, logits: Tensor) -> Accepted:
        """Read the logits [N, K, V] at the window's `read` entries."""
        ...


def pending_window(rows: Rows, extra: Tensor) -> Window:
    """The committed tokens that are not cached yet, followed by `extra` [N, E]; logits from the last of them on.

    This is the window of every method that guesses to the right of the committed tokens: candidate 0 is read from the
    last committed token, candidate j from the extra entry j - 1.
    """
    pending = (rows.length - rows.cached).unsqueeze(1)
    width = int(pending.max()) + extra.shape[1]
    offset = torch.arange(width, device=extra.device).expand(len(extra), -1)
    position = rows.cached.unsqueeze(1) + offset
    input_ids = rows.tokens.gather(1, position.clamp(max=rows.tokens.shape[1] - 1))
    if extra.shape[1]:
        guess = offset - pending
        fillings = extra.gather(1, guess.clamp(0, extra.shape[1] - 1))
        input_ids = torch.where(guess >= 0, fillings, input_ids)
    candidates = torch.arange(extra.shape[1] + 1, device=extra.device)
    return Window(input_ids, position, pending.squeeze(1), pending - 1 + candidates)


def decode(
    model: Any,
    method: Method,
    requests: Sequence[Request],
    *,
    eos_id: int,
    pad_id: int,
    batch_size: int = 16,
    on_finished: Callable[[int, Generation], None] = lambda index, generation: None,
) -> list[Generation]:
    """Continue every request, greedily; the answers come in the order of the requests.

    Prompts are batched by length, so that a batch wastes little on padding.

    Args:
        model: a causal language model of transformers, in eval mode.
        method: how to propose and accept.
        requests: what to continue.
        eos_id: the token that ends a sequence.
        pad_id: any id; fills the unused ends of rows.
        batch_size: rows in flight at once, at most.
        on_finished: called with a request's index and its generation as soon as a row is finished.
    """
    check_requests(requests, vocabulary=model.get_input_embeddings().num_embeddings, context=context_length(model))
    generations: dict[int, Generation] = {}

    def finished(index: int, generation: Generation) -> None:
        generations[index] = generation
        on_finished(index, generation)

    by_length = sorted(range(len(requests)), key=lambda index: len(requests[index].prompt_ids))
    for first in range(0, len(by_length), batch_size):
        batch = by_length[first : first + batch_size]
        rows = _rows([requests[index] for index in batch], batch, method, pad_id, model.device)
        _decode_batch(model, method, rows, eos_id, finished)
    return [generations[index] for index in range(len(requests))]


@torch.inference_mode()
def _decode_batch(
    model: Any, method: Method, rows: Rows, eos_id: int, finished: Callable[[int, Generation], None]
) -> None:
    """Run the rows of one batch to their ends."""
    cache, forward = RaggedCache(), 0
    while len(rows.index):
        forward += 1
        window = method.propose(rows)
        logits = _forward(model, cache, rows, window)
        accepted = method.accept(rows, window, logits)
        rows.cached = rows.cached + window.keep
        ended = _commit(rows, accepted, forward, eos_id)
        if bool(ended.any()):
            _retire(rows, cache, ended, forward, eos_id, finished)


def _forward(model: Any, cache: RaggedCache, rows: Rows, window: Window) -> Tensor:
    """One pass over the window; logits [N, K, V] at its `read` entries."""
    width = window.input_ids.shape[1]
    offset = torch.arange(width, device=window.input_ids.device)
    slots = rows.cached.unsqueeze(1) + offset
    cache.prepare(slots)
    hidden = model.get_decoder()(
        input_ids=window.input_ids,
        position_ids=window.position,
        attention_mask=_attention_mask(rows, window, slots, cache.slots, model.dtype),
        past_key_values=cache,
        use_cache=True,
    ).last_hidden_state
    if width > 1:
        hidden = hidden.gather(1, window.read.unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))
    logits: Tensor = model.get_output_embeddings()(hidden)
    return logits


def _attention_mask(rows: Rows, window: Window, slots: Tensor, total: int, dtype: torch.dtype) -> Tensor:
    """The additive mask [N, 1, W, slots]: all of the row's cached tokens, and what the window lets see in itself."""
    key = torch.arange(total, device=slots.device)
    if window.visible is None:
        visible = key <= slots.unsqueeze(-1)
    else:
        visible = (key < rows.cached.view(-1, 1, 1)).expand(-1, slots.shape[1], -1).clone()
        inside = slots.unsqueeze(1).expand(-1, slots.shape[1], -1)
        visible.scatter_(2, inside, window.visible)
    mask = torch.zeros(visible.shape, dtype=dtype, device=slots.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min).unsqueeze(1)


def _commit(rows: Rows, accepted: Accepted, forward: int, eos_id: int) -> Tensor:
    """Write the accepted tokens down and move the cursors; returns which rows have come to their end, bool [N]."""
    spare = rows.tokens.shape[1] - 1
    inside = accepted.chosen & (accepted.position < rows.end.unsqueeze(1))
    at = torch.where(inside, accepted.position, spare)
    rows.tokens.scatter_(1, at, accepted.ids)
    rows.born.scatter_(1, at, forward)
    before = rows.length
    rows.length = (rows.born[:, :spare] != EMPTY).int().cumprod(1).sum(1)
    position = torch.arange(spare, device=at.device)
    fresh = (position >= before.unsqueeze(1)) & (position < rows.length.unsqueeze(1))
    return (fresh & (rows.tokens[:, :spare] == eos_id)).any(1) | (rows.length >= rows.end)


def _retire(
    rows: Rows,
    cache: RaggedCache,
    ended: Tensor,
    forward: int,
    eos_id: int,
    finished: Callable[[int, Generation], None],
) -> None:
    """Report the rows that have ended and close the gaps they leave."""
    for row in ended.nonzero().flatten().tolist():
        start, length = int(rows.start[row]), int(rows.length[row])
        tokens, born = rows.tokens[row, start:length].tolist(), rows.born[row, start:length].tolist()
        finished(int(rows.index[row]), _generation(tokens, born, forward, eos_id))
    alive = (~ended).nonzero().flatten()
    holes = ended[: len(alive)].nonzero().flatten()
    movers = alive[alive >= len(alive)]
    cache.move(movers, holes)
    order = torch.arange(len(alive), device=alive.device)
    order[holes] = movers
    rows.take(order)


def _generation(tokens: list[int], born: list[int], forwards: int, eos_id: int) -> Generation:
    """Cut a row at its EOS and credit every forward with the tokens of it that are left."""
    finish: Finish = "eos" if eos_id in tokens else "length"
    emitted = tokens.index(eos_id) + 1 if finish == "eos" else len(tokens)
    accepted = [0] * forwards
    for forward in born[:emitted]:
        accepted[forward - 1] += 1
    return Generation(tokens[: emitted - 1] if finish == "eos" else tokens, accepted, finish)


def _rows(requests: list[Request], indices: list[int], method: Method, pad_id: int, device: torch.device) -> Rows:
    """Lay a batch of requests out."""
    start = torch.tensor([len(request.prompt_ids) for request in requests])
    end = start + torch.tensor([request.max_new_tokens for request in requests])
    tokens = torch.full((len(requests), int(end.max()) + 1), pad_id)
    for row, request in enumerate(requests):
        tokens[row, : len(request.prompt_ids)] = torch.tensor(request.prompt_ids)
    prompt = torch.arange(tokens.shape[1]) < start.unsqueeze(1)
    rows = Rows(
        tokens=tokens,
        born=torch.where(prompt, PROMPT, EMPTY),
        length=start.clone(),
        cached=torch.zeros_like(start),
        start=start,
        end=end,
        bar=torch.tensor([method.bar(request.threshold) for request in requests]),
        index=torch.tensor(indices),
    )
    for name, values in vars(rows).items():
        setattr(rows, name, values.to(device))
    return rows


def context_length(model: Any) -> int:
    """The longest sequence that the model's positions allow."""
    return int(getattr(model.config, "max_position_embeddings", 1 << 30))


def check_requests(requests: Sequence[Request], *, vocabulary: int, context: int) -> None:
    """Refuse requests that no method could run, naming the first that is wrong."""
    for number, request in enumerate(requests, 1):
        where = f"request {number}"
        if not request.prompt_ids:
            raise UserError("the prompt is empty", where=where, fix="give at least one token id")
        if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= vocabulary:
            raise UserError(
                f"a prompt id lies outside the vocabulary of {vocabulary}",
                where=where,
                fix="tokenize the prompt with this checkpoint's tokenizer",
            )
        if request.max_new_tokens < 1:
            raise UserError("max_new_tokens must be at least 1", where=where, fix="ask for one token or more")
        if len(request.prompt_ids) + request.max_new_tokens > context:
            raise UserError(
                f"prompt of {len(request.prompt_ids)} and limit of {request.max_new_tokens} tokens exceed the model's "
                f"context of {context}",
                where=where,
                fix="shorten the prompt or lower max_new_tokens",
            )
