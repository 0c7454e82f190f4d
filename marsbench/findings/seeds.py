"""Several training seeds put together: rows that stand for all of them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from marsbench.rows.kinds import EvaluationRow, Row, StepCostRow, SweepRow, TextLossRow, TrainingRow

BySeed = Mapping[int, Sequence[Row]]  # training seed -> the rows of a page; the seed that the page shows comes first


def pooled(seeds: Sequence[Sequence[Row]]) -> list[Row]:
    """Rows that stand for several seeds: accuracies averaged per question, counts and laps' times summed.

    Training steps stand side by side, as seeds train on different batches. What not all of them have measured alike
    is left out.
    """
    by_place = [{_place(row): row for row in rows} for rows in seeds]
    shared = [[places.get(place) for places in by_place] for place in by_place[0] if place]
    return [row for rows in shared if (row := _pooled([row for row in rows if row], len(seeds)))]


def _place(row: Row) -> Hashable:
    """What the rows of several seeds have in common; None for rows that no claim reads."""
    if isinstance(row, EvaluationRow):
        return row.kind, row.arm, row.benchmark
    if isinstance(row, SweepRow):
        return row.kind, row.contender, row.batch_size
    if isinstance(row, TrainingRow):
        return row.kind, row.stage, row.block_size
    if isinstance(row, TextLossRow):
        return row.kind, row.stage
    return row.kind if isinstance(row, StepCostRow) else None


def _pooled(rows: Sequence[Row], seeds: int) -> Row | None:
    """One row for those of all seeds in one place; None where a seed has none, or other values."""
    if len(rows) < seeds or any(row.status != "done" for row in rows):
        return None
    try:
        return _sum_of_kind(rows[0], [vars(row) for row in rows])
    except (KeyError, ValueError):  # a name that not all of them have, lists of unequal length
        return None


def _sum_of_kind(first: Row, seeds: Sequence[Mapping[str, Any]]) -> Row:
    """The first row with the values of all seeds in it; an entry of `seeds` holds the fields of one."""
    if isinstance(first, EvaluationRow):
        emitted, forwards = _sums(seeds, "emitted"), _sums(seeds, "forwards")
        return replace(
            first, correct=_means(seeds, "correct"), emitted=emitted, forwards=forwards, others=_scores(seeds)
        )
    if isinstance(first, SweepRow):
        emitted, forwards = _sums(seeds, "emitted"), _sums(seeds, "row_forwards")
        seconds, baselines = _sums(seeds, "seconds"), [one["baselines"] for one in seeds]
        return replace(
            first,
            correct=_means(seeds, "correct"),
            emitted=emitted,
            row_forwards=forwards,
            seconds=seconds,
            baselines={name: _baseline([one.get(name) for one in baselines]) for name in first.baselines},
        )
    if isinstance(first, TextLossRow):
        return replace(first, nats=_sums(seeds, "nats"))
    if isinstance(first, StepCostRow):
        return replace(first, seconds=_joined(seeds, "seconds"), memory=_joined(seeds, "memory"))
    return first


def _scores(seeds: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Other scores of the same answers, averaged; those with several values per question are left out."""
    scores = [one["others"] for one in seeds]
    flat = [name for name in scores[0] if all(name in one and not _nested(one[name]) for one in scores)]
    return {name: _means(scores, name) for name in flat}


def _nested(values: Sequence[Any]) -> bool:
    return any(isinstance(value, list) for value in values)


def _baseline(found: Sequence[Mapping[str, Any] | None]) -> dict[str, Any]:
    """A baseline's laps and tokens, summed over the seeds."""
    known = [one for one in found if one is not None]
    if len(known) < len(found):
        raise ValueError("a seed was raced against other baselines")
    return {"seconds": _sums(known, "seconds"), "emitted": sum(one["emitted"] for one in known)}


def _sums(seeds: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    """The lists of one field, added up entry by entry."""
    return [sum(values) for values in zip(*(one[name] for one in seeds), strict=True)]


def _joined(seeds: Sequence[Mapping[str, Any]], field: str) -> dict[str, list[Any]]:
    """The lists under each of the first seed's names in one field, end to end."""
    return {name: [value for one in seeds for value in one[field][name]] for name in seeds[0][field]}


def _means(seeds: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [total / len(seeds) for total in _sums(seeds, name)]
