"""Block diffusion, the paper's baseline: fill a block in any order, seeing all of it, then go on to the next one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from marsbench.decoding.acceptance import bar, confidence
from marsbench.decoding.engine import EMPTY, Accepted, Rows, Window
from marsbench.decoding.generation import Metric


@dataclass(frozen=True)
class BlockDiffusion:
    """Blocks of B positions counted from the start of the sequence, attention bidirectional inside a block (BD3-LM).

    A forward predicts every masked position of a row's current block in place and settles the most confident one, and
    with a threshold every other one that passes. A block that is full is forwarded once more as clean tokens, in the
    same pass as the next block's first, and then stays in the cache.
    """

    name: ClassVar[str] = "block-diffusion"

    mask_id: int
    block_size: int = 4
    metric: Metric = "probability"

    def bar(self, threshold: float | None) -> float:
        """The confidence that a threshold asks for."""
        return bar(threshold, self.metric)

    def propose(self, rows: Rows) -> Window:
        """The full blocks that are not cached yet, then the current one with masks where it has no token."""
        block_start = rows.length // self.block_size * self.block_size
        width = int((block_start - rows.cached).max()) + self.block_size
        device = rows.tokens.device
        position = rows.cached.unsqueeze(1) + torch.arange(width, device=device)
        at = position.clamp(max=rows.tokens.shape[1] - 1)
        empty = (rows.born.gather(1, at) == EMPTY) | (position >= rows.end.unsqueeze(1))
        input_ids = rows.tokens.gather(1, at).masked_fill(empty, self.mask_id)
        block = position // self.block_size
        visible = block.unsqueeze(1) <= block.unsqueeze(2)
        current = (block_start - rows.cached).unsqueeze(1) + torch.arange(self.block_size, device=device)
        return Window(input_ids, position, block_start - rows.cached, current, visible)

    def accept(self, rows: Rows, window: Window, logits: Tensor) -> Accepted:
        """The most confident masked position, and every one that passes the bar."""
        position = window.position.gather(1, window.read)
        at = position.clamp(max=rows.tokens.shape[1] - 1)
        open_ = (rows.born.gather(1, at) == EMPTY) & (position < rows.end.unsqueeze(1))
        sure = confidence(logits, self.metric).masked_fill(~open_, -float("inf"))
        best = torch.nn.functional.one_hot(sure.argmax(1), sure.shape[1]).bool()
        return Accepted(logits.argmax(-1), position, open_ & (best | (sure >= rows.bar.unsqueeze(1))))
