"""What a verdict is worth: its p, Holm's correction, against textbooks and by hand."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from marsbench.statistics.decisions import SIGNIFICANT, Bound, Evidence, holm, p_value
from marsbench.statistics.intervals import QUANTILE, Estimate, Interval, over_seeds

ABOVE_0 = Bound(low=0.0)


def evidence(value: float, half: float, *seeds: float, n: int = 100) -> Evidence:
    """An effect held against 0, with half of the interval that its questions give."""
    return Evidence(Estimate(value, Interval(value - half, value + half), n), seeds or (value,), ABOVE_0)


def test_holm_by_hand() -> None:
    """Guards against factors in the wrong order, p values above 1, and adjusted ones that fall again.

    The example is worked out on paper: four tests, sorted .005, .01, .03, .04, times 4, 3, 2, 1.
    """
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1.0, 1.0] and holm([]) == []


def test_p_is_that_of_the_normal_law_for_one_seed() -> None:
    """Guards against a one-sided p, and one of another statistic than the interval's."""
    assert p_value(evidence(2.0, 1.0)) == pytest.approx(2 * stats.norm.sf(2.0 * QUANTILE), rel=1e-6)
    assert p_value(evidence(-0.5, 1.0)) == pytest.approx(2 * stats.norm.sf(0.5 * QUANTILE), rel=1e-6)


def test_p_is_students_where_only_seeds_scatter() -> None:
    """Guards against the normal law for three seeds, which would make sure what three trainings cannot."""
    seeds = (1.0, 2.0, 4.5)
    assert p_value(evidence(2.5, 0.0, *seeds)) == pytest.approx(stats.ttest_1samp(seeds, 0.0).pvalue, rel=1e-6)


@given(st.floats(-9, 9), st.floats(0.01, 9), st.lists(st.floats(-9, 9), min_size=2, max_size=4))
def test_p_and_interval_never_disagree(value: float, half: float, seeds: list[float]) -> None:
    """Guards against a verdict with p above .05, and none with p below."""
    found = evidence(value, half, *seeds)
    decided = ABOVE_0.verdict(over_seeds(found.pooled, seeds).interval) != "open"
    p = p_value(found)
    assert decided == (p < SIGNIFICANT) or abs(p - SIGNIFICANT) < 1e-6


def test_p_of_two_bounds_is_that_of_the_nearer() -> None:
    """Guards against a claim of "about twice" that is sure because one of its bounds is far."""
    inside = Evidence(Estimate(1.6, Interval(1.5, 1.7), 9), (1.6,), Bound(1.5, 9.0))
    assert p_value(inside) == pytest.approx(0.05, rel=1e-3)


def test_nothing_is_sure_without_an_interval() -> None:
    """Guards against a small p from a single question, which has no interval."""
    assert p_value(evidence(5.0, inf)) == pytest.approx(1.0)
