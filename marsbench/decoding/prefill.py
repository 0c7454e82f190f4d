"""Prompts in parts: as many at once as one forward may hold, and a prompt that is longer than that piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from marsbench.decoding.generation import Request
from marsbench.decoding.rows import Rows
from marsbench.decoding.windows import causal
from marsbench.errors import UserError
from marsbench.forward.window import Window


def check_prefill_positions(positions: int) -> None:
    """Refuse a bound that no prompt could keep, with a `UserError`."""
    if positions < 1:
        raise UserError(f"{positions} prefill positions hold no token", fix="give 1 or more")


def groups_of(requests: Mapping[int, Request], most: int) -> list[dict[int, Request]]:
    """Requests in their order, in groups that have `most` positions at most, padded to their longest prompt.

    A prompt that is longer than that is a group of its own.
    """
    groups: list[dict[int, Request]] = []
    longest = 0
    for index, request in requests.items():
        longest = max(longest, len(request.prompt_ids))
        if not groups or (len(groups[-1]) + 1) * longest > most:
            groups.append({})
            longest = len(request.prompt_ids)
        groups[-1][index] = request
    return groups


def leading_windows(rows: Rows) -> Iterator[Window]:
    """Windows over the beginning of a long prompt, for the caller to forward, each before it asks for the next.

    They are plainly causal, and what is left has no more than `rows.prefill_positions`. Rows that are several fit.
    """
    while rows.extent.pending > rows.prefill_positions:
        begin, width = rows.cached, rows.prefill_positions
        position = begin.unsqueeze(1) + torch.arange(width, device=begin.device)
        slots = rows.extent.length - rows.extent.pending + width
        yield Window(rows.tokens.gather(1, position), position, begin, slots, causal(width, begin.device))
        rows.cached = begin + width
        rows.extent = rows.extent._replace(pending=rows.extent.pending - width)
