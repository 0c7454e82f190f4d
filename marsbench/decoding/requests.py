"""Requests: those that no method could run, how others are laid out as rows, and what each has come to so far."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from marsbench.decoding.generation import Finish, Generation, Request, end_of
from marsbench.decoding.rows import EMPTY, PROMPT, Rows
from marsbench.errors import UserError, integer
from marsbench.forward.limits import context_length, token_id, vocabulary_of


def check_requests(requests: Sequence[Request], model: Any, *, where: str = "request {}") -> None:
    """Refuse requests that no method could run, naming the first that is wrong by `where` and its number."""
    vocabulary, context = vocabulary_of(model), context_length(model)
    for number, request in enumerate(requests, 1):
        for name in ("max_new_tokens", "window", "seed", "top_k"):
            integer(getattr(request, name), name, where=where.format(number))
        ids, fix = request.prompt_ids, "tokenize the prompt with this checkpoint's tokenizer"
        if not {*map(type, ids)} <= {int} or min(ids, default=0) < 0 or max(ids, default=0) >= vocabulary:
            for token in ids:  # which one it is takes long to see
                token_id(token, "prompt id", vocabulary, where=where.format(number), fix=fix)
        size, limit, top_p, min_p = len(request.prompt_ids), request.max_new_tokens, request.top_p, request.min_p
        refused = [
            (not size, "the prompt is empty", "give at least one token id"),
            (limit < 1, "max_new_tokens must be at least 1", "ask for one token or more"),
            (not all(request.stop), "a stop sequence is empty", "leave it out"),
            (not 0 < top_p <= 1 or not 0 <= min_p <= 1, "top_p must be above 0, and neither it nor min_p above 1",
             "leave them out"),
            (not request.temperature >= 0, "temperature must be 0 or more", "give 0 for greedy decoding"),
            (request.window < 1, "a window must hold at least 1 token", "give 1 for one token per forward"),
            (size + limit > context,
             f"prompt of {size} and limit of {limit} tokens exceed the model's context of {context}",
             "shorten the prompt or lower max_new_tokens"),
        ]  # fmt: skip
        for is_so, why, fix in refused:
            if is_so:
                raise UserError(why, where=where.format(number), fix=fix)


def groups_of(requests: Mapping[int, Request], most: int) -> list[dict[int, Request]]:
    """Requests in order, in groups of at most `most` positions, padded to the longest prompt; or one by itself."""
    groups: list[dict[int, Request]] = []
    longest = 0
    for index, request in requests.items():
        longest = max(longest, len(request.prompt_ids))
        if not groups or (len(groups[-1]) + 1) * longest > most:
            groups.append({})
            longest = len(request.prompt_ids)
        groups[-1][index] = request
    return groups


class NewTokens(NamedTuple):
    tokens: list[int]
    settled_by: list[int]  # the forward of the batch that settled each of them
    positions: int  # entries of the row's window that were no fillers
    drafted: int  # drafts that it verified


@dataclass
class Seat:
    """A request in flight. It keeps the tokens, so that the device is asked for none of them twice."""

    index: int  # what the caller calls the request
    request: Request
    needed: float  # the confidence to pass
    before: int = 0  # forwards of the batch before the request's first
    tokens: list[int] = field(default_factory=list)
    settled_by: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)  # drafts that each forward verified

    @property
    def length(self) -> int:
        return len(self.request.prompt_ids) + len(self.tokens)

    @property
    def end(self) -> int:
        return len(self.request.prompt_ids) + self.request.max_new_tokens

    def take(self, new: NewTokens, eos_ids: Set[int]) -> tuple[list[int], Finish | None]:
        """Note what has come: those of the tokens that count, and what has ended the answer, None if nothing has."""
        finish: Finish | None = None
        fresh = new.tokens
        if self.request.stop or not eos_ids.isdisjoint(fresh):
            count, ended = end_of(fresh, self.request, eos_ids, self.tokens)
            fresh, finish = fresh[:count], None if ended == "length" else ended
        self.tokens += fresh
        self.drafted.append(new.drafted)
        self.settled_by += [number - self.before for number in new.settled_by[: len(fresh)]]
        if finish is None and len(self.tokens) >= self.request.max_new_tokens:
            finish = "length"
        return fresh, finish

    def generation(self, finish: Finish, forwards: int) -> Generation:
        return Generation.of(self.tokens, self.settled_by, forwards - self.before, finish, self.drafted)


def laid_out(seats: Sequence[Seat], *, pad_id: int, device: torch.device) -> Rows:
    chosen = [seat.request for seat in seats]
    start = torch.tensor([len(request.prompt_ids) for request in chosen])
    end = torch.tensor([seat.end for seat in seats])
    tokens = torch.full((len(seats), int(end.max()) + 1), pad_id)
    for row, request in enumerate(chosen):
        tokens[row, : len(request.prompt_ids)] = torch.tensor(request.prompt_ids)
    prompt = torch.arange(tokens.shape[1]) < start.unsqueeze(1)
    none = torch.zeros_like(start)
    rows = Rows(
        tokens=tokens, settled_by=torch.where(prompt, PROMPT, EMPTY), length=start.clone(), cached=none, start=start,
        end=end, needed=torch.tensor([seat.needed for seat in seats], dtype=torch.float32),
        temperature=torch.tensor([request.temperature for request in chosen], dtype=torch.float32),
        seed=torch.tensor([request.seed for request in chosen]),
        cut=torch.tensor([[request.top_k, request.top_p, request.min_p] for request in chosen], dtype=torch.float32),
        drafts=tokens.new_empty(len(seats), 0), drafted=none, groups=torch.full_like(none, -1), draft_cached=none,
        window=torch.tensor([request.window for request in chosen]),
        verified=torch.tensor([request.verified for request in chosen]),
    )  # fmt: skip
    for name, values in rows.tensors().items():
        setattr(rows, name, values.to(device))
    rows.measure()
    return rows
