"""The position law: a step costs what its positions cost, however rows and windows share them.

So the fastest window for a batch size follows from two measurements that need no race: what a step costs by its
positions on this machine, and how many forwards each prompt takes with each window, which no batch size changes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from marsbench.rows.kinds import StepTimeRow, SweepRow


@dataclass(frozen=True)
class PositionLaw:
    """Seconds of a step at some numbers of positions, ascending."""

    positions: Sequence[int]
    seconds: Sequence[float]

    def seconds_at(self, positions: float) -> float:
        """Seconds of a step: between two measured numbers of positions along a line, beyond the last in proportion."""
        if positions > self.positions[-1]:
            return self.seconds[-1] * positions / self.positions[-1]
        if positions <= self.positions[0]:
            return self.seconds[0]
        above = bisect_left(self.positions, positions)  # np.interp takes five times as long, and a server asks often
        (left, right), (low, high) = self.positions[above - 1 : above + 1], self.seconds[above - 1 : above + 1]
        return low + (high - low) / (right - left) * (positions - left)

    def positions_at(self, factor: float) -> float | None:
        """From where on a step takes `factor` times as long as over one position; None if not within the measured."""
        limit = factor * self.seconds[0]
        above = [place for place, seconds in enumerate(self.seconds) if seconds > limit]
        if not above:
            return None
        place = above[0]
        return float(np.interp(limit, self.seconds[place - 1 : place + 1], self.positions[place - 1 : place + 1]))


def position_law(times: StepTimeRow) -> PositionLaw:
    return law_of(times.rows, times.window, times.seconds)


def law_of(rows: Sequence[int], windows: Sequence[int], seconds: Sequence[Sequence[float]]) -> PositionLaw:
    """The law of a machine from steps of some shapes: the median over repeats, and over shapes of as many positions."""
    from scipy.optimize import isotonic_regression

    found: dict[int, list[float]] = {}
    for count, window, repeats in zip(rows, windows, seconds, strict=True):
        found.setdefault(count * window, []).append(median(repeats))
    known = sorted(found)
    # More positions never cost less: where they seem to, that is noise.
    smooth = isotonic_regression([median(found[count]) for count in known])
    return PositionLaw(known, [float(value) for value in smooth.x])


@dataclass(frozen=True)
class Work:
    """What decoding some prompts by one method takes, whatever the batch size."""

    emitted: int
    row_forwards: Sequence[int]  # per prompt, its own forward included
    positions: int  # entries of all windows
    prompt_positions: int  # tokens of all prompts

    @classmethod
    def of(cls, row: SweepRow) -> Work:
        return cls(sum(row.emitted), row.row_forwards, row.positions, row.prompt_positions)

    @property
    def window(self) -> float:
        """Mean width of a row's window."""
        return self.positions / max(sum(self.row_forwards) - len(self.row_forwards), 1)


def predicted_seconds(law: PositionLaw, work: Work, batch_size: int) -> float:
    """Seconds that the work takes at a batch size; rows that are done leave their batch, whose steps become smaller."""
    prompts, prompt = len(work.row_forwards), work.prompt_positions / len(work.row_forwards)
    seconds = 0.0
    for first in range(0, prompts, batch_size):
        steps = np.asarray(work.row_forwards[first : first + batch_size]) - 1  # the prompt's forward comes on top
        alive = [int((steps > number).sum()) for number in range(int(steps.max()))]
        seconds += law.seconds_at(prompt * len(steps)) + sum(law.seconds_at(rows * work.window) for rows in alive)
    return seconds


def predicted_speed(law: PositionLaw, work: Work, batch_size: int) -> float:
    """Tokens per second that the law expects."""
    return work.emitted / predicted_seconds(law, work, batch_size)


def fastest(law: PositionLaw, known: Mapping[str, Work], batch_size: int) -> str:
    """The contender that the law expects to be fastest at a batch size."""
    return max(known, key=lambda name: predicted_speed(law, known[name], batch_size))
