"""Reading a model's answer: which drafts are right, and what masks guess next.

Attention is causal, so the logits at a draft are the AR logits as long as every draft before it was right: whatever
guessed the drafts, the output is that of AR decoding, greedy or sampled (arXiv 2211.17192, 2302.01318). Masks are read
side by side, or, behind a draft head, as a chain in which each knows the guess before it.
"""

import torch
from torch import Tensor

from marsbench.decoding.acceptance import passing_run
from marsbench.decoding.rows import Accepted, Rows
from marsbench.decoding.windows import drafts_of, last, pending
from marsbench.forward.draft_head import HeadInUse
from marsbench.forward.window import Answer, at_entries, places

_LINES = 32  # of a vocabulary that is searched


def verify(rows: Rows, answer: Answer, logits: Tensor | None = None) -> Accepted:
    """The right drafts and the model's own token after them; `logits` [N, D + 1, V] of drafts may be known already."""
    if logits is None:
        logits = answer.logits(slice(last(rows), last(rows) + drafts_of(rows).shape[1] + 1))
    offset = torch.arange(logits.shape[1], device=logits.device)
    ids = rows.choose(logits, rows.length.unsqueeze(1) + offset)
    if not rows.extent.drafted:
        return Accepted.leading(rows, ids, torch.ones_like(rows.length), pending(rows))
    verified = right_drafts(rows, ids)
    return Accepted.leading(rows, ids, verified + 1, pending(rows) + verified)


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


def read_masks(
    rows: Rows, answer: Answer, entries: Tensor, logits: Tensor, accepted: Accepted, top: int
) -> tuple[Tensor, Tensor]:
    """What masks guess behind a run of accepted tokens, integer [N, K], and the logits [N, K, ...] that say so.

    The masks stand at `entries` [N, K] of the window, with `logits` [N, K, V] there. A draft head chooses from the
    `top` likeliest tokens of each mask: its logits are about those.
    """
    place = torch.arange(logits.shape[1], device=logits.device)
    position = (rows.length + accepted.advance).unsqueeze(1) + place
    if answer.head is None or not len(place):
        return rows.choose(logits, position), logits
    guesses, _, theirs = _chained(rows, answer.head, answer.states(entries), logits, accepted.last(), position, top)
    return guesses, theirs


def read_linear(rows: Rows, answer: Answer, logits: Tensor, masks: int, top: int) -> Tensor:
    """The next token, then a guess behind each draft and each mask of a row; integer [N, K].

    Of the answer to a `linear_window`, `logits` [N, K, V] are those from the entry `last(rows)` on. Each row has so
    many `masks` behind its drafts; a draft head's logits for them, as in `read_masks`, are written into `logits`.
    """
    place = torch.arange(logits.shape[1], device=logits.device)
    ids = rows.choose(logits, rows.length.unsqueeze(1) + place)
    if answer.head is None or not masks:
        return ids
    drafted = rows.drafted.unsqueeze(1)
    behind = drafted + 1 + place[:masks]
    theirs, states = at_entries(logits, behind), answer.states(last(rows) + behind)
    before, position = ids.gather(1, drafted).squeeze(1), rows.length.unsqueeze(1) + behind
    guesses, likeliest, heeded = _chained(rows, answer.head, states, theirs, before, position, top)
    theirs.fill_(torch.finfo(logits.dtype).min).scatter_(2, likeliest, heeded)
    logits.flatten(0, 1).index_copy_(0, places(behind, logits.shape[1]), theirs.flatten(0, 1))
    return ids.scatter(1, behind, guesses)


def _chained(
    rows: Rows, head: HeadInUse, states: Tensor, logits: Tensor, before: Tensor, position: Tensor, top: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Guesses [N, K] from left to right, the first behind tokens `before` [N]; and of the `top` tokens that each mask's
    `logits` [N, K, V] find likeliest, [N, K, top], the head's logits. Others cannot be chosen: the head learned
    through a softmax, so what it adds means nothing beside what it has not been added to.
    """
    values, likeliest = _likeliest(logits, top)
    heeding, chosen_ids, theirs = head.behind(states, likeliest, values), [], []
    for place in range(logits.shape[1]):
        ids, heeded = likeliest[:, place], heeding(place, before)
        before = ids.gather(1, heeded.argmax(1, keepdim=True)).squeeze(1)
        if rows.extent.sampled:
            every = torch.full_like(logits[:, :1], torch.finfo(logits.dtype).min, dtype=torch.float32)
            every.scatter_(2, ids.unsqueeze(1), heeded.unsqueeze(1))
            drawn = rows.choose(every, position[:, place : place + 1]).squeeze(1)
            before = torch.where(rows.temperature > 0, drawn, before)
        chosen_ids.append(before)
        theirs.append(heeded)
    return torch.stack(chosen_ids, dim=1), likeliest, torch.stack(theirs, dim=1).to(logits.dtype)


def _likeliest(logits: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """The `top` largest of logits [N, K, V] and their tokens, [N, K, top], in any order, by two small searches."""
    columns = logits.shape[-1] // _LINES
    if logits.shape[-1] % _LINES or columns <= top:
        return logits.topk(min(top, logits.shape[-1]), sorted=False)
    lines = logits.view(*logits.shape[:-1], _LINES, columns)
    column = lines.amax(-2).topk(top, sorted=False).indices  # [N, K, top]
    near = lines.gather(-1, column.unsqueeze(-2).expand(*lines.shape[:-1], top)).flatten(-2)
    values, place = near.topk(top, sorted=False)
    return values, place // top * columns + column.gather(-1, place % top)
