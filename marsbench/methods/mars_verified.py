"""Lossless MARS decoding: masks draft, the model's own AR logits verify, both in the same forward.

The thresholded window commits what the masks say. Here what they say is only a draft, which the next forward verifies
while it drafts again. Attention is causal and no token ever sees a mask, so the output is that of AR decoding,
whatever the threshold, which only prunes drafts that are unlikely to be right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch

from marsbench.decoding.acceptance import bar, confidence, passing_run
from marsbench.decoding.generation import Metric
from marsbench.decoding.rows import Accepted, Answer, Rows, Window
from marsbench.decoding.verification import room_for_drafts, verify
from marsbench.decoding.windows import group_entries, grouped_window, last, linear_window

Layout = Literal["groups", "linear"]
LAYOUTS: tuple[str, ...] = get_args(Layout)


@dataclass(frozen=True)
class MarsVerified:
    """Drafts from masks, at most `window` tokens per forward; `window` need not be the B of the training.

    With n drafts and W = `window`, a row's forward has these positions:

    - `groups`: the last token, n drafts, and W - 1 masks after each of them: (n + 1) W. Wherever the drafts turn out
      to be wrong, a group of masks stands there that has seen only right ones.
    - `linear`: the last token, n drafts, and W - 1 masks after the last draft: n + W. Where a draft is wrong, the
      masks have seen it, so the next forward goes without drafts: it pays to prune them by a threshold.
    """

    name: ClassVar[str] = "mars-verified"

    mask_id: int
    window: int = 4
    metric: Metric = "probability"
    layout: Layout = "groups"

    def bar(self, threshold: float | None) -> float:
        """The confidence that a draft must have; without a threshold, none."""
        return -torch.inf if threshold is None else bar(threshold, self.metric)

    def propose(self, rows: Rows) -> Window:
        """Drafts and masks in the chosen layout."""
        masks = self.window - 1
        if self.layout == "groups":
            return grouped_window(rows, masks, self.mask_id)
        return linear_window(rows, masks=masks, mask_id=self.mask_id)

    def accept(self, rows: Rows, window: Window, answer: Answer) -> Accepted:
        """The right drafts and the token after them; the next drafts are noted in `rows`."""
        accepted, masks = verify(rows, answer), self.window - 1
        drafted = rows.drafted
        if self.layout == "groups":
            guessing = group_entries(rows, masks, accepted.advance - 1)
        else:
            guessing = (last(rows) + 1 + drafted).unsqueeze(1) + torch.arange(masks, device=drafted.device)
        logits = answer.logits(guessing)
        position = (rows.length + accepted.advance).unsqueeze(1) + torch.arange(masks, device=drafted.device)
        rows.drafts = rows.choose(logits, position)
        sure = passing_run(confidence(logits, self.metric) >= rows.bar.unsqueeze(1))
        rows.drafted = torch.minimum(sure, room_for_drafts(rows, accepted))
        if self.layout == "linear":
            rows.drafted = rows.drafted.masked_fill(accepted.advance <= drafted, 0)
        return accepted
