"""What an interval says of a bound, the p value of that, and what is left of it among many tests.

All of it asks how far the interval reaches from its value towards a bound, at its own level or another, so that a p
value can say nothing else than the interval does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite, log10
from typing import Literal

from marsbench.statistics.intervals import LEVEL, Estimate, Interval, reach

SIGNIFICANT = 1 - LEVEL
SMALLEST_P = 1e-9  # below which nobody asks how small a p is

Verdict = Literal["holds", "does not hold", "open", "not run"]


@dataclass(frozen=True)
class Bound:
    """Between which values an effect is claimed to lie, in its unit; on a side without a bound it may be anything."""

    low: float = -inf
    high: float = inf
    closed: bool = False  # whether the bounds themselves are what is claimed

    def verdict(self, interval: Interval) -> Verdict:
        """Both "holds" and "does not hold" need an interval that lies wholly on one side of every bound."""
        inside = self.low < interval.low and interval.high < self.high
        if inside or (self.closed and self.low <= interval.low and interval.high <= self.high):
            return "holds"
        return "does not hold" if interval.high < self.low or self.high < interval.low else "open"

    @classmethod
    def losing_less_than(cls, margin: float) -> "Bound":
        """Non-inferiority: worse by less than a margin, in the effect's unit."""
        if margin < 0:
            raise ValueError(f"a negative margin: {margin}")
        return cls(low=0.0 - margin)  # no -0.0


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

    def decided(self, *, level: float = LEVEL) -> bool:
        reached = [(gap, reach(side, self.seeds, level=level)) for gap, side in self.gaps]
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
