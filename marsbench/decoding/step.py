"""One step of rows: propose, forward, accept, commit. Every method runs through it.

Here its shapes are fitted to the rows: as many positions as the fullest row needs, no row that has ended.
`compiled/fixed.py` takes the same step in fixed shapes.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from marsbench.decoding.acceptance import confidence_needed
from marsbench.decoding.requests import NewTokens, Seat
from marsbench.decoding.rows import Accepted, Most, Rows
from marsbench.decoding.windows import linear_window
from marsbench.forward.cache import RaggedCache
from marsbench.forward.decoder import Decoder
from marsbench.forward.window import Answer, Window


class Method(ABC):
    """A decoding method: functions of the rows in flight, without a state of its own."""

    name: ClassVar[str]
    causal_prompt: ClassVar[bool] = True  # whether plain causal windows may cache a prompt's beginning before `propose`

    def confidence_needed(self, threshold: float | None) -> float:
        """The confidence that a request's threshold asks for; `UserError` where there is no `metric` to compare by."""
        return confidence_needed(threshold, getattr(self, "metric", None), self.name)

    def most(self) -> Most | None:
        """What its steps need at most, None where no bound can be given: then it cannot be compiled."""
        return None

    def propose(self, rows: Rows) -> Window:
        """Say what to forward: if nothing else, what is not cached yet, and the drafts."""
        return linear_window(rows)

    @abstractmethod
    def accept(self, rows: Rows, window: Window, answer: Answer) -> Accepted:
        """Read the answer, say what to keep of it, and note the drafts for the next window in `rows`."""


def advance(decoder: Decoder, method: Method, rows: Rows, number: int) -> tuple[Window, Accepted]:
    """The one step of every method, forward `number` of the batch: what was forwarded, and what was accepted."""
    window = method.propose(rows)
    accepted = method.accept(rows, window, forward(decoder, rows.cache, window))
    commit(rows, accepted, number)
    return window, accepted


def forward(decoder: Decoder, cache: RaggedCache, window: Window) -> Answer:
    width, slots = window.input_ids.shape[1], window.slots
    offset = torch.arange(max(slots, width), device=window.begin.device)
    # A short prompt's fillers lie before its first token: they go to a slot of their own, `slots`, behind all others.
    places = window.begin.unsqueeze(1) + offset[:width]
    is_filler = places < 0
    if cache.fixed and window.real is not None:  # leaving fillers out would take a shape that depends on values
        is_filler, window = is_filler | ~window.real, window._replace(real=None)
    cache.prepare(torch.where(is_filler, slots, places), slots)
    # Relative to its row's window, a slot is -1 (before it), 0 to W - 1 (an entry), or W (behind it).
    relative = (offset[:slots] - window.begin.unsqueeze(1)).clamp(-1, width)
    return decoder(cache, window, relative)


def commit(rows: Rows, accepted: Accepted, number: int) -> None:
    inside = accepted.chosen & (accepted.position < rows.end.unsqueeze(1))
    at = torch.where(inside, accepted.position, rows.tokens.shape[1] - 1)
    rows.tokens.scatter_(1, at, accepted.ids)
    if not accepted.in_order:
        rows.settled_by.scatter_(1, at, number)
    rows.length = torch.minimum(rows.length + accepted.advance, rows.end)
    rows.cached = rows.cached + accepted.kept


def pack_tokens(rows: Rows, before: Tensor, window: Window, accepted: Accepted, alive: Tensor | None = None) -> Tensor:
    """What the host needs to know of a step, integer [N, 3 + K]; ended rows have nothing new.

    How many tokens are new, how many entries of the window were no fillers, how many drafts were verified, and the
    tokens; behind these, [N, K], the forwards that settled them, where that need not be the latest. `before` [N] are
    the rows' lengths before the step, `alive` bool [N] those that had not ended then.
    """
    offset = torch.arange(accepted.ids.shape[1], device=before.device)
    fresh = (before.unsqueeze(1) + offset).clamp(max=rows.tokens.shape[1] - 1)
    count = rows.length - before
    width = window.input_ids.shape[1]
    positions = torch.full_like(count, width) if window.real is None else window.real.sum(1)
    drafted = torch.zeros_like(count) if accepted.drafted is None else accepted.drafted
    if alive is not None:
        count, positions, drafted = torch.where(alive, count, 0), positions * alive, drafted * alive
    forwards = [] if accepted.in_order else [rows.settled_by.gather(1, fresh)]
    return torch.cat([torch.stack([count, positions, drafted], dim=1), rows.tokens.gather(1, fresh), *forwards], dim=1)


def unpack_tokens(numbers: list[list[int]], number: int, candidates: int = 0) -> list[NewTokens]:
    """What `pack_tokens` says of forward `number`, row by row; `candidates` is K where tokens come in any order."""
    new = []
    for count, positions, drafted, *rest in numbers:
        settled_by = rest[candidates:][:count] if candidates else [number] * count
        new.append(NewTokens(rest[:count], settled_by, positions, drafted))
    return new


class FittedRows:
    """Rows, the seats that they belong to, and what they have cached. `compiled.FixedRows` has fixed shapes."""

    lag = 0  # steps that may be under way before the first of them is read

    def __init__(self, rows: Rows | None = None, seats: Iterable[Seat] = ()) -> None:
        self._rows = rows
        self.seats: dict[int, Seat] = dict(enumerate(seats))  # by row

    @property
    def rows(self) -> Rows:
        assert self._rows is not None, "the batch is empty"
        return self._rows

    def fits(self, ahead: int) -> bool:
        """Whether there is room for a step although `ahead` others have not been read."""
        return True

    def make_room(self) -> None:
        """Make it, when all others have been read."""

    def step(self, decoder: Decoder, method: Method, number: int) -> Callable[[], list[NewTokens]]:
        """Move every row by forward `number`; returns what reads the new tokens, which here have been read already."""
        rows = self.rows
        before = rows.length
        window, accepted = advance(decoder, method, rows, number)
        new = pack_tokens(rows, before, window, accepted)
        numbers, width = rows.measure_step(new), new.shape[1]
        of_rows = [numbers[at : at + width] for at in range(0, len(numbers), width)]
        settled = unpack_tokens(of_rows, number, 0 if accepted.in_order else accepted.ids.shape[1])
        return lambda: settled

    def take_in(self, newcomers: "Sequence[FittedRows]") -> None:
        """Put the rows of others, none of them empty, behind the own ones; the others must not be used any more."""
        groups = [self, *newcomers] if self.seats else newcomers
        if len(groups) > 1:
            groups[0].rows.extend(*(group.rows for group in groups[1:]))
        self._rows = groups[0].rows
        self.seats = dict(enumerate(seat for group in groups for seat in group.seats.values()))

    def take_out(self, gone: Sequence[int]) -> None:
        """Give up rows, one at least, whose seats are gone: the gaps are closed, in memory too."""
        if not self.seats:
            self._rows = None
            return
        rows, count = self.rows, len(self.seats)
        order, movers = list(range(count)), [row for row in self.seats if row >= count]
        holes = [row for row in range(count) if row not in self.seats]
        for hole, mover in zip(holes, movers, strict=True):
            order[hole] = mover
        sources, targets, chosen = (
            torch.tensor(each, dtype=torch.long, device=rows.length.device) for each in (movers, holes, order)
        )
        longest = max(seat.length for seat in self.seats.values())
        for cache in rows.caches:
            cache.move(sources, targets, count, longest)
        self.seats = {row: self.seats[old] for row, old in enumerate(order)}
        rows.take(chosen, max(seat.end for seat in self.seats.values()) + 1)

    def bytes(self) -> int:
        return 0 if self._rows is None else sum(cache.bytes() for cache in self._rows.caches)
