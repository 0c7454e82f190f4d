"""Block diffusion, the paper's baseline: fill a block in any order, seeing all of it, then go on to the next one."""

from dataclasses import dataclass

import torch
from torch import Tensor

from marsbench.decoding.acceptance import confidence, passing_run
from marsbench.decoding.generation import Metric
from marsbench.decoding.rows import EMPTY, Accepted, Rows
from marsbench.decoding.step import Method
from marsbench.forward.window import Answer, Window


@dataclass(frozen=True)
class BlockDiffusion(Method):
    """Blocks of B positions counted from the start of the sequence, attention bidirectional inside a block (BD3-LM).

    A forward predicts every masked position of a row's current block, in place or, `shifted`, where the token before it
    stands, and settles the most confident one, and with a threshold every other one that passes. A block that is full
    is forwarded once more as clean tokens, together with the next block, and then stays in the cache; `shifted`, its
    last token comes along again as long as it has something to predict.
    """

    name = "block-diffusion"
    causal_prompt = False  # attention goes both ways inside a block, in the prompt's too

    mask_id: int
    window: int = 4  # B
    metric: Metric = "probability"
    shifted: bool = False

    def propose(self, rows: Rows) -> Window:
        """The full blocks that are not cached yet, or the token that predicts; then the current one with its masks."""
        block_start = self._block_start(rows)
        ahead = max(int((block_start - rows.cached).amax()), int(self.shifted))
        offset = torch.arange(ahead + self.window, device=block_start.device)
        position = (block_start - ahead).unsqueeze(1) + offset
        input_ids = rows.tokens.gather(1, position.clamp(0, rows.tokens.shape[1] - 1))
        input_ids = input_ids.masked_fill(self._open(rows, position), self.mask_id)
        block = (offset - ahead).div(self.window, rounding_mode="floor")
        visible = block <= block.unsqueeze(1)
        slots = int(block_start.amax()) + self.window
        first = torch.minimum(rows.cached, block_start - int(self.shifted)).clamp(min=0)
        return Window(input_ids, position, block_start - ahead, slots, visible, position >= first.unsqueeze(1))

    def accept(self, rows: Rows, window: Window, answer: Answer) -> Accepted:
        block_start = self._block_start(rows)
        position, width = window.position[:, -self.window :], window.position.shape[1]
        first = width - self.window - int(self.shifted)
        logits = answer.logits(slice(first, first + self.window))
        is_open = self._open(rows, position)
        masked = is_open & (position < rows.end.unsqueeze(1))
        sure = confidence(logits, self.metric).masked_fill(~masked, -torch.inf)
        best = torch.nn.functional.one_hot(sure.argmax(1), sure.shape[1]).bool()
        chosen = masked & (best | (sure >= rows.needed.unsqueeze(1)))
        length = block_start + passing_run(chosen | ~is_open)
        ids, kept = rows.choose(logits, position), block_start - rows.cached
        return Accepted(ids, position, chosen, length - rows.length, kept)

    def _block_start(self, rows: Rows) -> Tensor:
        return rows.length // self.window * self.window

    def _open(self, rows: Rows, position: Tensor) -> Tensor:
        """Which positions hold no token yet, bool like `position`; those past the row's end never do."""
        at = position.clamp(0, rows.tokens.shape[1] - 1)
        return (rows.settled_by.gather(1, at) == EMPTY) | (position >= rows.end.unsqueeze(1))
