"""Jacobi decoding (arXiv 2305.10427): guess a whole window, and let the model correct it until it stands still."""

from dataclasses import dataclass

import torch

from marsbench.decoding.reading import room_for_drafts, verify
from marsbench.decoding.rows import Accepted, Most, Rows
from marsbench.decoding.step import Method
from marsbench.forward.window import Answer, Window


@dataclass(frozen=True)
class Jacobi(Method):
    """Fixed-point iteration over the next `window` tokens.

    What the model said in the last forward is what the next one is asked about; tokens of the prompt,
    drawn at random, enter the window behind it. What has come to its fixed point from the left is committed.
    """

    name = "jacobi"

    window: int = 4

    def most(self) -> Most:
        return Most(pending=1, drafted=self.window - 1, behind=self.window - 1)

    def accept(self, rows: Rows, window: Window, answer: Answer) -> Accepted:
        accepted = verify(rows, answer)
        count = self.window - 1
        offset = torch.arange(count, device=accepted.ids.device)
        place = (rows.length + accepted.advance).unsqueeze(1) + offset
        entering = rows.tokens.gather(1, (place * 2_654_435_761 >> 8) % rows.start.unsqueeze(1))
        # Past the first wrong guess the answers were read in a wrong context: fit to be verified, not to be trusted.
        behind, most = accepted.advance.unsqueeze(1) + offset, accepted.ids.shape[1] - 1
        rows.drafts = torch.where(behind <= most, accepted.ids.gather(1, behind.clamp(max=most)), entering)
        rows.drafted = room_for_drafts(rows, accepted).clamp(max=count)
        return accepted
