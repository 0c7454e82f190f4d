"""Several training seeds put together: their rows pooled, and what a claim says of all of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from marsbench.findings.cells import latest_cells
from marsbench.findings.claims import POINTS, Claim, Finding
from marsbench.rows.kinds import EvaluationRow, Row, StepCostRow, SweepRow, TextLossRow, TrainingRow
from marsbench.running.plans import TablePlan
from marsbench.statistics.decisions import Decide, Evidence, needed, p_value
from marsbench.statistics.intervals import Estimate, Interval, over_seeds

_MOST_POINTS = 100.0
BySeed = Mapping[int, Sequence[Row]]  # training seed -> the rows of a page; the seed that the page shows comes first
Judge = Callable[[Sequence[Row]], Finding]  # of rows that belong together: one seed's, or those of several pooled


def on_rows(claim: Claim, plan: TablePlan) -> Judge:
    """What rows say of a claim on a table's cells."""
    return lambda rows: claim.judge(latest_cells(rows), plan)


def of_all_seeds(claim: Claim, plan: TablePlan, seeds: BySeed) -> Finding:
    """What all training seeds say of a claim on a table's cells."""
    return judged(on_rows(claim, plan), claim.decide, list(seeds.values()))


def judged(judge: Judge, decide: Decide, seeds: Sequence[Sequence[Row]]) -> Finding:
    """What all training seeds say of a claim together: an entry of `seeds` holds the rows of one.

    A seed counts if it was measured on as much as the one that was measured on the most. With one, the interval is
    that of its questions alone.
    """
    alone = [(rows, finding) for rows in seeds if (finding := judge(rows)).estimate is not None]
    if not alone:
        return judge(seeds[0]) if seeds else Finding()
    most = max(map(_extent, (finding for _, finding in alone)))
    alone = [(rows, finding) for rows, finding in alone if _extent(finding) == most]
    together = alone[0][1] if len(alone) == 1 else judge(pooled([rows for rows, _ in alone]))
    if together.estimate is None:
        return together
    values = [finding.estimate.value for _, finding in alone if finding.estimate is not None]
    return _decided(together, Evidence(together.estimate, tuple(values), decide))


def _decided(together: Finding, evidence: Evidence) -> Finding:
    """What the evidence says: the interval over seeds, its verdict and p, and what it would take where it is open."""
    estimate = over_seeds(evidence.pooled, evidence.seeds)
    if together.unit == POINTS:
        estimate = _within_reach(estimate)
    verdict = evidence.decide(estimate.interval)
    return replace(
        together,
        estimate=estimate,
        verdict=verdict,
        seeds=len(evidence.seeds),
        p=p_value(evidence),
        needed=needed(evidence) if verdict == "inconclusive" else None,
    )


def _within_reach(points: Estimate) -> Estimate:
    """An estimate in points whose interval ends where accuracies can differ no more, which Student's does not know."""
    low, high = max(points.interval.low, -_MOST_POINTS), min(points.interval.high, _MOST_POINTS)
    return replace(points, interval=Interval(low, high))


def _extent(finding: Finding) -> tuple[int, tuple[str, ...], int]:
    """On how much a claim was judged."""
    return len(finding.benchmarks), finding.benchmarks, finding.estimate.n if finding.estimate else 0


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
