"""Claims about the lines of a table. Each compares some lines on the benchmarks that all of them have.

The effect is the mean of those of the benchmarks. Published effects are worked out of the paper's own averages.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import sub
from statistics import fmean
from typing import Any

from marsbench.findings.cells import BENCHMARKS, columns, done_cells, latest_cells, published_average, published_values
from marsbench.findings.claims import TOKENS, Claim, Measured
from marsbench.rows.kinds import EvaluationRow, Row
from marsbench.running.plans import TablePlan
from marsbench.statistics.decisions import Bound
from marsbench.statistics.intervals import (
    Estimate,
    curve_advantage,
    gain_difference,
    mean_of_benchmarks,
    paired_difference,
    points_gap,
    speed_difference,
)

Shared = Mapping[str, Sequence[EvaluationRow]]  # benchmark -> the rows of the lines compared, in their order
Published = Callable[[str], float | None]  # scale -> the same effect between the paper's numbers; None without them
_MORE: dict[str, Any] = {"bound": Bound(low=0.0), "signed": True}


def more_accurate(plan: TablePlan, first: str, second: str, *text_name: str, margin: float = 0.0, **more: Any) -> Claim:
    """Line `first` is more accurate than line `second`; with a margin, at least not `margin` points less so.

    `text_name`, here and below: its text and its name; `more`: other fields, and `only`, the benchmarks that count.
    """

    def difference(shared: Shared) -> Estimate:
        a, b = ({name: rows[place].correct for name, rows in shared.items()} for place in (0, 1))
        return paired_difference(a, b)

    compared, bound = f"{plan.line(first).label} minus {plan.line(second).label}", Bound(low=0.0 - margin)  # no -0.0
    papers = _published(plan, (first, second), "accuracy", sub)
    fields = {"bound": bound, "signed": True, "compared": compared, "published": papers, **more}
    return _claim(plan, (first, second), difference, text_name, **fields)


as_accurate = partial(more_accurate, margin=1.0)  # the points that may be lost are fewer than the paper says MARS gains


def emits(plan: TablePlan, line: str, bound: Bound, *text_name: str, **more: Any) -> Claim:
    papers = _published(plan, (line,), "tokens_per_forward", float)
    fields = {"unit": TOKENS, "compared": f"tokens/forward of {plan.line(line).label}", "published": papers, **more}
    return _claim(plan, (line,), _mean(lambda row: row.tokens_per_forward), text_name, bound=bound, **fields)


def emits_more(plan: TablePlan, first: str, second: str, *text_name: str, **more: Any) -> Claim:
    effect = _mean(lambda a, b: speed_difference(a.answers, b.answers))
    fields = {"unit": TOKENS, "published": _published(plan, (first, second), "tokens_per_forward", sub), **more}
    return _claim(plan, (first, second), effect, text_name, **_MORE | fields)


def gains_more(plan: TablePlan, first: tuple[str, str], second: tuple[str, str], *text_name: str, **more: Any) -> Claim:
    """The first line gains more accuracy over the second than the third gains over the fourth."""
    papers = _published(plan, (*first, *second), "accuracy", lambda a, b, c, d: (a - b) - (c - d))
    gain = _mean(lambda a, b, c, d: gain_difference((a.correct, b.correct), (c.correct, d.correct)), 100)
    return _claim(plan, (*first, *second), gain, text_name, **_MORE | {"published": papers, **more})


def lies_above(
    plan: TablePlan, first: Sequence[str], second: Sequence[str], *text_name: str, margin: float = 0.0, **more: Any
) -> Claim:
    """A curve of accuracy by tokens per forward pass lies above another curve, or at most `margin` points below."""

    def advantage(*rows: EvaluationRow) -> Estimate:
        points = [row.answers for row in rows]
        return curve_advantage(points[: len(first)], points[len(first) :])

    fields = {"bound": Bound(low=0.0 - margin), "published": partial(_published_gap, plan, first, second), **more}
    return _claim(plan, (*first, *second), _mean(advantage, 100), text_name, signed=True, **fields)


def line_numbers(plan: TablePlan, line: str, **only: Any) -> tuple[Claim, Claim]:
    """A line's accuracy in points and its tokens per forward pass, as claims without a bound."""
    return _claim(plan, (line,), _mean(_right, 100), (), bound=Bound(), **only), emits(plan, line, Bound(), **only)


def _right(row: EvaluationRow) -> Estimate:
    """The share of right answers with Wilson's interval; over several seeds, with Bonett and Price's against 0."""
    if all(right in (0, 1) for right in row.correct):
        return row.accuracy
    return paired_difference({"": row.correct}, {"": [0.0] * len(row.correct)}).times(0.01)


def _claim(
    plan: TablePlan, lines: tuple[str, ...], effect: Callable[[Shared], Estimate], text_name: Sequence[str],
    only: Sequence[str] = (*BENCHMARKS,), **fields: Any,
) -> Claim:  # fmt: skip
    def measure(rows: Sequence[Row]) -> Measured:
        cells = latest_cells(rows)
        done = [done_cells(cells, line) for line in lines]
        shared = {name: [each[name] for each in done] for name in only if all(name in each for each in done)}
        dtypes = sorted({row.dtype for of_name in shared.values() for row in of_name})
        if len(dtypes) > 1:
            return Measured(reason=f"not comparable: several types of weights ({', '.join(dtypes)})")
        try:
            return Measured(effect(shared), tuple(shared), len(columns(plan))) if shared else Measured()
        except ValueError as error:  # for example unequal numbers of questions
            return Measured(reason=f"not comparable: {error}")

    return Claim(measure=measure, lines=lines, **{**dict(zip(("text", "name"), text_name, strict=False)), **fields})


def _mean(effect: Callable[..., Estimate], factor: float = 1.0) -> Callable[[Shared], Estimate]:
    """The mean over benchmarks of an effect of the lines' rows on one of them; `factor` 100 makes points."""
    return lambda shared: mean_of_benchmarks([effect(*rows) for rows in shared.values()]).times(factor)


def _published(plan: TablePlan, lines: Sequence[str], metric: str, effect: Callable[..., float]) -> Published:
    """An effect between the paper's averages; None unless it has them all."""

    def published(scale: str) -> float | None:
        averages = [published_average(plan, line, scale, metric) for line in lines]
        return None if None in averages else effect(*averages)

    return published


def _published_gap(plan: TablePlan, first: Sequence[str], second: Sequence[str], scale: str) -> float | None:
    """The mean difference of two curves from the paper's numbers; benchmarks have equal weight."""
    speeds, heights = (
        {line.name: published_values(plan, line, scale, metric) for line in plan.lines}
        for metric in ("tokens_per_forward", "accuracy")
    )
    names = columns(plan)
    if not all(of[line].keys() >= names.keys() for of in (speeds, heights) for line in (*first, *second)):
        return None

    def curve(lines: Sequence[str], name: str) -> list[tuple[float, float]]:
        return [(speeds[line][name], heights[line][name]) for line in lines]

    return fmean(points_gap(curve(first, name), curve(second, name)) for name in names)
