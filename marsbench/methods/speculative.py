"""Speculative decoding (arXiv 2211.17192, 2302.01318): a small model drafts, the large one verifies, in batches."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import torch

from marsbench.decoding.rows import Accepted, Most, Rows
from marsbench.decoding.step import Method, advance, forward
from marsbench.decoding.verification import verify
from marsbench.decoding.windows import leading_windows, linear_window
from marsbench.forward.decoder import Decoder, decoder_of
from marsbench.forward.window import Answer, Window
from marsbench.methods.ar import Autoregressive
from marsbench.methods.mars import Mars
from marsbench.methods.registry import Options


@dataclass(frozen=True)
class Drafter:
    """A draft model that continues every row by up to `length` tokens, by a method of its own."""

    model: Any  # a causal language model of transformers with the target's vocabulary
    method: Method  # how the draft decodes: `ar`, or `mars` with `threshold`
    threshold: float | None
    length: int
    _latest: list[Decoder] = field(default_factory=list, compare=False)  # what `decoder` found, one

    @classmethod
    def of(cls, options: Options) -> Drafter:
        """The draft model of the options, decoding as they say."""
        if options.draft_method == "ar":
            return cls(options.draft, Autoregressive(), None, options.draft_length)
        assert options.mask_id is not None, "checked by build_method"
        by_mars = Mars(options.mask_id, options.block_size)
        return cls(options.draft, by_mars, options.draft_threshold, options.draft_length)

    @property
    def is_steady(self) -> bool:
        """Whether every forward of the draft model adds one token, so that how many it takes is known before."""
        return self.threshold is None

    def decoder(self, *, anew: bool = False) -> Decoder:
        """The draft model's, looked for `anew` when rows begin; compiled steps cannot look for it."""
        if anew or not self._latest:
            self._latest[:] = [decoder_of(self.model)]
        return self._latest[0]

    def draft(self, rows: Rows) -> None:
        """Note the drafts in `rows`; the draft model's cache goes along with them.

        Every row gets all the drafts that it has room for, so their number is known without a look at the device. A
        draft of one token per forward needs none in between either; one by a threshold is measured after each.
        """
        most, least = (min(room - 1, self.length) for room in rows.extent.room)
        lane = self._lane(rows, drafts=most)
        decoder = self.decoder(anew=rows.draft_cache.dtype is None)
        if most:
            for window in leading_windows(lane):
                forward(decoder, rows.draft_cache, window)
        known, unfinished = 0, most
        while unfinished:
            advance(decoder, self.method, lane, 1)
            # A row that has all its drafts waits for the others: it says its last token again.
            lane.cached = torch.minimum(lane.cached, lane.length - 1)
            if self.is_steady:
                known, unfinished = known + 1, unfinished - 1
                lane.extent = lane.extent._replace(pending=1, length=rows.extent.length + known, even=True, level=True)
            else:
                (unfinished,) = lane.measure((lane.length < lane.end).any().long())
        offset = torch.arange(self.length, device=rows.tokens.device)
        places = (rows.length.unsqueeze(1) + offset).clamp(max=lane.tokens.shape[1] - 1)
        rows.drafts, rows.drafted = lane.tokens.gather(1, places), lane.length - rows.length
        rows.draft_cached = lane.cached
        rows.extent = rows.extent._replace(drafted=most, even=rows.extent.level and most == least)

    def _lane(self, rows: Rows, drafts: int) -> Rows:
        """A copy of the rows that the draft model continues by up to so many tokens; it has its own cache."""
        bar, known = self.method.bar(self.threshold), rows.extent
        extent = known._replace(
            pending=known.draft_pending, drafted=0, even=known.draft_level, thresholded=isfinite(bar)
        )
        return dataclasses.replace(
            rows,
            tokens=rows.tokens.clone(),
            born=rows.born.clone(),
            cached=rows.draft_cached,
            cache=rows.draft_cache,
            end=torch.minimum(rows.length + drafts, rows.end - 1),
            bar=torch.full_like(rows.bar, bar),
            drafts=rows.tokens[:, :0],
            drafted=torch.zeros_like(rows.drafted),
            extent=extent,
        )


@dataclass(frozen=True)
class Speculative(Method):
    """The draft model's tokens, verified."""

    name = "speculative"

    drafter: Drafter

    def most(self) -> Most | None:
        """The drafts."""
        length = self.drafter.length
        return Most(1, length, length, draft_pending=2) if self.drafter.is_steady else None

    def propose(self, rows: Rows) -> Window:
        """The committed tokens and the drafts."""
        self.drafter.draft(rows)
        return linear_window(rows)

    def accept(self, rows: Rows, window: Window, answer: Answer) -> Accepted:
        """The right drafts and the token after them."""
        accepted = verify(rows, answer)
        forget_wrong_drafts(rows, accepted)
        return accepted


def forget_wrong_drafts(rows: Rows, verified: Accepted) -> None:
    """Hide what the draft model has cached beyond the right drafts."""
    rows.draft_cached = torch.minimum(rows.draft_cached, rows.length + verified.advance - 1)
