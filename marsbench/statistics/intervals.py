"""Point estimates and 95 % intervals for questions that every line answered; all of it is deterministic.

- One benchmark gets an interval that stays honest near 0 and 1 and for few questions: Wilson's for an accuracy, Bonett
  and Price's (2012) for a paired difference. The plain normal interval would have zero width where no question
  separates two lines, and four questions would seem to prove that the lines are equal.
- Benchmarks weigh the same, as in the paper, large or small. The interval of their mean adds the squared distances from
  estimate to limit, on each side apart ("MOVER", Zou and Donner 2008).

Intervals cover the draw of questions only. `over_seeds` widens one to cover the luck of training as well: of several
seeds, a question's answer is the share of them that were right.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import hypot, inf, sqrt

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.95
# `scipy.stats.norm.ppf((1 + LEVEL) / 2)`. scipy is imported where it is used: that takes longer than most commands.
QUANTILE = 1.959963984540054
BOOTSTRAP_SEED = 0
RESAMPLES = 1000
_POSITIONS = 51  # at which two curves are compared, evenly over the tokens per forward pass that both reach

_Values = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A 95 % interval in the unit of its estimate; unbounded where a single value shows no spread."""

    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half the distance between the limits: what stands behind "±"."""
        return (self.high - self.low) / 2


@dataclass(frozen=True)
class Estimate:
    """A value with its interval, and how many observations (questions, repeats) it rests on."""

    value: float
    interval: Interval
    n: int

    def times(self, factor: float) -> "Estimate":
        """In another unit: 100 makes points of fractions."""
        return Estimate(factor * self.value, Interval(factor * self.interval.low, factor * self.interval.high), self.n)


@dataclass(frozen=True)
class Answers:
    """One line's answers on one benchmark, with one entry per question, in the benchmark's order."""

    correct: Sequence[float]  # 0 or 1, or of several seeds the share that were right
    emitted: Sequence[int]  # tokens
    forwards: Sequence[float]


def accuracy(correct: Sequence[float]) -> Estimate:
    """The share of correct answers (0 or 1 each) on one benchmark, as a fraction, with Wilson's interval."""
    values = _shares(correct)
    if not np.isin(values, (0.0, 1.0)).all():
        raise ValueError("an answer that is neither 0 nor 1")
    return Estimate(float(np.mean(correct)), _wilson(int(values.sum()), len(values)), len(values))


@lru_cache(4096)  # pages show the same cells over and over
def _wilson(right: int, n: int) -> Interval:
    from scipy import stats

    return Interval(*map(float, stats.binomtest(right, n).proportion_ci(LEVEL, method="wilson")))


def mean_of_benchmarks(estimates: Sequence[Estimate]) -> Estimate:
    """The mean of independent estimates, each weighing the same; the interval by MOVER (see the module)."""
    if not estimates:
        raise ValueError("a mean of no benchmarks")
    value = float(np.mean([part.value for part in estimates]))
    below = sqrt(sum((part.value - part.interval.low) ** 2 for part in estimates)) / len(estimates)
    above = sqrt(sum((part.interval.high - part.value) ** 2 for part in estimates)) / len(estimates)
    return Estimate(value, Interval(value - below, value + above), sum(part.n for part in estimates))


def over_seeds(pooled: Estimate, seeds: Sequence[float]) -> Estimate:
    """What several training seeds say together, with an interval that covers the luck of training too.

    The interval of the pooled answers covers the draw of questions and the rest (crossed random effects); the standard
    error of the mean of `seeds`, the same estimate from each seed's answers alone, with Student's t, covers the effects
    of seeds and the rest. The two are added as in MOVER: rather too wide, as the rest counts twice.
    """
    if not seeds:
        raise ValueError("an estimate of no seeds")
    if len(seeds) == 1:
        return pooled
    below = reach(pooled.value - pooled.interval.low, seeds)
    above = reach(pooled.interval.high - pooled.value, seeds)
    return Estimate(pooled.value, Interval(pooled.value - below, pooled.value + above), pooled.n)


def reach(questions: float, seeds: Sequence[float], *, level: float = LEVEL) -> float:
    """How far such an interval reaches to a side where the 95 % interval of the pooled answers reaches `questions`."""
    from scipy import special

    training = 0.0
    if len(seeds) > 1:
        quantile = float(special.stdtrit(len(seeds) - 1, (1 + level) / 2))
        training = quantile * float(np.std(seeds, ddof=1)) / sqrt(len(seeds))
    drawn = 1.0 if level == LEVEL else float(special.ndtri((1 + level) / 2)) / QUANTILE
    return hypot(questions * drawn, training)


def difference(a: Estimate, b: Estimate) -> Estimate:
    """Estimate a minus an independent estimate b; the interval by MOVER (see the module)."""
    value = a.value - b.value
    below = hypot(a.value - a.interval.low, b.interval.high - b.value)
    above = hypot(a.interval.high - a.value, b.value - b.interval.low)
    return Estimate(value, Interval(value - below, value + above), min(a.n, b.n))


def ratio_of_totals(parts: Sequence[float], wholes: Sequence[float]) -> Estimate:
    """One sum over another, such as tokens over forward passes, each of an entry per question; by the delta method.

    Questions are what is drawn, so long answers weigh more.
    """
    return _around(*_ratio(parts, wholes))


def speed_difference(a: Answers, b: Answers) -> Estimate:
    """Tokens per forward pass of line a minus those of line b on the same questions of one benchmark."""
    (first, above_first), (second, above_second) = _ratio(a.emitted, a.forwards), _ratio(b.emitted, b.forwards)
    if len(above_first) != len(above_second):
        raise ValueError(f"{len(above_first)} and {len(above_second)} answers cannot be paired")
    return _around(first - second, above_first - above_second)


def _ratio(parts: Sequence[float], wholes: Sequence[float]) -> tuple[float, _Values]:
    """A ratio of totals, and what each question moves it by, times the number of questions; these sum to zero."""
    above, below = np.asarray(parts, dtype=float), np.asarray(wholes, dtype=float)
    if len(above) != len(below) or not len(above) or below.min() <= 0:
        raise ValueError(f"no ratio of {len(above)} values to {len(below)} values above 0")
    ratio = float(above.sum() / below.sum())
    return ratio, (above - ratio * below) / below.mean()


def _around(value: float, residuals: _Values) -> Estimate:
    n = len(residuals)
    half = QUANTILE * float(np.std(residuals, ddof=1)) / sqrt(n) if n > 1 else inf
    return Estimate(value, Interval(value - half, value + half), n)


def paired_difference(a: Mapping[str, Sequence[float]], b: Mapping[str, Sequence[float]]) -> Estimate:
    """Points by which line a is more accurate than b, benchmarks weighing the same; benchmark -> 0 to 1 a question."""
    if set(a) != set(b):
        raise ValueError(f"not the same benchmarks: {sorted(a)} and {sorted(b)}")
    gains = [_paired_gains(name, a[name], b[name]) for name in sorted(a)]
    return mean_of_benchmarks([_mean_gain(gain) for gain in gains]).times(100)


def mcnemar(a: Sequence[float], b: Sequence[float]) -> tuple[int, int, float]:
    """How many questions each of two lines alone (of several seeds, more often) gets right, and McNemar's exact p."""
    from scipy import stats

    gains = _paired_gains("two lines", a, b)
    only_a, only_b = int((gains > 0).sum()), int((gains < 0).sum())
    # No discordant question is no evidence at all, and a binomial test of nothing is undefined.
    p_value = float(stats.binomtest(only_a, only_a + only_b).pvalue) if only_a + only_b else 1.0
    return only_a, only_b, p_value


def gain_difference(
    first: tuple[Sequence[float], Sequence[float]], second: tuple[Sequence[float], Sequence[float]]
) -> Estimate:
    """How much more a gains over b, in `first`, than in `second`, as a fraction; on the same questions."""
    gains, others = _paired_gains("first pair", *first), _paired_gains("second pair", *second)
    if len(gains) != len(others):
        raise ValueError(f"{len(gains)} and {len(others)} answers cannot be paired")
    return _mean_gain(gains - others, largest=2.0)


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Estimate:
    """The median of the ratios of paired repeats; the interval by a bootstrap with a fixed seed."""
    if len(numerators) != len(denominators) or not numerators:
        raise ValueError(f"{len(numerators)} and {len(denominators)} values make no pairs")
    return _median(tuple(above / below for above, below in zip(numerators, denominators, strict=True)))


@lru_cache(4096)  # claims, tables and figures ask for the same laps
def _median(values: tuple[float, ...]) -> Estimate:
    from scipy import stats

    interval = Interval(-inf, inf)
    if len(values) > 1:
        generator = np.random.default_rng(BOOTSTRAP_SEED)
        drawn = stats.bootstrap((values,), np.median, confidence_level=LEVEL, method="percentile", rng=generator)
        interval = Interval(*map(float, drawn.confidence_interval))
    return Estimate(float(np.median(values)), interval, len(values))


@lru_cache(16)
def resamples(n: int) -> _Values:
    """How often each of n items is drawn in every resample of a bootstrap, with a fixed seed: [resamples, n]."""
    return np.random.default_rng(BOOTSTRAP_SEED).multinomial(n, np.full(n, 1 / n), RESAMPLES).astype(float)


def percentiles(values: _Values) -> Interval:
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(low), float(high))


def _paired_gains(benchmark: str, a: Sequence[float], b: Sequence[float]) -> _Values:
    """Per question 1 if only a is right, -1 if only b is, else 0; of several seeds, the mean of that."""
    if len(a) != len(b):
        raise ValueError(f"{benchmark}: {len(a)} and {len(b)} answers cannot be paired")
    return _shares(a) - _shares(b)


def _shares(correct: Sequence[float]) -> _Values:
    values = np.asarray(correct, dtype=float)
    if not len(values):
        raise ValueError("no answers")
    if values.min() < 0 or values.max() > 1:
        raise ValueError("an answer that is not from 0 to 1")
    return values


def _mean_gain(gains: _Values, largest: float = 1.0) -> Estimate:
    """The mean gain; Bonett and Price (2012) give each side one more question, of `largest`, and use the normal law."""
    n = len(gains)
    more = np.append(gains, [largest, -largest])
    centre = float(more.mean())
    half = QUANTILE * float(more.std()) / sqrt(n + 2)
    interval = Interval(max(centre - half, -largest), min(centre + half, largest))
    return Estimate(float(gains.mean()), interval, n)


# ---- curves of accuracy against tokens per forward pass: a point per threshold, straight lines between ----


def curve_advantage(a: Sequence[Answers], b: Sequence[Answers]) -> Estimate:
    """How much more accurate curve a is than curve b where both emit equally many tokens per forward pass.

    A curve has an entry per threshold, in any order, all on the same questions. It is the mean over the tokens per
    forward pass that both reach, as a fraction; the interval is a bootstrap over questions with a fixed seed.
    """
    counts = {len(values) for point in (*a, *b) for values in (point.correct, point.emitted, point.forwards)}
    if not a or not b or len(counts) != 1 or 0 in counts:
        raise ValueError(f"curves of {len(a)} and {len(b)} points with {sorted(counts)} answers cannot be compared")
    (n,) = counts
    value = float(_gap(_points(a, np.ones((n, 1))), _points(b, np.ones((n, 1))))[0])
    # Two more questions, one that only a gets right and one that only b does, as in every paired interval of ours:
    # without them, questions that separate no two points would prove the curves equal.
    draws = resamples(n + 2).T
    gaps = _gap(_points(a, draws, extra=(1.0, 0.0)), _points(b, draws, extra=(0.0, 1.0)))
    return Estimate(value, percentiles(gaps), n)


def points_gap(a: Sequence[tuple[float, float]], b: Sequence[tuple[float, float]]) -> float:
    """The mean from points (tokens per forward pass, accuracy) alone, in the unit of the accuracies."""
    return float(_gap(*(np.array(points, dtype=float).T[..., None] for points in (a, b)))[0])


def _points(curve: Sequence[Answers], draws: NDArray[np.generic], extra: tuple[float, ...] = ()) -> _Values:
    """Tokens per forward pass and accuracy of each point in each draw of questions: [2, points, draws].

    `draws` says how often each question is drawn, [questions, draws]; `extra` whether further, made-up questions are
    answered correctly, which cost what the mean question does.
    """
    points = []
    for point in curve:
        both = point.emitted, point.forwards
        emitted, forwards = (np.array([*counts, *[np.mean(counts)] * len(extra)]) for counts in both)
        correct = np.array([*point.correct, *extra])
        points.append([(emitted @ draws) / (forwards @ draws), (correct @ draws) / draws.sum(0)])
    return np.array(points).swapaxes(0, 1)


def _gap(a: _Values, b: _Values) -> _Values:
    """The mean height of curve a over curve b in each draw; both are [2, points, draws]."""
    low = np.maximum(a[0].min(0), b[0].min(0))
    positions = np.linspace(low, np.maximum(low, np.minimum(a[0].max(0), b[0].max(0))), _POSITIONS)
    return np.asarray((_heights(a, positions) - _heights(b, positions)).mean(0))


def _heights(curve: _Values, at: _Values) -> _Values:
    """Height of a curve [2, points, draws] at positions [positions, draws]; flat before the first point, and behind."""
    x, y = np.take_along_axis(curve, np.argsort(curve[:1], axis=1, kind="stable"), axis=1)
    return np.stack([np.interp(*of_draw) for of_draw in zip(at.T, x.T, y.T, strict=True)], axis=-1)
