"""What methods work on: the rows in flight, and what a method accepts of the model's answer for them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import sub
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from marsbench.decoding.generation import PREFILL_POSITIONS
from marsbench.decoding.sampling import choose
from marsbench.forward.cache import RaggedCache

PROMPT = -1  # `settled_by` of a prompt token
EMPTY = 0  # `settled_by` of a position that holds no token yet


class Extent(NamedTuple):
    """What the host knows of the rows without asking the device again."""

    pending: int = 0  # most committed tokens of a row that are not cached yet
    drafted: int = 0  # most drafts of a row
    length: int = 0  # most committed tokens of a row
    even: bool = False  # whether all rows have equally many pending tokens, and equally many drafts
    thresholded: bool = False  # whether any row has a confidence to pass
    sampled: bool = False  # whether any row samples
    level: bool = False  # whether all rows have equally many pending tokens
    draft_pending: int = 0  # `pending` of the draft model
    draft_level: bool = False  # `level` of the draft model
    room: tuple[int, int] = (0, 0)  # tokens that a row may still get: the most and the least
    cut: bool = False  # whether any row samples from a part of the tokens only
    windows: tuple[int, int] = (1, 1)  # the widest and the narrowest, where a method lets rows differ
    groups: tuple[int, int] = (-1, -1)  # the most and the least of `groups`, as numbers


class Most(NamedTuple):
    """What a method needs at most in any step after the prompt's; see `Extent`."""

    pending: int
    drafted: int
    behind: int  # entries of a window behind the last committed token; a step adds no more tokens than these and one
    draft_pending: int = 0


@dataclass
class Rows:
    """The rows in flight, at most T - 1 long: the last column takes every write that must not count."""

    tokens: Tensor  # [N, T], prompt and committed tokens
    settled_by: Tensor  # [N, T], PROMPT, EMPTY or, where any order is possible, the forward (from 1) that settled it
    length: Tensor  # [N], tokens committed without a gap
    cached: Tensor  # [N], leading tokens whose keys and values are in the cache
    start: Tensor  # [N], length of the prompt
    end: Tensor  # [N], the length at which the row must stop
    needed: Tensor  # fp32 [N], the confidence to pass
    temperature: Tensor  # fp32 [N], 0 = greedy
    seed: Tensor  # [N], of the sampling noise
    cut: Tensor  # fp32 [N, 3], top_k, top_p and min_p of what may be sampled
    drafts: Tensor  # [N, D], guesses at the tokens after the committed ones, for methods that verify guesses
    drafted: Tensor  # [N], how many of them there are
    groups: Tensor  # [N], bit j: whether masks stand behind draft j, where a method leaves some of them out, or all
    draft_cached: Tensor  # [N], `cached` of the draft model
    window: Tensor  # [N], tokens that a forward settles at most, where a method lets rows differ
    verified: Tensor  # bool [N], whether guesses are checked before they count, likewise
    cache: RaggedCache = field(default_factory=RaggedCache)
    draft_cache: RaggedCache = field(default_factory=RaggedCache)  # of the draft model
    prefill_positions: int = PREFILL_POSITIONS  # of a prompt in one forward, at most
    extent: Extent = field(default_factory=Extent)  # until it is measured
    fixed: bool = False  # whether `extent` is a bound that was set once, and nothing is to be measured

    def __len__(self) -> int:
        return len(self.length)

    def tensors(self) -> dict[str, Tensor]:
        return {name: values for name, values in vars(self).items() if isinstance(values, Tensor)}

    @property
    def caches(self) -> tuple[RaggedCache, RaggedCache]:
        return self.cache, self.draft_cache

    def measure(self) -> None:
        """Bring `extent` up to date where rows have come, gone or turned."""
        if self.fixed:
            return
        # Without a threshold, what is needed is infinite: + for one token per forward, - for all drafts.
        cut = (self.cut[:, 0] > 0) | (self.cut[:, 1] < 1) | (self.cut[:, 2] > 0)
        options = torch.stack([self.needed.isfinite().any(), (self.temperature > 0).any(), cut.any()]).tolist()
        self.extent = self.extent._replace(thresholded=options[0], sampled=options[1], cut=options[2])
        self.measure_step()

    def measure_step(self, *others: Tensor) -> list[int]:
        """Bring `extent` up to date after a step; `others` (integers) travel along: the device is read only once."""
        # The host finds what is largest: on the device that would be two dozen small operations before every step.
        each = self.length, self.cached, self.draft_cached, self.end, self.drafted, self.window, self.groups
        numbers: list[int] = torch.cat([*each, *(other.flatten() for other in others)]).tolist()
        of_each = (numbers[at * len(self) : (at + 1) * len(self)] for at in range(len(each)))
        length, cached, draft_cached, end, drafted, windows, groups = of_each
        pending, draft_pending = [*map(sub, length, cached)], [max(1, each) for each in map(sub, length, draft_cached)]
        room, level = [*map(sub, end, length)], min(pending) == max(pending)
        self.extent = self.extent._replace(
            pending=max(pending), drafted=max(drafted), length=max(length), level=level,
            even=level and min(drafted) == max(drafted), draft_pending=max(draft_pending),
            draft_level=min(draft_pending) == max(draft_pending), room=(max(room), min(room)),
            windows=(max(windows), min(windows)), groups=(max(groups), min(groups)),
        )  # fmt: skip
        return numbers[len(each) * len(self) :]

    def turn(self, knobs: Mapping[int, tuple[float, int, bool]]) -> None:
        """Change how some rows decode: row -> the confidence to pass, its window, whether its guesses are checked."""
        for row, (needed, window, verified) in knobs.items():
            self.needed[row], self.window[row] = needed, window
            if not verified:  # drafts would not be checked
                self.drafted[row] *= ~self.verified[row]
            self.verified[row] = verified
        self.measure()

    def take(self, chosen: Tensor, columns: int) -> None:
        """Keep the rows `chosen` (indices), in that order, and so many columns of tokens, the last a spare one."""
        self.tokens, self.settled_by = self.tokens[:, :columns], self.settled_by[:, :columns]
        for name, values in self.tensors().items():
            setattr(self, name, values[chosen])
        self.measure()

    def extend(self, *others: "Rows") -> None:
        """Put the rows of other batches behind the own ones; the others must not be used any more."""
        every = (self, *others)
        for rows in every:
            rows.settled_by[:, -1] = EMPTY  # the spare column of a narrower batch becomes an ordinary one
        try:
            joined = {name: _stacked([getattr(rows, name) for rows in every]) for name in self.tensors()}
            for cache, *more in zip(*(rows.caches for rows in every), strict=True):
                cache.extend(*more)
        except BaseException:  # there was no memory for them
            for cache in self.caches:
                cache.keep(len(self), self.extent.length)
            raise
        for name, values in joined.items():
            setattr(self, name, values)
        self.measure()

    def choose(self, logits: Tensor, position: Tensor) -> Tensor:
        """The token at each position [N, K], greedy or sampled as the row wants, from logits [N, K, V]."""
        if not self.extent.sampled:
            return logits.max(-1).indices  # the first of equals, like argmax, and several times as fast on a CPU
        return choose(logits, position, self.temperature, self.seed, self.cut if self.extent.cut else None)


def _stacked(parts: list[Tensor]) -> Tensor:
    """[N, T] over [M, U] and so on as [N + M + ..., max(T, U, ...)], filled up with zeros."""
    if parts[0].dim() == 1:
        return torch.cat(parts)
    width = max(part.shape[1] for part in parts)
    return torch.cat([F.pad(part, (0, width - part.shape[1])) for part in parts])


class Accepted(NamedTuple):
    """The tokens that a forward settled: K candidates a row, of which `chosen` are committed."""

    ids: Tensor  # [N, K]
    position: Tensor  # [N, K]
    chosen: Tensor  # bool [N, K]
    advance: Tensor  # [N], tokens by which the row's gapless beginning grows, at most K
    kept: Tensor  # [N], leading entries of the window that stay in the cache
    in_order: bool = False  # whether they follow the committed tokens without a gap
    drafted: Tensor | None = None  # [N], how many earlier guesses were verified; None = the method guesses nothing

    def last(self) -> Tensor:
        return self.ids.gather(1, self.advance.unsqueeze(1) - 1).squeeze(1)

    @classmethod
    def leading(cls, rows: Rows, ids: Tensor, count: Tensor, kept: Tensor) -> "Accepted":
        """The first `count` [N] of the candidates `ids` [N, K] that follow the committed tokens."""
        offset = torch.arange(ids.shape[1], device=ids.device)
        return cls(ids, rows.length.unsqueeze(1) + offset, offset < count.unsqueeze(1), count, kept, True, rows.drafted)
