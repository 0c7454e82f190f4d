"""What the host reads of the rows: their newest tokens, and all of those that have ended, each in one packed read.

Every read waits for the device, so numbers travel together, and no more of them than somebody asks for: what a step
reads does not grow with what has been generated.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from marsbench.decoding.rows import Rows
from marsbench.forward.cache import RaggedCache


class Newest(NamedTuple):
    """The end of a row's answer."""

    request: int  # which one the row answers
    tokens: list[int]
    known: int  # how many of them were there before the latest forward


def newest(rows: Rows, before: Tensor, most: int, behind: int) -> list[Newest]:
    """The tokens that the latest forward has added to each row, and up to `behind` of its answer in front of them.

    Args:
        rows: the rows in flight.
        before: integer [N], their lengths before the forward.
        most: tokens that a row may have got.
        behind: tokens to read in front of those.
    """
    place = before.unsqueeze(1) + torch.arange(-behind, most, device=before.device)
    tokens = rows.tokens.gather(1, place.clamp(0, rows.tokens.shape[1] - 1))
    numbers = torch.stack([rows.index, before - rows.start, rows.length - before], dim=1)
    found = []
    for index, answered, added, *entries in torch.cat([numbers, tokens], dim=1).tolist():
        known = min(answered, behind)  # a prompt's tokens are no part of the answer
        found.append(Newest(index, entries[behind - known : behind + added], known))
    return found


class Gone(NamedTuple):
    """A row that has been taken out: its answer, the forward of the batch that settled each token of it."""

    request: int
    tokens: list[int]
    born: list[int]
    joined: int  # forwards of the batch before the row's first


def take_out(rows: Rows, cache: RaggedCache, ended: Tensor) -> list[Gone]:
    """Take out the rows that have ended, bool [N], one at least; the others close the gaps, in memory too."""
    flags, index, joined, start, length, end = torch.stack(
        [ended.long(), rows.index, rows.joined, rows.start, rows.length, rows.end]
    ).tolist()
    gone, alive = ([row for row, flag in enumerate(flags) if bool(flag) is wanted] for wanted in (True, False))
    counts = [length[row] - start[row] for row in gone]
    found = [
        Gone(index[row], tokens[:count], born[:count], joined[row])
        for row, count, tokens, born in zip(gone, counts, *_answers(rows, gone, max(counts)), strict=True)
    ]
    holes, movers = [row for row in gone if row < len(alive)], [row for row in alive if row >= len(alive)]
    order = list(range(len(alive)))
    for hole, mover in zip(holes, movers, strict=True):
        order[hole] = mover
    device, longest = rows.index.device, max((length[row] for row in alive), default=0)
    sources, targets = _integers(movers, device), _integers(holes, device)
    for store in (cache, rows.draft_cache):
        store.move(sources, targets, len(alive), longest)
    rows.take(_integers(order, device), max((end[row] for row in alive), default=0) + 1)
    return found


def _answers(rows: Rows, chosen: list[int], most: int) -> list[list[list[int]]]:
    """The first `most` tokens that some rows have answered, and when each was born: two lists [M, most]."""
    which = _integers(chosen, rows.start.device)
    place = rows.start[which].unsqueeze(1) + torch.arange(most, device=which.device)
    place = place.clamp(max=rows.tokens.shape[1] - 1)
    both = torch.stack([rows.tokens[which].gather(1, place), rows.born[which].gather(1, place)])
    found: list[list[list[int]]] = both.tolist()
    return found


def _integers(values: list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.long, device=device)
