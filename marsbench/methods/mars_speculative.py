"""Speculative decoding whose verification goes on by itself: mask groups after every draft (paper section 4.6)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from marsbench.decoding.acceptance import bar, confidence, passing_run
from marsbench.decoding.generation import Metric
from marsbench.decoding.rows import Accepted, Answer, Rows, Window
from marsbench.decoding.verification import verify
from marsbench.decoding.windows import group_entries, grouped_window
from marsbench.methods.speculative import Drafter, forget_wrong_drafts


@dataclass(frozen=True)
class MarsSpeculative:
    """The right drafts, the model's own token after them, and what the masks behind it are sure of.

    The extension is not verified: it obeys the threshold. Without a threshold there is none.
    """

    name: ClassVar[str] = "mars-speculative"
    causal_prompt: ClassVar[bool] = True

    drafter: Drafter
    mask_id: int
    block_size: int = 4
    metric: Metric = "probability"

    def bar(self, threshold: float | None) -> float:
        """The confidence that the extension needs."""
        return bar(threshold, self.metric)

    def propose(self, rows: Rows) -> Window:
        """The drafts, and B - 1 masks after the last token and after each of them."""
        self.drafter.draft(rows)
        return grouped_window(rows, self.block_size - 1, self.mask_id)

    def accept(self, rows: Rows, window: Window, answer: Answer) -> Accepted:
        """The verified tokens and the extension."""
        verified = verify(rows, answer)
        forget_wrong_drafts(rows, verified)
        masks = self.block_size - 1
        logits = answer.logits(group_entries(rows, masks, verified.advance - 1))
        behind = verified.advance.unsqueeze(1) + torch.arange(masks, device=logits.device)
        extension = rows.choose(logits, rows.length.unsqueeze(1) + behind)
        sure = passing_run(confidence(logits, self.metric) >= rows.bar.unsqueeze(1))
        ids = F.pad(verified.ids, (0, masks)).scatter(1, behind, extension)
        return Accepted.run(rows, ids, verified.advance + sure, verified.kept)
