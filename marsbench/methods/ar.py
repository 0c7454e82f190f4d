"""Autoregressive decoding: one token per forward, the baseline that every other method is held against."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from marsbench.decoding.engine import Accepted, Rows, Window, pending_window
from marsbench.errors import UserError


class Autoregressive:
    """The greedy next token, with a KV cache."""

    name: ClassVar[str] = "ar"

    def bar(self, threshold: float | None) -> float:
        """AR takes no threshold."""
        if threshold is not None:
            raise UserError("method 'ar' takes no threshold", fix="leave --threshold out, or choose --method mars")
        return float("inf")

    def propose(self, rows: Rows) -> Window:
        """Nothing beyond the committed tokens."""
        return pending_window(rows, rows.tokens[:, :0])

    def accept(self, rows: Rows, window: Window, logits: Tensor) -> Accepted:
        """The top token of the only candidate."""
        ids = logits.argmax(-1)
        return Accepted(ids, rows.length.unsqueeze(1), ids >= 0)
