"""Lossless MARS decoding whose drafts come from two sources: the masks, and what followed the same n-gram before.

Masks see the whole context and guess a few tokens; a text that repeats itself tells many, at no cost. Neither order is
best everywhere. Where masks guess well, lookup in front of them loses tokens. Where they were hardly trained, their
guesses are wrong, and lookup behind them is never reached. The masks' own confidence tells the two apart: lookup goes
first where their first guess is less likely to be right than what is looked up commonly is, and goes on behind their
guesses elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from marsbench.decoding.acceptance import confidence
from marsbench.decoding.generation import Layout, Metric
from marsbench.decoding.rows import Accepted, Most, Rows
from marsbench.decoding.verification import continued
from marsbench.forward.window import Answer, Window
from marsbench.methods.mars_verified import MarsVerified
from marsbench.methods.prompt_lookup import look_up

# Probability below which a mask's guess gives way to what is looked up: chosen on two small models of the world, and
# not checked on others.
UNLIKELY = 0.3


@dataclass(frozen=True)
class MarsLookup:
    """Drafts from masks as in `MarsVerified`, and `draft_length` tokens from the text so far as in `PromptLookup`.

    With n drafts, from wherever they are, a forward has the positions of `MarsVerified` in the same layout. In `linear`
    a wrong draft spoils the masks behind it too, so there only the longest matches go on behind the masks' guesses.
    """

    name: ClassVar[str] = "mars-lookup"
    causal_prompt: ClassVar[bool] = True

    mask_id: int
    window: int = 4
    metric: Metric = "probability"
    layout: Layout = "groups"
    draft_length: int = 4
    ngram: int = 3
    head_top: int = 64

    def bar(self, threshold: float | None) -> float:
        """The confidence that a mask's draft must have; without a threshold, none."""
        return self._masks.bar(threshold)

    def most(self) -> Most:
        """Drafts of both kinds, and masks behind them or behind each of them."""
        masks = self.window - 1
        groups = self._most_drafts + 1 if self.layout == "groups" else 1
        return Most(pending=1, drafted=self._most_drafts, behind=self._most_drafts + groups * masks)

    def propose(self, rows: Rows) -> Window:
        """Drafts and masks in the chosen layout; only the drafts in front of the first answer are to be looked up."""
        if not rows.drafts.shape[1]:
            nothing, unsure = rows.tokens[:, :0], torch.zeros_like(rows.bar)
            rows.drafts, rows.drafted = self._joined(rows.tokens, rows.length, nothing, rows.drafted, unsure, rows.end)
            rows.measure()
        return self._masks.propose(rows)

    def accept(self, rows: Rows, window: Window, answer: Answer) -> Accepted:
        """The right drafts and the token after them; the next drafts are noted in `rows`."""
        accepted, guesses, logits, room = self._masks.read(rows, answer)
        count, sure = room.clamp(max=guesses.shape[1]), confidence(logits[:, :1], "probability").sum(1)
        rows.drafts, rows.drafted = self._joined(*continued(rows, accepted), guesses, count, sure, rows.end)
        return accepted

    @property
    def _masks(self) -> MarsVerified:
        return MarsVerified(self.mask_id, self.window, self.metric, self.layout, head_top=self.head_top)

    @property
    def _most_drafts(self) -> int:
        return self.window - 1 + self.draft_length

    def _joined(
        self, tokens: Tensor, length: Tensor, guesses: Tensor, count: Tensor, sure: Tensor, end: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What is drafted next: the masks' guesses and what is looked up behind them, or only what is looked up.

        Args:
            tokens: integer [N, T], the texts so far.
            length: integer [N], their lengths.
            guesses: integer [N, W - 1] or [N, 0], of the masks.
            count: integer [N], how many of them are drafted.
            sure: fp32 [N], how likely the first of them is right.
            end: integer [N], the lengths at which the rows must stop.

        Returns:
            Drafts [N, W - 1 + draft_length], and how many of them there are, [N].
        """
        ahead, known = look_up(tokens, length, self.draft_length, longest=self.ngram)
        place = torch.arange(self._most_drafts, device=tokens.device)
        ours, spare = place < count.unsqueeze(1), tokens.shape[1] - 1
        drafts = F.pad(guesses, (0, len(place) - guesses.shape[1]))
        longer = tokens.scatter(1, torch.where(ours, length.unsqueeze(1) + place, spare), drafts)
        shortest = 1 if self.layout == "groups" else self.ngram
        behind, more = look_up(longer, length + count, self.draft_length, longest=self.ngram, shortest=shortest)
        drafts = torch.where(ours, drafts, behind.gather(1, (place - count.unsqueeze(1)).clamp(0, behind.shape[1] - 1)))
        first = (known > 0) & (sure < UNLIKELY)
        drafts = torch.where(first.unsqueeze(1), F.pad(ahead, (0, len(place) - ahead.shape[1])), drafts)
        return drafts, torch.minimum(torch.where(first, known, count + more), end - length - 1).clamp(min=0)
