"""Speculative decoding whose verification goes on by itself: mask groups after every draft (paper section 4.6)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from marsbench.decoding.acceptance import confidence, passing_run
from marsbench.decoding.chain import read_masks
from marsbench.decoding.generation import Metric
from marsbench.decoding.rows import Accepted, Most, Rows
from marsbench.decoding.step import Method
from marsbench.decoding.verification import verify
from marsbench.decoding.windows import group_entries, grouped_window
from marsbench.forward.window import Answer, Window
from marsbench.methods.speculative import Drafter, forget_wrong_drafts


@dataclass(frozen=True)
class MarsSpeculative(Method):
    """The right drafts, the model's own token after them, and what the masks behind it are sure of.

    The extension is not verified: it obeys the threshold. Without a threshold there is none.
    """

    name = "mars-speculative"

    drafter: Drafter
    mask_id: int
    block_size: int = 4
    metric: Metric = "probability"
    head_top: int = 64

    def most(self) -> Most | None:
        """The drafts, and masks behind each of them; the extension is forwarded again, by both models."""
        length, masks = self.drafter.length, self.block_size - 1
        behind = length + (length + 1) * masks
        return Most(masks + 1, length, behind, draft_pending=masks + 2) if self.drafter.is_steady else None

    def propose(self, rows: Rows) -> Window:
        """The drafts, and B - 1 masks after the last token and after each of them."""
        self.drafter.draft(rows)
        return grouped_window(rows, self.block_size - 1, self.mask_id)

    def accept(self, rows: Rows, window: Window, answer: Answer) -> Accepted:
        """The verified tokens and the extension."""
        verified = verify(rows, answer)
        forget_wrong_drafts(rows, verified)
        masks = self.block_size - 1
        entries = group_entries(rows, masks, verified.advance - 1)
        logits = answer.logits(entries)
        behind = verified.advance.unsqueeze(1) + torch.arange(masks, device=logits.device)
        extension, logits = read_masks(rows, answer, entries, logits, verified, self.head_top)
        sure = passing_run(confidence(logits, self.metric) >= rows.bar.unsqueeze(1))
        ids = F.pad(verified.ids, (0, masks)).scatter(1, behind, extension)
        return Accepted.run(rows, ids, verified.advance + sure, verified.kept)
