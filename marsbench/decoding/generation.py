"""What goes into the decode loop and what comes out: `Request` and `Generation`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Metric = Literal["probability", "entropy", "margin"]
Finish = Literal["eos", "length"]


@dataclass(frozen=True)
class Request:
    """One prompt to continue.

    `threshold` is the confidence that a token after the first must pass (see `acceptance`); None accepts exactly one
    token per forward, which is AR decoding. `max_new_tokens` counts an emitted EOS.
    """

    prompt_ids: Sequence[int]
    max_new_tokens: int = 256
    threshold: float | None = None


@dataclass(frozen=True)
class Generation:
    """One continuation and what it cost.

    `tokens` runs up to and without EOS. `accepted` has one entry per forward of this row, the prompt's forward
    included, and sums to the tokens emitted, an emitted EOS counted once.
    """

    tokens: list[int]
    accepted: list[int]
    finish: Finish

    @property
    def forwards(self) -> int:
        """Forward passes of the model that this row took part in."""
        return len(self.accepted)

    @property
    def emitted(self) -> int:
        """Tokens emitted, an EOS counted once: `tokens_per_forward` of AR is exactly 1."""
        return sum(self.accepted)

    @property
    def tokens_per_forward(self) -> float:
        """Emitted tokens over forward passes (the paper's tok/fwd, counted per row)."""
        return self.emitted / self.forwards
