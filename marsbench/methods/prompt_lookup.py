"""Prompt lookup decoding (github.com/apoorvumang/prompt-lookup-decoding): what followed last time is the draft."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from marsbench.decoding.reading import continued, verify
from marsbench.decoding.rows import Accepted, Most, Rows
from marsbench.decoding.step import Method
from marsbench.decoding.windows import linear_window
from marsbench.forward.window import Answer, Window


@dataclass(frozen=True)
class PromptLookup(Method):
    """Drafts what followed the latest earlier place of the row's last n tokens, for the longest n from `ngram` to 1."""

    name = "prompt-lookup"

    draft_length: int = 4
    ngram: int = 3

    def most(self) -> Most:
        return Most(pending=1, drafted=self.draft_length, behind=self.draft_length)

    def propose(self, rows: Rows) -> Window:
        """The committed tokens and the draft; only that in front of the first answer is still to be looked up."""
        if not rows.drafts.shape[1]:
            rows.drafts, rows.drafted = self._look_up(rows.tokens, rows.length, rows.end)
            rows.measure_step()
        return linear_window(rows)

    def accept(self, rows: Rows, window: Window, answer: Answer) -> Accepted:
        accepted = verify(rows, answer)
        rows.drafts, rows.drafted = self._look_up(*continued(rows, accepted), rows.end)
        return accepted

    def _look_up(self, tokens: Tensor, length: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
        drafts, known = look_up(tokens, length, self.draft_length, longest=self.ngram)
        return drafts, torch.minimum(known, end - length - 1).clamp(min=0)


def look_up(tokens: Tensor, length: Tensor, most: int, *, longest: int, shortest: int = 1) -> tuple[Tensor, Tensor]:
    """What followed the latest earlier place where the last n tokens of a text stand, for the longest n that is there.

    Texts are `tokens` [N, T] of a `length` [N]; n goes from `longest` down to `shortest`. Given are tokens [N, most],
    and how many of them count, [N].
    """
    size, last = tokens.shape[1], length.unsqueeze(1) - 1
    place, offset = (torch.arange(count, device=tokens.device) for count in (size, max(longest, most)))
    ending = tokens.gather(1, (last - longest + 1 + offset[:longest]).clamp(min=0))  # [N, longest]
    before = F.pad(tokens, (longest - 1, 0), value=-1).unfold(1, longest, 1)  # [N, T, longest], those up to each place
    match = (before == ending.unsqueeze(1)).flip(-1).cumprod(-1).sum(-1)  # [N, T], how many are alike, from the end
    # Longer matches win over shorter ones, and later places over earlier ones.
    best = torch.where((match >= shortest) & (place < last), match * size + place, -1).amax(1, keepdim=True)
    matches, is_found = best % size + 1, best.squeeze(1) >= 0
    drafts = tokens.gather(1, (matches + offset[:most]).clamp(max=size - 1))
    return drafts, torch.where(is_found, (last + 1 - matches).squeeze(1), 0).clamp(max=most)
