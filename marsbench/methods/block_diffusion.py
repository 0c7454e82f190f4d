"""Block diffusion, the paper's baseline: fill a block in any order, seeing all of it, then go on to the next one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from marsbench.decoding.acceptance import bar, confidence
from marsbench.decoding.generation import Metric
from marsbench.decoding.rows import EMPTY, Accepted, Most, Rows
from marsbench.forward.window import Answer, Window


@dataclass(frozen=True)
class BlockDiffusion:
    """Blocks of B positions counted from the start of the sequence, attention bidirectional inside a block (BD3-LM).

    A forward predicts every masked position of a row's current block in place and settles the most confident one, and
    with a threshold every other one that passes. A block that is full is forwarded once more as clean tokens, in the
    same pass as the next block's first, and then stays in the cache.
    """

    name: ClassVar[str] = "block-diffusion"
    causal_prompt: ClassVar[bool] = False  # attention goes both ways inside a block, in the prompt's too

    mask_id: int
    block_size: int = 4
    metric: Metric = "probability"

    def bar(self, threshold: float | None) -> float:
        """The confidence that a threshold asks for."""
        return bar(threshold, self.metric)

    def most(self) -> Most | None:
        """The window is as wide as the blocks that are not cached."""
        return None

    def propose(self, rows: Rows) -> Window:
        """The full blocks that are not cached yet, then the current one with masks where it has no token."""
        block_start = self._block_start(rows)
        full = int((block_start - rows.cached).amax())
        offset = torch.arange(full + self.block_size, device=block_start.device)
        position = (block_start - full).unsqueeze(1) + offset
        input_ids = rows.tokens.gather(1, position.clamp(0, rows.tokens.shape[1] - 1))
        input_ids = input_ids.masked_fill(self._open(rows, position), self.mask_id)
        block = (offset - full).div(self.block_size, rounding_mode="floor")
        visible = block <= block.unsqueeze(1)
        slots = int(block_start.amax()) + self.block_size
        return Window(input_ids, position, block_start - full, slots, visible, position >= rows.cached.unsqueeze(1))

    def accept(self, rows: Rows, window: Window, answer: Answer) -> Accepted:
        """The most confident masked position, and every one that passes the bar."""
        block_start = self._block_start(rows)
        logits, position = answer.logits(slice(-self.block_size, None)), window.position[:, -self.block_size :]
        masked = self._open(rows, position) & (position < rows.end.unsqueeze(1))
        sure = confidence(logits, self.metric).masked_fill(~masked, -torch.inf)
        best = torch.nn.functional.one_hot(sure.argmax(1), sure.shape[1]).bool()
        chosen = masked & (best | (sure >= rows.bar.unsqueeze(1)))
        settled = chosen | ~self._open(rows, position)
        length = block_start + settled.int().cumprod(1).sum(1)
        return Accepted(
            rows.choose(logits, position), position, chosen, length - rows.length, block_start - rows.cached
        )

    def _block_start(self, rows: Rows) -> Tensor:
        """Where the block of each row's next token starts, [N]."""
        return rows.length // self.block_size * self.block_size

    def _open(self, rows: Rows, position: Tensor) -> Tensor:
        """Which positions hold no token yet, bool like `position`; those past the row's end never do."""
        at = position.clamp(0, rows.tokens.shape[1] - 1)
        return (rows.born.gather(1, at) == EMPTY) | (position >= rows.end.unsqueeze(1))
