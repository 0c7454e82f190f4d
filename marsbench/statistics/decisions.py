"""What an interval says of a bound, the p value of that, and what is left of it among many tests."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite, log10
from typing import Literal

from marsbench.statistics.intervals import LEVEL, Estimate, Interval, reach

SIGNIFICANT = 1 - LEVEL
SMALLEST_P = 1e-9  # a p below it is shown as this

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


def p_value(pooled: Estimate, seeds: Sequence[float], bound: Bound) -> float:
    """Two-sided: 1 minus the highest level at which the interval of `over_seeds` still decides.

    One bound and one seed make this the p of the normal law; without noise in the questions it is Student's.
    """
    from scipy import optimize

    value, below, above = pooled.value, pooled.value - pooled.interval.low, pooled.interval.high - pooled.value
    # How far each bound in question lies from the value, and the 95 % interval of the questions reaches to it.
    if value < bound.low:
        gaps = [(bound.low - value, above)]
    elif value > bound.high:
        gaps = [(value - bound.high, below)]
    else:
        gaps = [gap for gap in ((value - bound.low, below), (bound.high - value, above)) if isfinite(gap[0])]
    # Where the effect is the bound itself, no interval around it will leave it out.
    if not all(isfinite(side) for _, side in gaps) or (not bound.closed and any(gap == 0 for gap, _ in gaps)):
        return 1.0

    def beyond(log_p: float) -> float:
        """How far the interval reaches beyond the bound that is hardest to leave out."""
        return max((reach(side, seeds, level=1 - 10**log_p) - gap for gap, side in gaps), default=-inf)

    at_widest = beyond(log10(SMALLEST_P))
    if at_widest < 0 or (bound.closed and at_widest == 0):
        return SMALLEST_P
    return float(10 ** optimize.brentq(beyond, log10(SMALLEST_P), 0.0, xtol=1e-13))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's (1979) adjusted p values, in the order given: those below .05 hold together, all but one time in 20.

    The smallest p is multiplied by the number of tests, the next by one less, and so on; none falls below its smaller.
    """
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = largest
    return adjusted
