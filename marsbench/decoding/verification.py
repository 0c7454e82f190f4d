"""Verifying drafts: keep the guesses that are what the model itself says, and its own word after them.

Attention is causal, so the logits at a draft are the AR logits as long as every draft before it was right: whatever
guessed the drafts, the output is that of AR decoding, greedy or sampled (arXiv 2211.17192, 2302.01318).
"""

import torch
from torch import Tensor

from marsbench.decoding.acceptance import passing_run
from marsbench.decoding.rows import Accepted, Rows
from marsbench.decoding.windows import drafts_of, last, pending
from marsbench.forward.window import Answer


def verify(rows: Rows, answer: Answer, logits: Tensor | None = None) -> Accepted:
    """The right ones of the rows' drafts and one token more, the model's own; all but that one stay in the cache.

    The answer is to a `linear_window` or `grouped_window`; `logits` [N, D + 1, V] from the last committed token on are
    given where they are known already.
    """
    if logits is None:
        logits = answer.logits(slice(last(rows), last(rows) + drafts_of(rows).shape[1] + 1))
    offset = torch.arange(logits.shape[1], device=logits.device)
    ids = rows.choose(logits, rows.length.unsqueeze(1) + offset)
    if not rows.extent.drafted:
        return Accepted.run(rows, ids, torch.ones_like(rows.length), pending(rows))
    verified = right_drafts(rows, ids)
    return Accepted.run(rows, ids, verified + 1, pending(rows) + verified)


def right_drafts(rows: Rows, ids: Tensor) -> Tensor:
    """How many of each row's drafts are what the model itself says from the last committed token on, [N]."""
    drafts = drafts_of(rows)
    count = drafts.shape[1]
    ours = torch.arange(count, device=ids.device) < rows.drafted.unsqueeze(1)
    return passing_run((ids[:, :count] == drafts) & ours)


def room_for_drafts(rows: Rows, accepted: Accepted) -> Tensor:
    """How many drafts can still be of use after these tokens, [N]: one token needs none."""
    return (rows.end - rows.length - accepted.advance - 1).clamp(min=0)


def continued(rows: Rows, accepted: Accepted) -> tuple[Tensor, Tensor]:
    """The rows' tokens [N, T] and lengths [N] as they will be when a run of accepted tokens is committed."""
    inside = accepted.chosen & (accepted.position < rows.end.unsqueeze(1))
    place = torch.where(inside, accepted.position, rows.tokens.shape[1] - 1)
    return rows.tokens.scatter(1, place, accepted.ids), torch.minimum(rows.length + accepted.advance, rows.end)
