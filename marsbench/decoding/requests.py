"""Requests before they are rows: which of them no method could run, and how the others are laid out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from marsbench.decoding.generation import Request
from marsbench.decoding.rows import EMPTY, PROMPT, Rows
from marsbench.decoding.seats import Seat
from marsbench.errors import UserError


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
        if not (0 < request.top_p <= 1 and 0 <= request.min_p <= 1):
            raise UserError(
                "top_p must be above 0, and neither it nor min_p above 1", where=place, fix="leave them out"
            )
        if not request.temperature >= 0:
            raise UserError("temperature must be 0 or more", where=place, fix="give 0 for greedy decoding")
        if request.window < 1:
            raise UserError("a window must hold at least 1 token", where=place, fix="give 1 for one token per forward")
        if any(not stop for stop in request.stop):
            raise UserError("a stop sequence is empty", where=place, fix="leave it out")
        if len(request.prompt_ids) + request.max_new_tokens > context:
            raise UserError(
                f"prompt of {len(request.prompt_ids)} and limit of {request.max_new_tokens} tokens exceed the model's "
                f"context of {context}",
                where=place,
                fix="shorten the prompt or lower max_new_tokens",
            )


def laid_out(seats: Sequence[Seat], *, pad_id: int, device: torch.device) -> Rows:
    """One row for each of some newcomers, with nothing cached; `pad_id` fills the ends of rows."""
    chosen = [seat.request for seat in seats]
    start = torch.tensor([len(request.prompt_ids) for request in chosen])
    end = torch.tensor([seat.end for seat in seats])
    tokens = torch.full((len(seats), int(end.max()) + 1), pad_id)
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
        bar=torch.tensor([seat.bar for seat in seats], dtype=torch.float32),
        temperature=torch.tensor([request.temperature for request in chosen], dtype=torch.float32),
        seed=torch.tensor([request.seed for request in chosen]),
        cut=torch.tensor([[request.top_k, request.top_p, request.min_p] for request in chosen], dtype=torch.float32),
        drafts=tokens.new_empty(len(seats), 0),
        drafted=none,
        groups=torch.full_like(none, -1),
        draft_cached=none,
        window=torch.tensor([request.window for request in chosen]),
        verified=torch.tensor([request.verified for request in chosen]),
    )
    for name, values in rows.tensors().items():
        setattr(rows, name, values.to(device))
    rows.measure()
    return rows
