"""Prompt lookup decoding (github.com/apoorvumang/prompt-lookup-decoding): what followed last time is the draft."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from marsbench.decoding.acceptance import no_threshold
from marsbench.decoding.rows import Accepted, Most, Rows
from marsbench.decoding.verification import continued, verify
from marsbench.decoding.windows import linear_window
from marsbench.forward.window import Answer, Window


@dataclass(frozen=True)
class PromptLookup:
    """Drafts `draft_length` tokens: those behind the latest earlier place where the row's last n tokens stand.

    The longest n that is found anywhere counts, from `ngram` down to 1.
    """

    name: ClassVar[str] = "prompt-lookup"
    causal_prompt: ClassVar[bool] = True

    draft_length: int = 4
    ngram: int = 3

    def bar(self, threshold: float | None) -> float:
        """Prompt lookup takes no threshold."""
        return no_threshold(self.name, threshold)

    def most(self) -> Most:
        """The draft."""
        return Most(pending=1, drafted=self.draft_length, behind=self.draft_length)

    def propose(self, rows: Rows) -> Window:
        """The committed tokens and the draft; only that in front of the first answer is still to be looked up."""
        if not rows.drafts.shape[1]:
            rows.drafts, rows.drafted = self._look_up(rows.tokens, rows.length, rows.end)
            rows.measure()
        return linear_window(rows)

    def accept(self, rows: Rows, window: Window, answer: Answer) -> Accepted:
        """The right drafts and the token after them; the next draft is looked up, and measured with all the rest."""
        accepted = verify(rows, answer)
        tokens, length = continued(rows, accepted)
        rows.drafts, rows.drafted = self._look_up(tokens, length, rows.end)
        return accepted

    def _look_up(self, tokens: Tensor, length: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
        """Drafts [N, D] and how many of them there are [N], for rows of `tokens` [N, T] up to `length` [N]."""
        limit, length = end - length - 1, length.unsqueeze(1)
        place = torch.arange(tokens.shape[1], device=tokens.device)
        same = place < length - 1  # [N, T]: the n tokens that end here are the row's last n
        found = torch.zeros_like(length)
        for n in range(self.ngram):
            shifted = tokens.roll(n, 1) == tokens.gather(1, (length - 1 - n).clamp(min=0))
            same = same & shifted & (place >= n)
            # Later places win over earlier ones, and longer matches over shorter ones.
            latest = torch.where(same, place + 1, 0).amax(1, keepdim=True)
            found = torch.where(latest > 0, latest, found)
        offset = torch.arange(self.draft_length, device=tokens.device)
        drafts = tokens.gather(1, (found + offset).clamp(max=tokens.shape[1] - 1))
        known = torch.where(found > 0, length - found, 0).clamp(max=self.draft_length)
        return drafts, torch.minimum(known.squeeze(1), limit).clamp(min=0)
