"""Curves of accuracy against tokens per forward pass, and how much higher one lies than another."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from marsbench.statistics.intervals import Answers, Estimate, percentiles, resamples

POSITIONS = 51  # at which two curves are compared, evenly over the tokens per forward pass that both reach

_Values = NDArray[np.float64]


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
        emitted, forwards = (
            np.array([*counts, *[np.mean(counts)] * len(extra)]) for counts in (point.emitted, point.forwards)
        )
        correct = np.array([*point.correct, *extra])
        points.append([(emitted @ draws) / (forwards @ draws), (correct @ draws) / draws.sum(0)])
    return np.array(points).swapaxes(0, 1)


def _gap(a: _Values, b: _Values) -> _Values:
    """The mean height of curve a over curve b in each draw; both are [2, points, draws]."""
    gaps = []
    for one, other in zip(np.moveaxis(a, -1, 0), np.moveaxis(b, -1, 0), strict=True):
        low = max(one[0].min(), other[0].min())
        positions = np.linspace(low, max(low, min(one[0].max(), other[0].max())), POSITIONS)
        first, second = (np.interp(positions, *curve[:, np.argsort(curve[0], kind="stable")]) for curve in (one, other))
        gaps.append(np.mean(first - second))
    return np.array(gaps)
