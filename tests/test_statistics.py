"""Estimates, intervals and verdicts: against values worked by hand, and against scipy."""

from collections.abc import Callable
from math import inf, isclose, isfinite

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from marsbench.statistics.decisions import SIGNIFICANT, Bound, holm, p_value
from marsbench.statistics.intervals import (
    LEVEL,
    QUANTILE,
    Answers,
    Estimate,
    Interval,
    accuracy,
    curve_advantage,
    difference,
    gain_difference,
    mcnemar,
    mean_of_benchmarks,
    median_ratio,
    over_seeds,
    paired_difference,
    points_gap,
    ratio_of_totals,
    speed_difference,
)

PAIRS = st.lists(st.tuples(st.sampled_from([0.0, 1.0]), st.sampled_from([0.0, 1.0])), min_size=1, max_size=40)
ARMS = st.dictionaries(st.sampled_from(["gpqa", "bbh", "gsm8k"]), PAIRS, min_size=1)


def outcomes(ones: int, zeros: int) -> list[float]:
    return [1.0] * ones + [0.0] * zeros


def test_wilson_interval_and_means_by_hand() -> None:
    """Guards against another quantile, interval or level behind cells' ±, questions pooled, half-widths summed."""
    assert float(stats.norm.ppf((1 + LEVEL) / 2)) == QUANTILE
    share, n, z = 0.8, 50, QUANTILE
    centre = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z * ((share * (1 - share) + z**2 / (4 * n)) / n) ** 0.5 / (1 + z**2 / n)
    interval = accuracy(outcomes(40, 10)).interval
    assert isclose(interval.low, centre - half) and isclose(interval.high, centre + half)
    assert isclose(interval.half_width, half)
    mean = mean_of_benchmarks([accuracy(outcomes(5, 5)), accuracy(outcomes(100, 900))])
    assert isclose(mean.value, 0.3) and mean.n == 1010
    alone = accuracy(outcomes(7, 3))
    interval = mean_of_benchmarks([alone]).interval
    assert isclose(interval.low, alone.interval.low) and isclose(interval.high, alone.interval.high), "of one benchmark"
    parts = [Estimate(0.5, Interval(0.2, 0.6), 10), Estimate(0.7, Interval(0.3, 0.7), 10)]
    mean = mean_of_benchmarks(parts)
    assert isclose(mean.interval.low, 0.6 - 0.25)  # sqrt(0.3**2 + 0.4**2) / 2
    assert isclose(mean.interval.high, 0.65)  # sqrt(0.1**2 + 0) / 2


def test_paired_difference_by_hand() -> None:
    """Guards against lost concordant questions, fractions for points, equality without evidence, rounded shares."""
    a, b = [*outcomes(6, 2), 1.0, 1.0], [*outcomes(0, 6), 1.0, 1.0, 0.0, 1.0]
    gap, (only_a, only_b, p_value) = paired_difference({"bbh": a}, {"bbh": b}), mcnemar(a, b)
    # a alone is right on the first six and the ninth, b alone on the seventh and the eighth
    assert (only_a, only_b, gap.n) == (7, 2, 10)
    assert isclose(gap.value, 50.0)
    assert isclose(p_value, stats.binomtest(7, 9).pvalue)
    centre, half = 5 / 12, QUANTILE * ((8 / 12 + 3 / 12 - (5 / 12) ** 2) / 12) ** 0.5
    assert isclose(gap.interval.low, 100 * (centre - half)) and isclose(gap.interval.high, 100 * (centre + half))
    same = {"gsm8k": outcomes(2, 2)}
    gap = paired_difference(same, same)
    assert gap.value == 0 and mcnemar(same["gsm8k"], same["gsm8k"])[2] == 1
    assert Bound(low=-2.0).verdict(gap.interval) == "open"
    a = {"bbh": outcomes(3, 1), "gpqa": outcomes(1, 4)}
    b = {"gpqa": outcomes(2, 3), "bbh": outcomes(0, 4)}
    assert isclose(paired_difference(a, b).value, 100 * (0.75 - 0.2) / 2)
    a, b = [2 / 3, 1.0, 0.0, 1 / 3], [1 / 3, 1.0, 1 / 3, 0.0]
    gap = paired_difference({"bbh": a}, {"bbh": b})
    assert isclose(gap.value, 100 * (1 / 3 - 1 / 3 + 1 / 3) / 4)
    assert mcnemar(a, b) == (2, 1, 1.0)


@given(ARMS)
def test_intervals_hold_their_estimate_and_mirror(answers: dict[str, list[tuple[float, float]]]) -> None:
    """Guards against a sign slip that favours the first arm, and limits that miss their estimate where all is right."""
    a, b = ({name: [pair[arm] for pair in pairs] for name, pairs in answers.items()} for arm in (0, 1))
    mean = mean_of_benchmarks([*map(accuracy, a.values())])
    there, back = paired_difference(a, b), paired_difference(b, a)
    assert isclose(there.value, -back.value, abs_tol=1e-9)
    assert isclose(there.interval.low, -back.interval.high, abs_tol=1e-9)
    assert there.interval.low < there.value + 1e-9 < there.interval.high + 2e-9 and there.interval.half_width > 0
    assert -1e-9 <= mean.interval.low <= mean.value + 1e-9 <= mean.interval.high + 2e-9 <= 1 + 3e-9
    for first, second in zip(a.values(), b.values(), strict=True):
        (only_a, only_b, p_value), (back_a, back_b, p_back) = mcnemar(first, second), mcnemar(second, first)
        assert (only_a, only_b) == (back_b, back_a) and isclose(p_value, p_back)


MORE, NO_LOSS, ONE = Bound(low=0.0), Bound(low=-2.0), Bound(1.0, 1.0, closed=True)
ABOUT_TWICE, BELOW = Bound(1.5, 2.5), Bound(high=1.1)
VERDICTS = {
    "holds": [
        (MORE, 0.1, 3.0), (NO_LOSS, 0.1, 3.0), (NO_LOSS, -1.0, 3.0), (NO_LOSS, -1.5, -0.5), (ONE, 1.0, 1.0),
        (ABOUT_TWICE, 1.8, 2.2), (BELOW, 0.9, 1.0),
    ],
    "open": [
        (MORE, -1.0, 3.0), (MORE, -3.0, 1.0), (MORE, 0.0, 1.0), (MORE, -1.0, 0.0), (NO_LOSS, -3.0, 1.0),
        (NO_LOSS, -4.0, -1.0), (ONE, 0.9, 1.1), (ABOUT_TWICE, 1.4, 2.2), (ABOUT_TWICE, 1.8, 2.6),
        (ABOUT_TWICE, 1.0, 3.0), (BELOW, 1.05, 1.15),
    ],
    "does not hold": [
        (MORE, -1.5, -0.5), (MORE, -4.0, -1.0), (NO_LOSS, -4.0, -2.5), (ONE, 1.1, 1.1), (ONE, 0.9, 0.9),
        (ABOUT_TWICE, 1.0, 1.4), (ABOUT_TWICE, 2.6, 3.0), (BELOW, 1.2, 1.3),
    ],
}  # fmt: skip


@pytest.mark.parametrize("verdict", VERDICTS)
def test_verdicts(verdict: str) -> None:
    """Guards against missing evidence taken for a refutation, >= for "greater", and bounds judged by one limit."""
    for bound, low, high in VERDICTS[verdict]:
        assert bound.verdict(Interval(low, high)) == verdict, (bound, low, high)


REFUSED: dict[str, list[Callable[[], object]]] = {
    "answer": [lambda: accuracy([]), lambda: accuracy([0.5, 1.0]), lambda: accuracy([2.0])],
    "bbh: 2 and 1 answers cannot be paired": [lambda: paired_difference({"bbh": [1.0, 0.0]}, {"bbh": [1.0]})],
    "not the same benchmarks": [lambda: paired_difference({"bbh": [1.0]}, {"gpqa": [1.0]})],
    "no benchmarks": [lambda: paired_difference({}, {}), lambda: mean_of_benchmarks([])],
    "not from 0 to 1": [lambda: paired_difference({"bbh": [1.3]}, {"bbh": [1.0]})],
    "no ratio": [lambda: ratio_of_totals([], []), lambda: ratio_of_totals([3], [3, 4]),
                 lambda: ratio_of_totals([3], [0])],
    "3 and 2 answers cannot be paired": [
        lambda: speed_difference(Answers([1] * 3, [4, 8, 12], [2, 4, 6]), Answers([1] * 2, [3, 3], [2, 2])),
        lambda: gain_difference(([1.0, 0.0, 1.0],) * 2, ([1.0, 0.0],) * 2),
    ],
    "no seeds": [lambda: over_seeds(Estimate(0.5, Interval(0.2, 0.6), 10), [])],
    "cannot be compared": [lambda: curve_advantage(curve(0), curve(0, n=100))],
    "no pairs": [lambda: median_ratio([], []), lambda: median_ratio([1.0], [1.0, 2.0])],
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSED)
def test_what_has_no_number_is_refused(why: str) -> None:
    """Guards against a silent NaN for no answers, and a comparison of different questions or repeats."""
    for call in REFUSED[why]:
        with pytest.raises(ValueError, match=why):
            call()


def test_tokens_per_forward_by_hand() -> None:
    """Guards against a mean of ratios, certainty from one question, and a variance that forgets one count."""
    ratio = ratio_of_totals([30, 2], [10, 2])
    assert isclose(ratio.value, 32 / 12)
    spread = np.std([(30 - 320 / 12) / 6, (2 - 64 / 12) / 6], ddof=1)
    assert isclose(ratio.interval.half_width, QUANTILE * spread / 2**0.5)
    ratio = ratio_of_totals([12, 7, 30], [12, 7, 30])
    assert ratio.value == ratio.interval.low == ratio.interval.high == 1.0
    for ratio in (ratio_of_totals([9], [3]), median_ratio([4.0], [2.0])):
        assert isfinite(ratio.value)
        assert (ratio.interval.low, ratio.interval.high) == (-inf, inf)
        assert Bound(low=1.0).verdict(ratio.interval) == "open"


def test_speed_and_gain_differences_by_hand() -> None:
    """Guards against unpaired ratios, gains of different questions, and certainty where no question separates arms."""
    a, b = Answers([1] * 3, [4, 8, 12], [2, 4, 6]), Answers([1] * 3, [3, 6, 9], [2, 4, 6])
    speed = speed_difference(a, b)
    assert isclose(speed.value, 0.5) and isclose(speed.interval.half_width, 0.0, abs_tol=1e-12)
    noisy = Answers([1] * 3, [4, 6, 9], [2, 4, 6])
    difference = speed_difference(noisy, b)
    residuals = np.array([4, 6, 9]) - 19 / 12 * np.array([2, 4, 6]) - (np.array([3, 6, 9]) - 1.5 * np.array([2, 4, 6]))
    assert isclose(difference.value, 19 / 12 - 1.5)
    assert isclose(difference.interval.half_width, QUANTILE * np.std(residuals / 4, ddof=1) / 3**0.5)
    gain = gain_difference(([1, 1, 1, 0], [0, 0, 1, 0]), ([1, 0, 0, 0], [0, 0, 0, 1]))
    per_question = [1 - 1, 1 - 0, 0 - 0, 0 + 1]
    assert gain.value == np.mean(per_question)
    half = QUANTILE * np.std([*per_question, 2, -2]) / 6**0.5
    assert isclose(gain.interval.half_width, half) and isclose(gain.interval.high + gain.interval.low, 2 * 2 / 6)
    same = [1.0, 0.0, 1.0]
    assert gain_difference((same, same), (same, same)).interval.half_width > 0


def test_over_seeds_by_hand() -> None:
    """Guards against a normal quantile for three seeds, sums of half-widths, and swapped sides."""
    pooled = Estimate(0.5, Interval(0.2, 0.6), 10)
    training = 4.302652729911275 * 0.1 / 3**0.5  # Student's t for 2 degrees of freedom; the seeds scatter by 0.1
    estimate = over_seeds(pooled, [0.4, 0.5, 0.6])
    assert (estimate.value, estimate.n) == (0.5, 10)
    assert isclose(estimate.interval.low, 0.5 - (0.3**2 + training**2) ** 0.5)
    assert isclose(estimate.interval.high, 0.5 + (0.1**2 + training**2) ** 0.5)
    assert over_seeds(pooled, [0.5]) == pooled


def test_gaps_by_hand() -> None:
    """Guards against limits on the wrong side, and curves compared where only one of them has points."""
    gap = difference(Estimate(1.7, Interval(1.4, 1.8), 5), Estimate(1.2, Interval(1.1, 1.6), 3))
    assert isclose(gap.value, 0.5) and gap.n == 3
    assert isclose(gap.interval.low, 0.0, abs_tol=1e-9)  # 0.5 - sqrt(0.3**2 + 0.4**2)
    assert isclose(gap.interval.high, 0.5 + 0.02**0.5)  # sqrt(0.1**2 + 0.1**2)
    assert isclose(points_gap([(3, 10), (1, 50)], [(1, 40), (2, 30)]), 10 - 10 * 0.5)  # from 1 to 2: 50..30, 40..30
    assert isclose(points_gap([(1, 7)], [(1, 3)]), 4)


def curve(shift: int, n: int = 200) -> list[Answers]:
    """Four points that get slower and, by `shift` answers of 200 everywhere, more accurate."""
    generator, points = np.random.default_rng(5), []
    order = generator.permutation(n)
    for right, emitted in ((150, 10), (130, 15), (110, 20), (90, 25)):
        points.append(Answers((order < right + shift).astype(float).tolist(), [emitted] * n, [10] * n))
    return points


def test_curve_advantage_is_what_lies_between_parallel_curves() -> None:
    """Guards against a sign slip, an interval that misses its value, and one of zero width for equal curves."""
    lead, back = curve_advantage(curve(20), curve(0)), curve_advantage(curve(0), curve(20))
    assert isclose(lead.value, 0.1) and isclose(back.value, -0.1)
    assert 0.04 < lead.interval.low < 0.1 < lead.interval.high < 0.16
    assert lead == curve_advantage(curve(20)[::-1], curve(0)), "points in any order, and the same draw every time"
    equal = curve_advantage(curve(0), curve(0)).interval
    assert equal.low < 0 < equal.high


def test_median_ratio_pairs_its_repeats() -> None:
    """Guards against a ratio of medians, which slow repeats would move, and a report that changes from run to run."""
    ratio = median_ratio([2.0, 40.0, 6.0], [1.0, 20.0, 3.0])
    assert ratio.value == ratio.interval.low == ratio.interval.high == 2.0
    generator = np.random.default_rng(3)
    mars, ar = generator.normal(2.1, 0.1, 30).tolist(), generator.normal(1.0, 0.02, 30).tolist()
    ratio = median_ratio(mars, ar)
    assert ratio == median_ratio(mars, ar)
    assert ratio.value == np.median(np.divide(mars, ar))
    assert 2.0 < ratio.interval.low < ratio.value < ratio.interval.high < 2.2


ABOVE_0 = Bound(low=0.0)


def around(value: float, half: float) -> Estimate:
    """An estimate and half the width of its interval."""
    return Estimate(value, Interval(value - half, value + half), 100)


def test_p_is_the_intervals_own_and_holms_by_hand() -> None:
    """Guards against factors in the wrong order, a one-sided p, a normal law for three seeds, an error for no p."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1.0, 1.0] and holm([]) == []
    for value, half in ((2.0, 1.0), (-0.5, 1.0), (5.0, inf), (0.0, 1.0)):
        p = 2 * stats.norm.sf(abs(value / half) * QUANTILE)
        assert p_value(around(value, half), [value], ABOVE_0) == pytest.approx(p, rel=1e-6)
    seeds = (1.0, 2.0, 4.5)
    assert p_value(around(2.5, 0.0), seeds, ABOVE_0) == pytest.approx(stats.ttest_1samp(seeds, 0.0).pvalue, rel=1e-6)
    assert p_value(around(1.6, 0.1), [1.6], Bound(1.5, 9.0)) == pytest.approx(0.05, rel=1e-3)
    assert p_value(around(1.0, 0.0), [1.0], Bound(1.0, 1.0, closed=True)) < SIGNIFICANT


@given(st.floats(-9, 9), st.floats(0.01, 9), st.lists(st.floats(-9, 9), min_size=2, max_size=4))
def test_p_and_interval_never_disagree(value: float, half: float, seeds: list[float]) -> None:
    """Guards against a verdict where p is above .05, and an open one where p is below."""
    effect = around(value, half)
    decided, p = ABOVE_0.verdict(over_seeds(effect, seeds).interval) != "open", p_value(effect, seeds, ABOVE_0)
    assert decided == (p < SIGNIFICANT) or abs(p - SIGNIFICANT) < 1e-6
