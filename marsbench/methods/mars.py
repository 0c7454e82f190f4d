"""MARS decoding with a sliding window: masks after the committed tokens, accept from the left (paper section 3.3).

With a KV cache, with the paper's block-level one, and with none.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from marsbench.decoding.acceptance import confidence, leading_run
from marsbench.decoding.generation import Metric
from marsbench.decoding.reading import read_linear
from marsbench.decoding.rows import Accepted, Most, Rows
from marsbench.decoding.step import Method
from marsbench.decoding.windows import last, linear_window, pending
from marsbench.forward.window import Answer, Window


@dataclass(frozen=True)
class Mars(Method):
    """The sliding window with a KV cache.

    Candidate 0 comes from the last committed token, so it is exactly the AR prediction; candidate j >= 1 comes from
    mask j - 1. A window of B candidates therefore needs B - 1 masks. A row without a threshold accepts one token per
    forward; masks stand behind that token and cannot change it, so a batch of such rows has none.
    """

    name = "mars"

    mask_id: int
    window: int = 4
    metric: Metric = "probability"
    head_top: int = 64  # of a mask's tokens, the likeliest that a draft head chooses from

    def most(self) -> Most | None:
        return Most(pending=self.window, drafted=0, behind=self.window - 1)

    def propose(self, rows: Rows) -> Window:
        masks = self.window - 1 if rows.extent.thresholded else 0
        return linear_window(rows, masks=masks, mask_id=self.mask_id)

    def accept(self, rows: Rows, window: Window, answer: Answer) -> Accepted:
        logits = answer.logits(slice(last(rows), None))
        ids = read_linear(rows, answer, logits, logits.shape[1] - 1, self.head_top)
        count = leading_run(confidence(logits, self.metric) >= rows.needed.unsqueeze(1))
        return Accepted.leading(rows, ids, count, kept=pending(rows))


@dataclass(frozen=True)
class MarsBlockCache(Mars):
    """Blocks of `cache_block` positions (B_cache, section 4.5), counted from the end of the prompt.

    Every forward covers the row's current block, tokens accepted so far and masks for the rest, against the cached
    blocks before it. The first forward of a block carries the block before it too, which then stays in the cache; the
    authors spend a forward of its own on that, and let rows that are done with a block wait for the others.
    """

    name = "mars-block-cache"

    window: int = field(default=0, init=False)  # of no use: the block says how many masks there are
    cache_block: int = 4

    def most(self) -> None:
        """None: rows stand anywhere in their blocks."""

    def propose(self, rows: Rows) -> Window:
        needed = self._block_end(rows) - rows.length - 1
        return linear_window(rows, masks=int(needed.amax()), mask_id=self.mask_id, each=needed)

    def accept(self, rows: Rows, window: Window, answer: Answer) -> Accepted:
        block_end = self._block_end(rows)
        accepted = super().accept(rows, window, answer)
        return accepted._replace(
            chosen=accepted.chosen & (accepted.position < block_end.unsqueeze(1)),
            advance=torch.minimum(accepted.advance, block_end - rows.length),
            kept=block_end - self.cache_block - rows.cached,
        )

    def _block_end(self, rows: Rows) -> Tensor:
        return rows.start + ((rows.length - rows.start) // self.cache_block + 1) * self.cache_block


@dataclass(frozen=True)
class MarsNoCache(Mars):
    """`mars` that recomputes the whole prefix in every forward: what the KV cache saves, and a check of it.

    It appends B - 1 masks, as `mars` does, or `appended_masks`: the authors' sampler appends as many as tokens may be
    generated. Masks behind the first B - 1 change nothing but the cost.
    """

    name = "mars-no-cache"
    causal_prompt = False  # nothing is to stay in the cache, and every later forward is wider still

    appended_masks: int | None = None

    def most(self) -> None:
        """None: the window grows with the row."""

    def propose(self, rows: Rows) -> Window:
        if self.appended_masks is None:
            return super().propose(rows)
        return linear_window(rows, masks=self.appended_masks, mask_id=self.mask_id)

    def accept(self, rows: Rows, window: Window, answer: Answer) -> Accepted:
        read = rows.extent.pending + self.window - 1
        accepted = super().accept(rows, window, replace(answer, hidden=answer.hidden[:, :read]))
        return accepted._replace(kept=torch.zeros_like(accepted.kept))
