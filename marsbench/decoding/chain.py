"""Reading masks: side by side, or, behind a draft head, as a chain in which each knows the guess before it."""

from __future__ import annotations

import torch
from torch import Tensor

from marsbench.decoding.rows import Accepted, Rows
from marsbench.decoding.windows import last
from marsbench.forward.draft_head import HeadInUse
from marsbench.forward.window import Answer


def read_masks(rows: Rows, answer: Answer, entries: Tensor, logits: Tensor, accepted: Accepted, top: int) -> Tensor:
    """What masks guess behind a run of accepted tokens, integer [N, K].

    Args:
        rows: the rows in flight.
        answer: the model's, to the window that the masks stand in.
        entries: integer [N, K], those of the masks in the window.
        logits: [N, K, V], there; they become the draft head's.
        accepted: what has just been accepted.
        top: how many of each mask's likeliest tokens a draft head chooses from.
    """
    place = torch.arange(logits.shape[1], device=logits.device)
    position = (rows.length + accepted.advance).unsqueeze(1) + place
    if answer.head is None or not len(place):
        return rows.choose(logits, position)
    return _chained(rows, answer.head, answer.states(entries), logits, accepted.last(), position, top)


def read_line(rows: Rows, answer: Answer, logits: Tensor, masks: int, top: int) -> Tensor:
    """What a line says from the last committed token on: that token, the row's drafts, and masks; integer [N, K].

    Args:
        rows: the rows in flight.
        answer: the model's, to a `linear_window`.
        logits: [N, K, V], from the entry `last(rows)` on; those of masks become the draft head's.
        masks: how many there are behind a row's drafts, or as many entries.
        top: how many of each mask's likeliest tokens a draft head chooses from.
    """
    place = torch.arange(logits.shape[1], device=logits.device)
    ids = rows.choose(logits, rows.length.unsqueeze(1) + place)
    if answer.head is None or not masks:
        return ids
    drafted = rows.drafted.unsqueeze(1)
    behind = drafted + 1 + place[:masks]
    at = behind.unsqueeze(-1).expand(-1, -1, logits.shape[-1])
    theirs, states = logits.gather(1, at), answer.states(last(rows) + behind)
    before, position = ids.gather(1, drafted).squeeze(1), rows.length.unsqueeze(1) + behind
    guesses = _chained(rows, answer.head, states, theirs, before, position, top)
    logits.scatter_(1, at, theirs)
    return ids.scatter(1, behind, guesses)


def _chained(
    rows: Rows, head: HeadInUse, states: Tensor, logits: Tensor, before: Tensor, position: Tensor, top: int
) -> Tensor:
    """Guesses [N, K] from left to right, the first behind tokens `before` [N]; `logits` [N, K, V] become the head's.

    Other tokens than the `top` of a mask get the lowest logit: what a head adds means nothing beside what it has not
    been added to, since the softmax that it learned through is blind to what all tokens get.
    """
    likeliest = logits.topk(min(top, logits.shape[-1]), sorted=False)
    heeding, found, theirs = head.behind(states, likeliest.indices, likeliest.values), [], []
    lowest = torch.finfo(logits.dtype).min
    for place in range(logits.shape[1]):
        ids, heeded = likeliest.indices[:, place], heeding(place, before)
        before = ids.gather(1, heeded.argmax(1, keepdim=True)).squeeze(1)
        if rows.extent.sampled:
            every = torch.full_like(logits[:, :1], lowest).scatter(2, ids.unsqueeze(1), heeded.unsqueeze(1))
            drawn = rows.choose(every, position[:, place : place + 1]).squeeze(1)
            before = torch.where(rows.temperature > 0, drawn, before)
        found.append(before)
        theirs.append(heeded)
    logits.fill_(lowest).scatter_(2, likeliest.indices, torch.stack(theirs, dim=1))
    return torch.stack(found, dim=1)
