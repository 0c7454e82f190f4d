"""MARS decoding that recomputes the whole prefix in every forward: what the KV cache saves, and a check of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from marsbench.decoding.rows import Accepted, Answer, Rows, Window
from marsbench.methods.mars import Mars


@dataclass(frozen=True)
class MarsNoCache(Mars):
    """`mars` that keeps nothing in the cache. It appends B - 1 masks, not the 256 of the authors' sampler."""

    name: ClassVar[str] = "mars-no-cache"

    def accept(self, rows: Rows, window: Window, answer: Answer) -> Accepted:
        """The same tokens, none of them kept."""
        accepted = super().accept(rows, window, answer)
        return accepted._replace(kept=torch.zeros_like(accepted.kept))
