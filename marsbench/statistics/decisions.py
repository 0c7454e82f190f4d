"""What a verdict is worth: its p, what is left of it among many others, and what it would take where it is open.

All three ask the interval that the verdict comes from, at another level or with other numbers of seeds and questions,
so that they cannot say anything else than it does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, log10

from marsbench.statistics.intervals import LEVEL, Estimate, Interval, Verdict, over_seeds

SIGNIFICANT = 1 - LEVEL
MOST_SEEDS = 50  # that anyone is told to train
MOST_TIMES = 100.0  # as many questions that anyone is told to ask
SMALLEST_P = 1e-9  # below which nobody asks how small a p is
_STEPS = 50  # of halving an interval

Decide = Callable[[Interval], Verdict]


@dataclass(frozen=True)
class Evidence:
    """What an interval over seeds is made of, see `over_seeds`, and the verdict that is drawn from such intervals."""

    pooled: Estimate  # of all seeds' answers, with the 95 % interval for the draw of questions alone
    seeds: tuple[float, ...]  # the value of each seed alone
    decide: Decide

    def decided(self, *, level: float = LEVEL, count: int = 0, times: float = 1.0) -> bool:
        """Whether the interval at a level, of so many seeds and times as many questions, leaves the bound out."""
        estimate = over_seeds(self.pooled, self.seeds, level=level, count=count, times=times)
        return self.decide(estimate.interval) != "inconclusive"

    @property
    def at_bound(self) -> bool:
        """Whether the effect is the bound itself, so that no interval around it will leave it out."""
        return self.decide(Interval(self.pooled.value, self.pooled.value)) == "inconclusive"


def p_value(evidence: Evidence) -> float:
    """Two-sided: 1 minus the highest level at which the interval still decides, so p < .05 where the verdict does.

    One bound and one seed make this the p of the normal law; without noise in the questions it is Student's.
    """
    low, high = log10(SMALLEST_P), 0.0
    if evidence.decided(level=1 - SMALLEST_P):
        return SMALLEST_P
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if evidence.decided(level=1 - 10**middle) else (middle, high)
    return float(10.0**high)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's (1979) adjusted p values, in the order given: those below .05 hold together, all but one time in 20.

    The smallest p is multiplied by the number of tests, the next by one less, and so on; none falls below the one
    before it.
    """
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = largest
    return adjusted


@dataclass(frozen=True)
class Needed:
    """What would decide a claim if its effect and its scatter are as measured; 0 where that alone would not."""

    seeds: int = 0  # with the questions that there are
    questions: int = 0  # with the seeds that there are
    both: tuple[int, int] = (0, 0)  # seeds and questions, where neither alone would do
    at_bound: bool = False
    scatter: bool = True  # whether more than one seed says how they scatter


def needed(evidence: Evidence) -> Needed:
    """From how many seeds, or questions, or both, the interval would leave the bound out."""
    if evidence.at_bound:
        return Needed(at_bound=True)
    n, known = evidence.pooled.n, len(evidence.seeds)
    seeds = _seeds(evidence, 1.0) if known > 1 else 0
    times = _times(evidence, known)
    if seeds or times or known == 1:
        return Needed(seeds, ceil(times * n), scatter=known > 1)
    most = _seeds(evidence, MOST_TIMES)
    # The seeds' part shrinks with half of the seeds as well as with all; twice the fewest leaves questions room.
    count = min(2 * most, MOST_SEEDS) if most else 0
    return Needed(both=(count, ceil(_times(evidence, count) * n)) if count else (0, 0))


def _seeds(evidence: Evidence, times: float) -> int:
    """The fewest seeds that decide with so many times as many questions; 0 = more than anyone trains."""
    more = range(len(evidence.seeds) + 1, MOST_SEEDS + 1)
    return next((count for count in more if evidence.decided(count=count, times=times)), 0)


def _times(evidence: Evidence, count: int) -> float:
    """How many times as many questions decide with so many seeds; 0 = more than anyone asks."""
    if not evidence.decided(count=count, times=MOST_TIMES):
        return 0.0
    low, high = 1.0, MOST_TIMES
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if evidence.decided(count=count, times=middle) else (middle, high)
    return high
