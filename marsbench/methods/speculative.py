"""Speculative decoding (arXiv 2211.17192, 2302.01318): a small model drafts, the large one verifies, in batches.

`MarsSpeculative` goes on by itself behind what is verified: mask groups stand after every draft (paper section 4.6).
"""

from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any, Literal

import torch
import torch.nn.functional as F

from marsbench.decoding.acceptance import confidence, passing_run
from marsbench.decoding.generation import Metric
from marsbench.decoding.reading import read_masks, verify
from marsbench.decoding.rows import Accepted, Most, Rows
from marsbench.decoding.step import Method, advance, forward
from marsbench.decoding.windows import group_entries, grouped_window, leading_windows, linear_window
from marsbench.forward.decoder import Decoder, decoder_of
from marsbench.forward.window import Answer, Window
from marsbench.methods.ar import Autoregressive
from marsbench.methods.mars import Mars


@dataclass(frozen=True)
class Speculative(Method):
    """A draft model continues every row by up to `draft_length` tokens, by a method of its own; these are verified."""

    name = "speculative"

    draft: Any  # a causal language model of transformers with the target's vocabulary
    mask_id: int = -1
    draft_length: int = 4
    draft_method: Literal["ar", "mars"] = "ar"
    draft_threshold: float = 0.95  # for "mars"
    window: int = 4  # likewise
    drafting: Method = field(init=False, repr=False, compare=False)  # how the draft decodes
    _latest: list[Decoder] = field(default_factory=list, init=False, compare=False)  # what `draft_decoder` found, one

    def __post_init__(self) -> None:
        by_mars = self.draft_method == "mars"
        object.__setattr__(self, "drafting", Mars(self.mask_id, self.window) if by_mars else Autoregressive())

    def most(self) -> Most | None:
        return Most(1, self.draft_length, self.draft_length, draft_pending=2) if self.draft_method == "ar" else None

    def propose(self, rows: Rows) -> Window:
        self.note_drafts(rows)
        return linear_window(rows)

    def accept(self, rows: Rows, window: Window, answer: Answer) -> Accepted:
        """The right drafts and the token after them; what the draft model has cached beyond these is hidden."""
        accepted = verify(rows, answer)
        rows.draft_cached = torch.minimum(rows.draft_cached, rows.length + accepted.advance - 1)
        return accepted

    def draft_decoder(self, *, anew: bool = False) -> Decoder:
        """The draft model's, looked for `anew` when rows begin; compiled steps cannot look for it."""
        if anew or not self._latest:
            self._latest[:] = [decoder_of(self.draft)]
        return self._latest[0]

    def note_drafts(self, rows: Rows) -> None:
        """Note the drafts in `rows`; the draft model's cache goes along with them.

        Every row gets all the drafts that it has room for. By `ar`, every forward of the draft model adds one token, so
        nothing is read from the device in between; drafting by a threshold is measured after each.
        """
        most, least = (min(room - 1, self.draft_length) for room in rows.extent.room)
        lane = self._lane(rows, drafts=most)
        begins = rows.draft_cache.dtype is None
        decoder = self.draft_decoder(anew=begins)
        for window in leading_windows(lane) if begins and most else ():  # of a long prompt
            forward(decoder, rows.draft_cache, window)
        known, unfinished = 0, most
        while unfinished:
            advance(decoder, self.drafting, lane, 1)
            # A row that has all its drafts waits for the others: it says its last token again.
            lane.cached = torch.minimum(lane.cached, lane.length - 1)
            if self.draft_method == "ar":
                known, unfinished = known + 1, unfinished - 1
                lane.extent = lane.extent._replace(pending=1, length=rows.extent.length + known, even=True, level=True)
            else:
                (unfinished,) = lane.measure_step((lane.length < lane.end).any().long())
        offset = torch.arange(self.draft_length, device=rows.tokens.device)
        places = (rows.length.unsqueeze(1) + offset).clamp(max=lane.tokens.shape[1] - 1)
        rows.drafts, rows.drafted = lane.tokens.gather(1, places), lane.length - rows.length
        rows.draft_cached = lane.cached
        rows.extent = rows.extent._replace(drafted=most, even=rows.extent.level and most == least)

    def _lane(self, rows: Rows, drafts: int) -> Rows:
        threshold, now = self.draft_threshold if self.draft_method == "mars" else None, rows.extent
        needed = self.drafting.confidence_needed(threshold)
        extent = now._replace(pending=now.draft_pending, drafted=0, even=now.draft_level, thresholded=isfinite(needed))
        return replace(
            rows, tokens=rows.tokens.clone(), settled_by=rows.settled_by.clone(), cache=rows.draft_cache,
            cached=torch.minimum(rows.draft_cached, rows.length - 1),  # a step that failed may have cached drafts
            end=torch.minimum(rows.length + drafts, rows.end - 1), drafted=torch.zeros_like(rows.drafted),
            needed=torch.full_like(rows.needed, needed), drafts=rows.tokens[:, :0], extent=extent,
        )  # fmt: skip


@dataclass(frozen=True)
class MarsSpeculative(Speculative):
    """The right drafts, the model's token after them, and masks behind it that pass the threshold, unverified."""

    name = "mars-speculative"

    metric: Metric = "probability"
    head_top: int = 64

    def most(self) -> Most | None:
        """The drafts, and masks behind each of them; the extension is forwarded again, by both models."""
        length, masks = self.draft_length, self.window - 1
        behind = length + (length + 1) * masks
        return Most(masks + 1, length, behind, draft_pending=masks + 2) if self.draft_method == "ar" else None

    def propose(self, rows: Rows) -> Window:
        self.note_drafts(rows)
        return grouped_window(rows, self.window - 1, self.mask_id)

    def accept(self, rows: Rows, window: Window, answer: Answer) -> Accepted:
        verified, masks = super().accept(rows, window, answer), self.window - 1
        entries = group_entries(rows, masks, verified.advance - 1)
        logits = answer.logits(entries)
        behind = verified.advance.unsqueeze(1) + torch.arange(masks, device=logits.device)
        extension, logits = read_masks(rows, answer, entries, logits, verified, self.head_top)
        sure = passing_run(confidence(logits, self.metric) >= rows.needed.unsqueeze(1))
        ids = F.pad(verified.ids, (0, masks)).scatter(1, behind, extension)
        drafted = rows.drafted * rows.needed.isinf()  # with a threshold, right drafts look like masks that pass
        return Accepted.leading(rows, ids, verified.advance + sure, verified.kept)._replace(drafted=drafted)
