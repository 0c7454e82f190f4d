"""Rows whose steps are fitted to them: as many positions as the fullest row needs, no row that has ended."""

from collections.abc import Callable, Iterable, Sequence

import torch

from marsbench.decoding.requests import New, Seat
from marsbench.decoding.rows import Rows
from marsbench.decoding.step import Method, advance, to_tell, told
from marsbench.forward.decoder import Decoder


class Fitted:
    """Rows, the seats that they belong to, and what they have cached; an empty batch holds nothing.

    `compiled.Fixed` is the same in fixed shapes.
    """

    lag = 0  # steps that may be under way before the first of them is read

    def __init__(self, rows: Rows | None = None, seats: Iterable[Seat] = ()) -> None:
        self._rows = rows
        self.seats: dict[int, Seat] = dict(enumerate(seats))  # by row

    @property
    def rows(self) -> Rows:
        """The rows of a batch that is not empty."""
        assert self._rows is not None, "the batch is empty"
        return self._rows

    def fits(self, ahead: int) -> bool:
        """Whether there is room for a step although `ahead` others have not been read."""
        return True

    def make_room(self) -> None:
        """Make it, when all others have been read."""

    def step(self, decoder: Decoder, method: Method, number: int) -> Callable[[], list[New]]:
        """Move every row by forward `number`; what comes of it, for who waits: here it has been read already."""
        rows = self.rows
        before = rows.length
        window, accepted = advance(decoder, method, rows, number)
        new = to_tell(rows, before, window, accepted)
        numbers, width = rows.measure(new), new.shape[1]
        of_rows = [numbers[at : at + width] for at in range(0, len(numbers), width)]
        found = told(of_rows, number, 0 if accepted.in_order else accepted.ids.shape[1])
        return lambda: found

    def take_in(self, newcomers: "Sequence[Fitted]") -> None:
        """Put the rows of others behind the own ones; the others must not be used any more."""
        lots = [lot for lot in (self, *newcomers) if lot.seats]
        if not lots:
            return
        if len(lots) > 1:
            lots[0].rows.extend(*(lot.rows for lot in lots[1:]))
        self._rows = lots[0].rows
        self.seats = dict(enumerate(seat for lot in lots for seat in lot.seats.values()))

    def take_out(self, gone: Sequence[int]) -> None:
        """Give up rows, one at least, whose seats are gone: the gaps are closed, in memory too."""
        if not self.seats:
            self._rows = None
            return
        rows, count = self.rows, len(self.seats)
        order, movers = list(range(count)), [row for row in self.seats if row >= count]
        holes = [row for row in gone if row < count]
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
