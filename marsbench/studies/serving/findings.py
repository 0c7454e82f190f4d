"""What rows of a server under load say: times that users waited, what was good enough, and who carried how much."""

from collections.abc import Callable, Iterable, Sequence
from math import exp, inf, log
from statistics import fmean

import numpy as np

from marsbench.rows.kinds import Row, ServingRow
from marsbench.statistics.intervals import Estimate, Interval, percentiles, reach, resamples
from marsbench.studies.serving.policies import AR, BY_ROWS, FEW, POLICIES, VERIFIED, Policy


class Cells(dict[tuple[str, str, float], list[ServingRow]]):
    """A policy's name, a shape and a load -> the laps of that cell, repeat by repeat."""

    @classmethod
    def of(cls, rows: Iterable[Row]) -> "Cells":
        """Those of some rows by the policies of the page; of a lap that was measured twice, the last counts."""
        names = {policy.name for policy in POLICIES}
        laps: dict[tuple[str, str, float], dict[int, ServingRow]] = {}
        for row in rows:
            if isinstance(row, ServingRow) and row.status == "done" and row.policy in names:
                laps.setdefault((row.policy, row.shape, row.load), {})[row.repeat] = row
        return cls({key: [repeats[number] for number in sorted(repeats)] for key, repeats in laps.items()})

    @property
    def full(self) -> float:
        """How many requests in flight fill the server: the most that there were, if more than a few; else 0."""
        most = max((load for name, shape, load in self if (name, shape) == (AR.name, "together")), default=0.0)
        return most if most > max(FEW) else 0.0

    @property
    def loads(self) -> list[float]:
        return sorted({load for _, shape, load in self if shape == "steady"})

    def laps(self, policy: str, shape: str, load: float) -> list[ServingRow]:
        return self.get((policy, shape, load), [])

    def by_policy(self, shape: str, load: float) -> list[tuple[Policy, list[ServingRow]]]:
        return [(policy, laps) for policy in POLICIES if (laps := self.laps(policy.name, shape, load))]

    def ratio(self, one: str, other: str, load: float) -> Estimate | None:
        """One policy's speed over another's, repeat by repeat, which asked the same; None where there is none, or of 0.

        It is of requests in flight: what a user gets where there are a few, and else what all of them get together.
        """
        measure = of_a_request if load in FEW else tokens_per_second
        laps = zip(self.laps(one, "together", load), self.laps(other, "together", load), strict=False)
        pairs = [(measure(mine), measure(its)) for mine, its in laps]
        return typical([mine / its for mine, its in pairs]) if pairs and all(its for _, its in pairs) else None

    def same_answers(self) -> tuple[int, int]:
        """How many questions `mars-verified` answered as `ar` did in the same lap, and how many were asked of both."""
        both = [
            pair
            for (name, shape, load), laps in self.items()
            if name in (VERIFIED.name, BY_ROWS.name)
            for one, other in zip(laps, self.laps(AR.name, shape, load), strict=False)
            for pair in zip(one.answers, other.answers, strict=False)
            if all(pair)
        ]
        return sum(mine == its for mine, its in both), len(both)


def goodput(row: ServingRow) -> float:
    """Answers per second that met both targets, over the time in which requests came."""
    return row.good / row.seconds


def tokens_per_second(row: ServingRow) -> float:
    """Tokens of answers over the time until the last of them."""
    return row.emitted / max(row.took, 1e-9)


def of_a_request(row: ServingRow) -> float:
    """Tokens per second that a user gets: those of answers over the time that their users waited."""
    return row.emitted / max(row.waited, 1e-9)


def per_forward(rows: Sequence[ServingRow]) -> float:
    return sum(row.emitted for row in rows) / max(sum(row.forwards for row in rows), 1)


def lost(rows: Iterable[ServingRow]) -> int:
    return sum(row.requests - row.answered for row in rows)


def accuracy(rows: Sequence[ServingRow]) -> float | None:
    """The part of the answers that are right; None where they were not scored."""
    marked = [row for row in rows if row.right is not None and row.answered]
    return sum(row.right or 0 for row in marked) / sum(row.answered for row in marked) if marked else None


def typical(values: Sequence[float]) -> Estimate:
    """The geometric mean of numbers above 0, with Student's 95 % interval on their logarithms: it stays above 0.

    Where one of them is 0, there is no logarithm: the mean then, and what resamples come to.
    """
    if min(values) <= 0:
        some = np.asarray(values)
        return Estimate(float(some.mean()), percentiles(resamples(len(some)) @ some / len(some)), len(some))
    logs = [log(value) for value in values]
    half = reach(0.0, logs) if len(logs) > 1 else inf
    limits = Interval(exp(fmean(logs) - half), exp(fmean(logs) + half))
    return Estimate(exp(fmean(logs)), limits, len(logs))


def over_repeats(rows: Sequence[ServingRow], measure: Callable[[ServingRow], float]) -> Estimate:
    return typical([*map(measure, rows)])
