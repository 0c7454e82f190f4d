"""MARS decoding with a sliding window: masks after the committed tokens, accept from the left (paper section 3.3)."""

from __future__ import annotations

from dataclasses import dataclass

from marsbench.decoding.acceptance import confidence, leading_run
from marsbench.decoding.chain import read_line
from marsbench.decoding.generation import Metric
from marsbench.decoding.rows import Accepted, Most, Rows
from marsbench.decoding.step import Method
from marsbench.decoding.windows import last, linear_window, pending
from marsbench.forward.window import Answer, Window


@dataclass(frozen=True)
class Mars(Method):
    """The sliding window with a KV cache.

    Candidate 0 comes from the last committed token, so it is exactly the AR prediction; candidate j >= 1 comes from
    mask j - 1. A window of B candidates therefore needs B - 1 masks. A row without a threshold accepts one token per
    forward, for which masks are of no use: they stand behind every token that they could change.
    """

    name = "mars"

    mask_id: int
    block_size: int = 4
    metric: Metric = "probability"
    head_top: int = 64

    def most(self) -> Most | None:
        """What a step has accepted, and masks."""
        return Most(pending=self.block_size, drafted=0, behind=self.block_size - 1)

    def propose(self, rows: Rows) -> Window:
        """B - 1 masks, or none where every row accepts one token at a time."""
        masks = self.block_size - 1 if rows.extent.thresholded else 0
        return linear_window(rows, masks=masks, mask_id=self.mask_id)

    def accept(self, rows: Rows, window: Window, answer: Answer) -> Accepted:
        """The leading candidates whose confidence passes."""
        logits = answer.logits(slice(last(rows), None))
        ids = read_line(rows, answer, logits, logits.shape[1] - 1, self.head_top)
        count = leading_run(confidence(logits, self.metric) >= rows.bar.unsqueeze(1))
        return Accepted.run(rows, ids, count, pending(rows))
