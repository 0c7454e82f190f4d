"""Verdicts on claims, their p values, Holm's correction, and how many seeds or questions would decide an open one.

All of them ask how far the interval reaches from its value towards a bound, so a p agrees with its verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf, isfinite, log10
from typing import Literal

from marsbench.statistics.intervals import LEVEL, Estimate, Interval, reach

SIGNIFICANT = 1 - LEVEL
MOST_SEEDS = 50  # the most that a page recommends
MOST_TIMES = 100.0  # as many questions, the most that a page recommends
SMALLEST_P = 1e-9  # smaller ones are printed as this

Verdict = Literal["supported", "not supported", "significantly worse", "inconclusive", "moot", "not run"]


@dataclass(frozen=True)
class Bound:
    """Between which values an effect is claimed to lie, in its unit; on a side without a bound it may be anything."""

    low: float = -inf
    high: float = inf
    closed: bool = False  # whether the bounds themselves are what is claimed

    def verdict(self, interval: Interval) -> Verdict:
        """Both "supported" and "not supported" need an interval that lies wholly on one side of every bound.

        Where a loss up to a margin is allowed and the interval holds the margin, it may still lie below 0 as a whole.
        """
        inside = self.low < interval.low and interval.high < self.high
        if inside or (self.closed and self.low <= interval.low and interval.high <= self.high):
            return "supported"
        if interval.high < self.low or self.high < interval.low:
            return "not supported"
        return "significantly worse" if self.is_non_inferiority and interval.high < 0 else "inconclusive"

    @classmethod
    def losing_less_than(cls, margin: float) -> Bound:
        """Non-inferiority: worse by less than a margin, in the effect's unit."""
        if margin < 0:
            raise ValueError(f"a negative margin: {margin}")
        return cls(low=0.0 - margin)  # no -0.0

    @property
    def is_non_inferiority(self) -> bool:
        """Whether a loss up to a margin is allowed."""
        return self.low < 0 and self.high == inf


@dataclass(frozen=True)
class Evidence:
    """What an interval over seeds is made of, see `over_seeds`, and the bound that it is held against."""

    pooled: Estimate  # of all seeds' answers, with the 95 % interval for the draw of questions alone
    seeds: tuple[float, ...]  # the value of each seed alone
    bound: Bound

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """How far each bound in question lies from the value, and the 95 % interval of the questions reaches to it."""
        value, limits, bound = self.pooled.value, self.pooled.interval, self.bound
        below, above = value - limits.low, limits.high - value
        if value < bound.low:
            return [(bound.low - value, above)]
        if value > bound.high:
            return [(value - bound.high, below)]
        return [gap for gap in ((value - bound.low, below), (bound.high - value, above)) if isfinite(gap[0])]

    def decided(self, *, level: float = LEVEL, count: int = 0, times: float = 1.0) -> bool:
        """Whether the interval at a level, of so many seeds and times as many questions, leaves the bounds out."""
        reached = [(gap, reach(side, self.seeds, level=level, count=count, times=times)) for gap, side in self.gaps]
        return all(far < gap or (self.bound.closed and far == gap) for gap, far in reached)

    @property
    def at_bound(self) -> bool:
        """Whether the effect is the bound itself, so that no interval around it will leave it out."""
        return not self.bound.closed and any(gap == 0 for gap, _ in self.gaps)


def p_value(evidence: Evidence) -> float:
    """Two-sided: 1 minus the highest level at which the interval still decides, so p < .05 where the verdict does.

    One bound and one seed make this the p of the normal law; without noise in the questions it is Student's.
    """
    from scipy import optimize

    if evidence.at_bound or not all(isfinite(side) for _, side in evidence.gaps):
        return 1.0
    if evidence.decided(level=1 - SMALLEST_P):
        return SMALLEST_P

    def beyond(log_p: float) -> float:
        """How far the interval reaches beyond the bound that is hardest to leave out."""
        return max(reach(side, evidence.seeds, level=1 - 10**log_p) - gap for gap, side in evidence.gaps)

    return float(10 ** optimize.brentq(beyond, log10(SMALLEST_P), 0.0, xtol=1e-13))


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
    training = reach(0.0, evidence.seeds, count=count)
    return max([1.0, *[side**2 / (gap**2 - training**2) for gap, side in evidence.gaps]])
