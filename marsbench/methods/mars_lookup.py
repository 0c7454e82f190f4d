"""Lossless MARS decoding whose drafts come from two sources: the masks, and what followed the same n-gram before.

A forward has one kind of chain. Where masks have guessed and are sure enough, their guesses are drafted, a long match
goes on behind them, and masks stand there again. Elsewhere what is looked up is drafted alone: most such chains break
somewhere, and masks behind the break would have been forwarded in vain. Where there is no match either, masks begin
anew.
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from marsbench.decoding.acceptance import confidence
from marsbench.decoding.reading import continued
from marsbench.decoding.rows import Accepted, Most, Rows
from marsbench.forward.window import Answer, Window
from marsbench.methods.mars_verified import MarsVerified
from marsbench.methods.prompt_lookup import look_up

# Probability below which a mask's guess gives way to what is looked up: chosen on two small models of the world.
UNLIKELY = 0.3


@dataclass(frozen=True)
class MarsLookup(MarsVerified):
    """Drafts from masks as in `MarsVerified`, and `draft_length` tokens of the text so far as in `PromptLookup`."""

    name = "mars-lookup"

    groups: int | None = field(default=None, init=False)  # as many as there may be, where masks stand at all
    draft_length: int = 4
    ngram: int = 3

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", self.window)

    def most(self) -> Most:
        drafts, groups = self.window - 1 + self.draft_length, self.window if self.layout == "groups" else 1
        return Most(pending=1, drafted=drafts, behind=drafts + groups * (self.window - 1))

    def propose(self, rows: Rows) -> Window:
        """Drafts and masks in the chosen layout; only the drafts in front of the first answer are to be looked up."""
        if not rows.drafts.shape[1]:
            self._note(rows, rows.tokens, rows.length, rows.tokens[:, :0], rows.drafted, torch.zeros_like(rows.needed))
            rows.measure_step()
        return super().propose(rows)

    def accept(self, rows: Rows, window: Window, answer: Answer) -> Accepted:
        accepted, guesses, logits, room = self.read(rows, answer)
        sure = confidence(logits[:, :1], "probability").sum(1)
        self._note(rows, *continued(rows, accepted), guesses, room.clamp(max=guesses.shape[1]), sure)
        return accepted

    def _note(self, rows: Rows, tokens: Tensor, length: Tensor, guesses: Tensor, count: Tensor, sure: Tensor) -> None:
        """Note what is drafted next: `count` [N] of the masks' `guesses` [N, K], or what is looked up."""
        most, ngram = self.draft_length, self.ngram
        drafts, drafted = look_up(tokens, length, most, longest=ngram)
        alone = (drafted > 0) & ((count == 0) | (sure < UNLIKELY))
        if guesses.shape[1]:
            place = torch.arange(guesses.shape[1] + most, device=tokens.device)
            ours, spare = place < count.unsqueeze(1), tokens.shape[1] - 1
            both = F.pad(guesses, (0, most))
            longer = tokens.scatter(1, torch.where(ours, length.unsqueeze(1) + place, spare), both)
            looked_up, more = look_up(longer, length + count, most, longest=ngram, shortest=ngram)
            behind = looked_up.gather(1, (place - count.unsqueeze(1)).clamp(0, most - 1))
            alone_too = F.pad(drafts, (0, guesses.shape[1]))
            drafts = torch.where(alone.unsqueeze(1), alone_too, torch.where(ours, both, behind))
            drafted = torch.where(alone, drafted, count + more)
        rows.drafts, rows.drafted = drafts, torch.minimum(drafted, rows.end - length - 1).clamp(min=0)
        rows.groups = alone.long() - 1
