"""MARS decoding with the paper's block-level cache (section 4.5): the cache advances a whole block at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from marsbench.decoding.acceptance import confidence, leading_run
from marsbench.decoding.chain import read_line
from marsbench.decoding.generation import Metric
from marsbench.decoding.rows import Accepted, Rows
from marsbench.decoding.step import Method
from marsbench.decoding.windows import last, linear_window
from marsbench.forward.window import Answer, Window


@dataclass(frozen=True)
class MarsBlockCache(Method):
    """Blocks of `cache_block` positions (B_cache), counted from the end of the prompt.

    Every forward covers the row's current block, tokens accepted so far and masks for the rest, against the cached
    blocks before it; so the window of masks is as wide as what is left of the block. The first forward of a block
    carries the block before it too, which then stays in the cache; the authors spend a forward of its own on that, and
    let rows that are done with a block wait for the others.
    """

    name = "mars-block-cache"

    mask_id: int
    cache_block: int = 4
    metric: Metric = "probability"
    head_top: int = 64

    def propose(self, rows: Rows) -> Window:
        """The tokens that are not cached, and masks up to the end of the block."""
        needed = self._block_end(rows) - rows.length - 1
        return linear_window(rows, masks=int(needed.amax()), mask_id=self.mask_id, each=needed)

    def accept(self, rows: Rows, window: Window, answer: Answer) -> Accepted:
        """The leading candidates of the block whose confidence passes."""
        block_end = self._block_end(rows)
        logits = answer.logits(slice(last(rows), None))
        ids = read_line(rows, answer, logits, logits.shape[1] - 1, self.head_top)
        position = rows.length.unsqueeze(1) + torch.arange(logits.shape[1], device=logits.device)
        passes = (confidence(logits, self.metric) >= rows.bar.unsqueeze(1)) & (position < block_end.unsqueeze(1))
        block_start = block_end - self.cache_block
        return Accepted.run(rows, ids, leading_run(passes), block_start - rows.cached)

    def _block_end(self, rows: Rows) -> Tensor:
        """Where the block of each row's next token ends, [N]."""
        return rows.start + ((rows.length - rows.start) // self.cache_block + 1) * self.cache_block
