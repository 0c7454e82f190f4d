"""Rows that decode each in its own way, in one forward: AR, the thresholded window, or verified drafts.

All three are the same line: the committed tokens that are not cached yet, drafts, and masks behind them. AR has neither
drafts nor masks, MARS has masks whose answers count where they pass, verified MARS has masks whose answers are the next
drafts. So they share one forward, and a row's window may change at every step.
"""

from dataclasses import dataclass

import torch

from marsbench.decoding.acceptance import confidence, leading_run, passing_run
from marsbench.decoding.generation import Metric
from marsbench.decoding.reading import read_linear, right_drafts, room_for_drafts
from marsbench.decoding.rows import Accepted, Most, Rows
from marsbench.decoding.step import Method
from marsbench.decoding.windows import last, linear_window, pending
from marsbench.forward.window import Answer, Window


@dataclass(frozen=True)
class Mixed(Method):
    """What each row's request says: `ar` at window 1, else `mars`, or linear `mars-verified` where it is `verified`."""

    name = "mixed"

    mask_id: int
    metric: Metric = "probability"
    head_top: int = 64
    widest: int | None = None  # that any row's window may become; None = no bound, and no steps of fixed shape

    def most(self) -> Most | None:
        """What rows of the widest window need: accepted masks that are pending, or drafts, and masks behind them."""
        if self.widest is None:
            return None
        masks = self.widest - 1
        return Most(pending=self.widest, drafted=masks, behind=2 * masks)

    def propose(self, rows: Rows) -> Window:
        widest, narrowest = rows.extent.windows
        each = rows.window - 1 if narrowest < widest else None
        return linear_window(rows, masks=widest - 1, mask_id=self.mask_id, each=each)

    def accept(self, rows: Rows, window: Window, answer: Answer) -> Accepted:
        first = last(rows)
        logits = answer.logits(slice(first, None))  # [N, 1 + drafts + masks, V]
        ids = read_linear(rows, answer, logits, rows.extent.windows[0] - 1, self.head_top)
        if logits.shape[1] == 1:  # no row guesses
            return Accepted.leading(rows, ids, torch.ones_like(rows.length), pending(rows))
        place = torch.arange(logits.shape[1], device=logits.device)
        passes = confidence(logits, self.metric) >= rows.needed.unsqueeze(1)
        checked = right_drafts(rows, ids)
        taken = leading_run(passes & (place < rows.window.unsqueeze(1)))
        count = torch.where(rows.verified, checked + 1, taken)
        accepted = Accepted.leading(rows, ids, count, pending(rows) + torch.where(rows.verified, checked, 0))
        # What verified rows' masks say, as far as it passes; nothing where they stand behind a wrong draft.
        masks = (rows.drafted + 1).unsqueeze(1) + place[: rows.extent.windows[0] - 1]
        room = torch.minimum(room_for_drafts(rows, accepted), rows.window - 1)
        room = torch.minimum(room, passing_run(passes.gather(1, masks)))
        usable = rows.verified & (accepted.advance > rows.drafted)
        rows.drafts, rows.drafted = ids.gather(1, masks), torch.where(usable, room, 0)
        return accepted
