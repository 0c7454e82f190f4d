"""The position law: a step costs what its positions cost, however rows and windows share them.

So the fastest window for a batch size follows from two measurements that need no race: what a step costs by its
positions on this machine, and how many forwards each prompt takes with each window, which no batch size changes.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from statistics import median

import numpy as np

WIDEST = 16  # window that is looked at
ACCEPTANCE = 0.6  # how often a draft is right, where no record says it
_GAIN = 1.05  # in tokens per second, that a window must promise over `ar`


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


def law_of(rows: Sequence[int], windows: Sequence[int], seconds: Sequence[Sequence[float]]) -> PositionLaw:
    """The law of a machine from steps of some shapes: the median over repeats, and over shapes of as many positions."""
    from scipy.optimize import isotonic_regression

    by_positions: dict[int, list[float]] = {}
    for count, window, repeats in zip(rows, windows, seconds, strict=True):
        by_positions.setdefault(count * window, []).append(median(repeats))
    known = sorted(by_positions)
    # More positions never cost less: where they seem to, that is noise.
    smooth = isotonic_regression([median(by_positions[count]) for count in known])
    return PositionLaw(known, [float(value) for value in smooth.x])


def windows_by_rows(law: PositionLaw, rows: int, widest: int, acceptance: Sequence[float]) -> tuple[int, ...]:
    """The fastest window (1: `ar`) for 1 row, 2, ... `rows`, in a line; `acceptance` of drafts goes by place."""
    windows, rates = list[int](), [*acceptance, *[acceptance[-1]] * widest]
    for count in range(1, rows + 1):
        speeds = [1.0 / law.seconds_at(count)]
        for window in range(2, min([widest, *windows]) + 1):
            tokens = sum(accumulate(rates[: window - 1], mul, initial=1.0))  # that one forward settles
            # The last token, the drafts that it brought along, and the masks behind them.
            speeds.append(tokens / law.seconds_at(count * (tokens + window - 1)))
        pays = max(speeds) >= _GAIN * speeds[0]
        windows.append(speeds.index(max(speeds)) + 1 if pays else 1)
    return tuple(windows)


def in_words(windows: Sequence[int]) -> str:
    """A table of windows by rows: "up to 2 rows 4 tokens, up to 4 rows 3 tokens, above ar"."""
    wider = sorted({*windows} - {1}, reverse=True)
    parts = [f"up to {sum(each >= window for each in windows)} rows {window} tokens" for window in wider]
    return ", ".join([*parts, "above ar"] if parts else ["ar at any number of rows"])


@dataclass(frozen=True)
class Work:
    emitted: int
    row_forwards: Sequence[int]  # per prompt, its own forward included
    positions: int  # entries of all windows
    prompt_positions: int  # tokens of all prompts

    @property
    def window(self) -> float:
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
