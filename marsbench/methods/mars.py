"""MARS decoding with a sliding window: masks after the committed tokens, accept from the left (paper section 3.3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from marsbench.decoding.acceptance import bar, confidence, leading_run
from marsbench.decoding.engine import Accepted, Rows, Window, pending_window
from marsbench.decoding.generation import Metric


@dataclass(frozen=True)
class Mars:
    """The sliding window with a KV cache.

    Candidate 0 comes from the last committed token, so it is exactly the AR prediction; candidate j >= 1 comes from
    mask j - 1. A window of B candidates therefore needs B - 1 masks. A row without a threshold accepts one token per
    forward, for which masks are of no use: they stand behind every token that they could change.
    """

    name: ClassVar[str] = "mars"

    mask_id: int
    block_size: int = 4
    metric: Metric = "probability"

    def bar(self, threshold: float | None) -> float:
        """The confidence that a threshold asks for."""
        return bar(threshold, self.metric)

    def propose(self, rows: Rows) -> Window:
        """B - 1 masks, or none where every row accepts one token at a time."""
        masks = 0 if bool(rows.bar.isinf().all()) else self.block_size - 1
        return pending_window(rows, rows.tokens.new_full((len(rows.tokens), masks), self.mask_id))

    def accept(self, rows: Rows, window: Window, logits: Tensor) -> Accepted:
        """The leading candidates whose confidence passes."""
        passes = confidence(logits, self.metric) >= rows.bar.unsqueeze(1)
        position = rows.length.unsqueeze(1) + torch.arange(logits.shape[1], device=logits.device)
        return Accepted(logits.argmax(-1), position, leading_run(passes))
