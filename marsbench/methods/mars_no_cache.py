"""MARS decoding that recomputes the whole prefix in every forward: what the KV cache saves, and a check of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from marsbench.decoding.rows import Accepted, Rows
from marsbench.decoding.windows import linear_window
from marsbench.forward.window import Answer, Window
from marsbench.methods.mars import Mars


@dataclass(frozen=True)
class MarsNoCache(Mars):
    """`mars` that keeps nothing in the cache.

    It appends B - 1 masks, as `mars` does, or `appended_masks` of them, whatever B is: the authors' sampler appends as
    many as tokens may be generated. Masks behind the first B - 1 change nothing but the cost.
    """

    name = "mars-no-cache"
    causal_prompt = False  # nothing is to stay in the cache, and every later forward is wider still

    appended_masks: int | None = None

    def most(self) -> None:
        """The window grows with the row."""

    def propose(self, rows: Rows) -> Window:
        """The committed tokens, none of which is cached, and masks."""
        if self.appended_masks is None:
            return super().propose(rows)
        return linear_window(rows, masks=self.appended_masks, mask_id=self.mask_id)

    def accept(self, rows: Rows, window: Window, answer: Answer) -> Accepted:
        """The same tokens, none of them kept."""
        read = rows.extent.pending + self.block_size - 1
        window = window._replace(input_ids=window.input_ids[:, :read])
        accepted = super().accept(rows, window, replace(answer, hidden=answer.hidden[:, :read]))
        return accepted._replace(kept=torch.zeros_like(accepted.kept))
