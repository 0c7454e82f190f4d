"""What rows of a server under load say: times that users waited, what was good enough, and who carried how much."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from math import inf
from statistics import mean

import numpy as np

from marsbench.rows.kinds import Row, ServingRow
from marsbench.statistics.intervals import Estimate, Interval, median_ratio, reach

Cells = dict[tuple[str, str, float], list[ServingRow]]  # (policy, shape, load) -> its repeats
Measure = Callable[[ServingRow], list[float]]  # a number for every request that was answered


def cells_of(rows: Iterable[Row]) -> Cells:
    """The cells, each with its repeats in their order; of one measured twice, the last."""
    found: dict[tuple[str, str, float], dict[int, ServingRow]] = {}
    for row in rows:
        if isinstance(row, ServingRow) and row.status == "done":
            found.setdefault((row.policy, row.shape, row.load), {})[row.repeat] = row
    return {key: [repeats[number] for number in sorted(repeats)] for key, repeats in found.items()}


def answered(row: ServingRow) -> list[int]:
    """The requests that were answered whole."""
    return [number for number, code in enumerate(row.status_codes) if code == 200 and row.emitted[number]]


def first_token(row: ServingRow) -> list[float]:
    """Seconds from when a request was due to its first token."""
    return [row.first[number] - row.intended[number] for number in answered(row)]


def per_token(row: ServingRow) -> list[float]:
    """Seconds per token after the first, of answers that have more."""
    return [
        (row.last[number] - row.first[number]) / (row.emitted[number] - 1)
        for number in answered(row)
        if row.emitted[number] > 1
    ]


def end_to_end(row: ServingRow) -> list[float]:
    """Seconds from when a request was due to its last token."""
    return [row.last[number] - row.intended[number] for number in answered(row)]


def lag(row: ServingRow) -> list[float]:
    """Seconds by which the load generator was late."""
    return list(row.lag)


def quantiles(rows: Sequence[ServingRow], measure: Measure) -> tuple[float, float, float] | None:
    """The 50th, 90th and 99th percentile over all repeats together; None where nobody was answered."""
    values = [value for row in rows for value in measure(row)]
    if not values:
        return None
    median, high, highest = np.quantile(values, (0.5, 0.9, 0.99))
    return float(median), float(high), float(highest)


def is_good(row: ServingRow, number: int) -> bool:
    """Whether an answer met both targets."""
    waited = row.first[number] - row.intended[number]
    each = (row.last[number] - row.first[number]) / max(row.emitted[number] - 1, 1)
    return waited <= row.target_first_token and each <= row.target_per_token


def goodput(row: ServingRow) -> float:
    """Answers per second that met both targets, over the time in which requests came."""
    return sum(is_good(row, number) for number in answered(row)) / row.seconds


def makespan(row: ServingRow) -> float:
    """Seconds from the first request that was due to the last token."""
    return max((row.last[number] for number in answered(row)), default=0.0)


def requests_per_second(row: ServingRow) -> float:
    """Answers over the time until the last of them."""
    return len(answered(row)) / max(makespan(row), 1e-9)


def tokens_per_second(row: ServingRow) -> float:
    """Tokens of answers over the time until the last of them."""
    return sum(row.emitted[number] for number in answered(row)) / max(makespan(row), 1e-9)


def per_forward(rows: Sequence[ServingRow]) -> float:
    """Tokens per forward pass of a row."""
    tokens = sum(row.emitted[number] for row in rows for number in answered(row))
    return tokens / max(sum(row.forwards[number] for row in rows for number in answered(row)), 1)


def rejected(rows: Sequence[ServingRow]) -> float:
    """The part of all requests that were turned away."""
    codes = [code for row in rows for code in row.status_codes]
    return codes.count(429) / max(len(codes), 1)


def lowest_tau(rows: Sequence[ServingRow]) -> float:
    """The mean over answers of the lowest tau that they were decoded with."""
    return _mean(row.lowest[number] for row in rows for number in answered(row))


def accuracy(rows: Sequence[ServingRow]) -> float:
    """The part of the answers that are right."""
    return _mean(row.correct[number] for row in rows for number in answered(row))


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return mean(found) if found else 0.0


def over_repeats(rows: Sequence[ServingRow], measure: Callable[[ServingRow], float]) -> Estimate:
    """The mean of a number over repeats, with Student's 95 % interval."""
    values = [measure(row) for row in rows]
    value = float(np.mean(values))
    half = reach(0.0, values) if len(values) > 1 else inf
    return Estimate(value, Interval(max(value - half, 0.0), value + half), len(values))  # no rate is below 0


def ratio(
    ones: Sequence[ServingRow], others: Sequence[ServingRow], measure: Callable[[ServingRow], float]
) -> Estimate | None:
    """One policy's number over another's, repeat by repeat, whose requests came at the same times; None if it is 0."""
    pairs = [(measure(one), measure(other)) for one, other in zip(ones, others, strict=False)]
    if not pairs or any(not other for _, other in pairs):
        return None
    return median_ratio([one for one, _ in pairs], [other for _, other in pairs])


def switches(row: ServingRow, name: str) -> int:
    """How often a knob of the server was found turned, from one look to the next."""
    values = row.timeline.get(name, [])
    return sum(one != other for one, other in itertools.pairwise(values))
