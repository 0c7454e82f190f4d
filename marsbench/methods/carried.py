"""A method that computes all that it does, and then keeps as many guesses as `marsbench/racing/grid.py` says."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from marsbench.decoding.reading import room_for_drafts
from marsbench.decoding.rows import Accepted, Most, Rows
from marsbench.decoding.step import Method
from marsbench.decoding.windows import pending
from marsbench.errors import UserError
from marsbench.forward.window import Answer, Window
from marsbench.methods.mars import Mars
from marsbench.methods.mars_verified import MarsVerified


@dataclass(frozen=True)
class CarriedOver(Method):
    name = "carried over"

    method: Mars | MarsVerified
    draws: Tensor = field(compare=False)  # integer, guesses kept in step after step, on the model's device

    def confidence_needed(self, threshold: float | None) -> float:
        return self.method.confidence_needed(threshold)

    def most(self) -> Most | None:
        return self.method.most()

    def propose(self, rows: Rows) -> Window:
        return self.method.propose(rows)

    def accept(self, rows: Rows, window: Window, answer: Answer) -> Accepted:
        drafted = rows.drafted
        accepted = self.method.accept(rows, window, answer)
        place = rows.length + 611 * torch.arange(len(rows), device=rows.length.device)  # rows draw apart
        kept = self.draws[place.remainder(len(self.draws))]
        if isinstance(self.method, Mars):
            return Accepted.leading(rows, accepted.ids, kept.clamp(max=accepted.ids.shape[1] - 1) + 1, accepted.kept)
        kept = torch.minimum(kept, drafted)
        forced = Accepted.leading(rows, accepted.ids, kept + 1, pending(rows) + kept)
        usable = room_for_drafts(rows, forced).clamp(max=self.method.window - 1)
        rows.drafted = usable * (kept == drafted) if self.method.layout == "linear" else usable
        return forced


def carried_over(method: Any, draws: Sequence[int], device: torch.device) -> CarriedOver:
    """A method that keeps so many guesses in step after step; `UserError` where it has none that can be counted."""
    if type(method) is not Mars and not (isinstance(method, MarsVerified) and method.groups is None):
        raise UserError(f"acceptance cannot be carried over to {method.name!r}", fix="take mars or mars-verified")
    return CarriedOver(method, torch.tensor(draws, device=device))
