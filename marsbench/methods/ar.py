"""Autoregressive decoding: one token per forward, the baseline that every other method is held against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from marsbench.decoding.acceptance import no_threshold
from marsbench.decoding.rows import Accepted, Most, Rows
from marsbench.decoding.verification import verify
from marsbench.decoding.windows import linear_window
from marsbench.forward.window import Answer, Window


@dataclass(frozen=True)
class Autoregressive:
    """The next token, with a KV cache."""

    name: ClassVar[str] = "ar"
    causal_prompt: ClassVar[bool] = True

    def bar(self, threshold: float | None) -> float:
        """AR takes no threshold."""
        return no_threshold(self.name, threshold)

    def most(self) -> Most:
        """One token a step."""
        return Most(pending=1, drafted=0, behind=0)

    def propose(self, rows: Rows) -> Window:
        """Nothing beyond the committed tokens."""
        return linear_window(rows)

    def accept(self, rows: Rows, window: Window, answer: Answer) -> Accepted:
        """The model's next token."""
        return verify(rows, answer)
