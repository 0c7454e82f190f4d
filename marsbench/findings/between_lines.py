"""Claims on the lines of a table: each compares some of them on the benchmarks that all of these were measured on.

A benchmark gives an effect of its own, and the claim's is their mean; where these are not all benchmarks that the
table asks, the finding says so. Published effects are worked out of the paper's own averages.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import sub
from typing import Any

from marsbench.findings.cells import BENCHMARKS, columns, done_cells, latest_cells, published_average, published_values
from marsbench.findings.claims import TOKENS, Claim, Measured
from marsbench.rows.kinds import EvaluationRow, Row
from marsbench.running.plans import TablePlan
from marsbench.statistics.curves import curve_advantage, points_gap
from marsbench.statistics.decisions import Bound
from marsbench.statistics.intervals import (
    Estimate,
    gain_difference,
    mean_of_benchmarks,
    paired_difference,
    speed_difference,
)

Shared = Mapping[str, Sequence[EvaluationRow]]  # benchmark -> the rows of the lines compared, in their order
Published = Callable[[str], float | None]  # scale -> the same effect between the paper's numbers; None without them
_SAID = "text", "name"  # what may follow the lines of a claim, in this order; its other fields by name
_MORE = Bound(low=0.0)


def more_accurate(
    plan: TablePlan, first: str, second: str, *said: str, margin: float = 0.0, bound: Bound | None = None, **more: Any
) -> Claim:
    """Line `first` is more accurate than line `second`; with a margin, at least not `margin` points less so.

    `only`, in `more`: the benchmarks that count; none = all.
    """

    def difference(shared: Shared) -> Estimate:
        a, b = ({name: rows[place].correct for name, rows in shared.items()} for place in (0, 1))
        return paired_difference(a, b)

    more = {"compared": f"{label(plan, first)} minus {label(plan, second)}", **more}
    published = more.pop("published", None) or _published(plan, (first, second), "accuracy", sub)
    bound = bound or Bound.losing_less_than(margin)
    return _claim(plan, (first, second), difference, published, said, bound=bound, signed=True, **more)


as_accurate = partial(more_accurate, margin=1.0)  # points that may be lost: less than the paper says MARS gains


def emits(plan: TablePlan, line: str, bound: Bound, *said: str, **more: Any) -> Claim:
    fields = {"bound": bound, "unit": TOKENS, "compared": f"tokens/forward of {label(plan, line)}", **more}
    published = _published(plan, (line,), "tokens_per_forward", lambda value: value)
    return _claim(plan, (line,), _mean(lambda row: row.tokens_per_forward), published, said, **fields)


def emits_more(plan: TablePlan, first: str, second: str, *said: str, **more: Any) -> Claim:
    published = _published(plan, (first, second), "tokens_per_forward", sub)
    fields = {"bound": _MORE, "unit": TOKENS, "signed": True, **more}
    effect = _mean(lambda a, b: speed_difference(a.answers, b.answers))
    return _claim(plan, (first, second), effect, published, said, **fields)


def gains_more(plan: TablePlan, first: tuple[str, str], second: tuple[str, str], *said: str, **more: Any) -> Claim:
    """What one line gains over another in accuracy is more than what a third gains over a fourth."""
    published = more.pop("published", None) or _published(
        plan, (*first, *second), "accuracy", lambda a, b, c, d: (a - b) - (c - d)
    )
    fields = {"bound": _MORE, "signed": True, **more}
    gain = _mean(lambda a, b, c, d: gain_difference((a.correct, b.correct), (c.correct, d.correct)), 100)
    return _claim(plan, (*first, *second), gain, published, said, **fields)


def lies_above(
    plan: TablePlan, curves: Mapping[str, Sequence[str]], *said: str, margin: float = 0.0, **more: Any
) -> Claim:
    """One curve of accuracy against tokens per forward pass lies above another, or at most `margin` points below.

    `curves` holds the two, each by its words in print: its lines, one for each threshold. `margin` is in points.
    """
    first, second = curves.values()

    def advantage(*rows: EvaluationRow) -> Estimate:
        points = [row.answers for row in rows]
        return curve_advantage(points[: len(first)], points[len(first) :])

    fields = {"bound": Bound.losing_less_than(margin), "signed": True, **more}
    published = partial(_published_gap, plan, first, second)
    return _claim(plan, (*first, *second), _mean(advantage, 100), published, said, **fields)


def line_numbers(plan: TablePlan, line: str) -> tuple[Claim, Claim]:
    """A line's accuracy in points and its tokens per forward pass: what nothing is claimed of."""
    return _claim(plan, (line,), _mean(_right, 100), lambda scale: None, bound=Bound()), emits(plan, line, Bound())


def _right(row: EvaluationRow) -> Estimate:
    """The share of right answers; of shares of several seeds, their mean gain over none right."""
    if all(right in (0, 1) for right in row.correct):
        return row.accuracy
    return paired_difference({"": row.correct}, {"": [0.0] * len(row.correct)}).times(0.01)


def label(plan: TablePlan, name: str) -> str:
    return next(line.label for line in plan.lines if line.name == name)


def _claim(
    plan: TablePlan, lines: tuple[str, ...], effect: Callable[[Shared], Estimate], published: Published,
    said: Sequence[str] = (), only: Sequence[str] = (*BENCHMARKS,), **fields: Any,
) -> Claim:  # fmt: skip
    def measure(rows: Sequence[Row]) -> Measured:
        cells = latest_cells(rows)
        done = [done_cells(cells, line) for line in lines]
        names = [name for name in only if all(name in of_line for of_line in done)]
        shared = {name: [of_line[name] for of_line in done] for name in names}
        if not shared:
            return Measured()
        try:
            _alike(shared)
            return Measured(effect(shared), tuple(shared), len(columns(plan)))
        except ValueError as error:
            return Measured(reason=f"not comparable: {error}")

    known = {**dict(zip(_SAID, said, strict=False)), **fields}
    return Claim(measure=measure, published=published, lines=lines, **known)


def _alike(shared: Shared) -> None:
    """Refuses rows that cannot be paired: of several types of weights, or of other numbers of questions."""
    features: list[tuple[str, set[Any]]] = [
        ("types of weights", {row.dtype for rows in shared.values() for row in rows})
    ]
    features += [("numbers of questions", {len(row.correct) for row in rows}) for rows in shared.values()]
    for what, values in features:
        if len(values) > 1:
            raise ValueError(f"several {what} ({', '.join(map(str, sorted(values)))})")


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
    """The mean difference of two curves from the paper's numbers, benchmarks weighing the same."""
    speeds, heights = (
        {line.name: published_values(plan, line, scale, metric) for line in plan.lines}
        for metric in ("tokens_per_forward", "accuracy")
    )
    gaps = []
    for name in columns(plan):
        if not all(name in of_line for line in (*first, *second) for of_line in (speeds[line], heights[line])):
            return None
        gaps.append(
            points_gap(*([(speeds[line][name], heights[line][name]) for line in lines] for lines in (first, second)))
        )
    return sum(gaps) / len(gaps)
