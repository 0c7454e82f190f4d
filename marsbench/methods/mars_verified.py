"""Lossless MARS decoding: masks draft, the model's own AR logits verify, both in the same forward.

What masks say is only a draft, which the next forward verifies while it drafts again. Attention is causal and no token
ever sees a mask, so the output is that of AR decoding, whatever the threshold, which only prunes unlikely drafts.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from marsbench.decoding.acceptance import confidence, passing_run
from marsbench.decoding.generation import Layout, Metric
from marsbench.decoding.reading import read_masks, room_for_drafts, verify
from marsbench.decoding.rows import Accepted, Most, Rows
from marsbench.decoding.step import Method
from marsbench.decoding.windows import drafts_of, group_entries, grouped_window, last, linear_window
from marsbench.forward.window import Answer, Window, at_entries

# Logits, of groups of masks in the wrong place, that may be computed in vain to read the LM head's weights only once.
_SPARE = 16


class Reading(NamedTuple):
    accepted: Accepted
    drafts: Tensor  # [N, W - 1], the next ones
    logits: Tensor  # [N, W - 1, V], theirs; of a draft head, over the tokens that it chose from
    room: Tensor  # [N], how many of them may be used, which may be more than there are


@dataclass(frozen=True)
class MarsVerified(Method):
    """Drafts from masks, at most `window` tokens per forward; `window` need not be the B of the training.

    With n drafts and W = `window`, a row's forward has these positions:

    - `groups`: the last token, n drafts, and W - 1 masks after each of them: (n + 1) W. Wherever drafts turn out wrong,
      a group of masks has seen only right ones. If only some groups stand there, the next forward may lack drafts.
    - `linear`: the last token, n drafts, and W - 1 masks after the last draft: n + W. Where a draft is wrong, the masks
      have seen it, so the next forward goes without drafts: it pays to prune them by a threshold.
    """

    name = "mars-verified"

    mask_id: int
    window: int = 4
    metric: Metric = "probability"
    layout: Layout = "groups"
    groups: int | None = None
    head_top: int = 64

    def confidence_needed(self, threshold: float | None) -> float:
        return -torch.inf if threshold is None else super().confidence_needed(threshold)

    def most(self) -> Most:
        drafts = self.window - 1
        groups = self.window if self.layout == "groups" else 1
        return Most(pending=1, drafted=drafts, behind=drafts + groups * drafts)

    def propose(self, rows: Rows) -> Window:
        masks, varies = self._masks(rows), self.groups is not None and len({*rows.extent.groups, -1}) > 1
        if self.layout == "groups" and masks:
            count, stands = min(rows.extent.drafted, masks) + 1, None
            if varies:
                place = torch.arange(count, device=rows.groups.device)
                stands = (rows.groups.unsqueeze(1) >> place & 1).bool()
            return grouped_window(rows, masks, self.mask_id, count, stands)
        each = masks * rows.groups.ne(0) if varies and masks else None
        return linear_window(rows, masks=masks, mask_id=self.mask_id, each=each)

    def accept(self, rows: Rows, window: Window, answer: Answer) -> Accepted:
        accepted, rows.drafts, logits, room = self.read(rows, answer)
        rows.drafted = room.clamp(max=self.window - 1)
        if self.layout == "groups" and self.groups is not None:
            rows.groups = _likeliest(confidence(logits, "probability"), rows.drafted, self.groups)
        return accepted

    def read(self, rows: Rows, answer: Answer) -> Reading:
        """What the answer to a window says; masks are read where they have seen the right drafts and no wrong one."""
        masks, first, count = self._masks(rows), last(rows), drafts_of(rows).shape[1] + 1
        in_line = self.layout == "linear"
        is_one = in_line or len(rows) * min(count - 1, masks) * masks <= _SPARE
        every = answer.logits(slice(first, None)) if is_one else None
        accepted = verify(rows, answer, None if every is None else every[:, :count])
        ends = accepted.advance - 1  # the draft that comes last
        stands = (rows.groups >> ends & 1).bool() & (ends == rows.drafted if in_line else ends <= masks)
        # Masks that stand in vain need not be read: asked of a single row alone, and where no device is waited for.
        if len(rows) == 1 and not rows.fixed and stands.device.type == "cpu" and not stands.item():
            masks = 0
        if in_line:
            entries = (rows.drafted + first + 1).unsqueeze(1) + torch.arange(masks, device=ends.device)
        else:
            entries = group_entries(rows, masks, ends.clamp(max=masks))
        if every is None:
            logits = answer.logits(entries)
        else:
            is_even = in_line and rows.extent.even  # every row's masks stand at the same entries
            logits = every[:, count:][:, :masks] if is_even else at_entries(every, entries - first)
        drafts, logits = read_masks(rows, answer, entries, logits, accepted, self.head_top)
        room = room_for_drafts(rows, accepted) * stands
        if rows.extent.thresholded:
            room = torch.minimum(room, passing_run(confidence(logits, self.metric) >= rows.needed.unsqueeze(1)))
        return Reading(accepted, drafts, logits, room)

    def _masks(self, rows: Rows) -> int:
        """How many masks stand in a group of the next window: none where no row has a group."""
        return 0 if self.groups is not None and rows.extent.groups == (0, 0) else self.window - 1


@dataclass(frozen=True)
class Uno(MarsVerified):
    """Two forwards a cycle over the same masks (arXiv 2609.04010): the first drafts, the second verifies.

    The first has the last token, whose answer, the model's own, counts at once, and W - 1 masks behind it; the second
    has that answer and what the masks have guessed. So each is narrow, no mask stands behind a draft, and a cycle
    settles at most `window` + 1 tokens. Rows of a batch may be at different halves.
    """

    name = "uno"

    layout: Layout = field(default="linear", init=False)
    groups: int | None = field(default=1, init=False)  # in a line there is one, or none where drafts stand

    def accept(self, rows: Rows, window: Window, answer: Answer) -> Accepted:
        accepted = super().accept(rows, window, answer)
        rows.groups = rows.drafted.gt(0).long() - 1
        return accepted


def _likeliest(sure: Tensor, drafted: Tensor, most: int) -> Tensor:
    """The groups where drafts likeliest end, as bits [N], by how likely each draft is right, `sure` fp32 [N, D]."""
    is_draft = torch.arange(sure.shape[1], device=sure.device) < drafted.unsqueeze(1)
    right = F.pad(sure * is_draft, (0, 1))
    ends = F.pad(right.cumprod(1)[:, :-1], (1, 0), value=1.0) * (1 - right)
    chosen = ends.topk(min(most, ends.shape[1])).indices
    return (1 << chosen).sum(1)
