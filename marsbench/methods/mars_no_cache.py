"""MARS decoding that recomputes the whole prefix in every forward: what the KV cache saves, and a check of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from marsbench.decoding.engine import Rows, Window
from marsbench.methods.mars import Mars


@dataclass(frozen=True)
class MarsNoCache(Mars):
    """`mars` that keeps nothing in the cache. It appends B - 1 masks, not the 256 of the authors' sampler."""

    name: ClassVar[str] = "mars-no-cache"

    def propose(self, rows: Rows) -> Window:
        """The same window, none of it kept."""
        window = super().propose(rows)
        return window._replace(keep=torch.zeros_like(window.keep))
