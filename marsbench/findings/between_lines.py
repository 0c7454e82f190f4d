"""Claims on the lines of a table: each compares some of them on the benchmarks that all of these were measured on.

A benchmark gives an effect of its own, and the claim's is their mean; where these are not all benchmarks that the
table asks, the finding says so. Published effects are worked out of the paper's own averages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from marsbench.findings.cells import BENCHMARKS, answers_of, columns, done_cells, latest_cells
from marsbench.findings.claims import TOKENS, Claim, Measured
from marsbench.findings.published import published_average, published_values
from marsbench.rows.kinds import EvaluationRow, Row
from marsbench.running.plans import TablePlan
from marsbench.statistics.curves import curve_advantage, points_gap
from marsbench.statistics.decisions import Bound
from marsbench.statistics.intervals import (
    Estimate,
    accuracy,
    gain_difference,
    mean_of_benchmarks,
    paired_difference,
    speed_difference,
    tokens_per_forward,
)

Shared = Mapping[str, Sequence[EvaluationRow]]  # benchmark -> the rows of the lines compared, in their order
_MORE = Bound(low=0.0)


def more_accurate(
    plan: TablePlan, first: str, second: str, *, margin: float = 0.0, bound: Bound | None = None, **said: Any
) -> Claim:
    """Line `first` is more accurate than line `second`; with a margin, at least not `margin` points less so."""

    def difference(shared: Shared) -> Estimate:
        a, b = ({name: rows[place].correct for name, rows in shared.items()} for place in (0, 1))
        return paired_difference(a, b).estimate

    return Claim(
        measure=_on_shared(plan, (first, second), difference),
        bound=bound or Bound.losing_less_than(margin),
        signed=True,
        published=_published(plan, (first, second), "accuracy", lambda a, b: a - b),
        **_of_lines(plan, first, second),
        compared=f"{label(plan, first)} minus {label(plan, second)}",
        **said,
    )


def emits(plan: TablePlan, line: str, bound: Bound, **said: Any) -> Claim:
    """A line emits so many tokens per forward pass."""
    return Claim(
        measure=_on_shared(plan, (line,), _mean(lambda row: tokens_per_forward(row.emitted, row.forwards))),
        bound=bound,
        unit=TOKENS,
        published=_published(plan, (line,), "tokens_per_forward", lambda value: value),
        **_of_lines(plan, line),
        compared=f"tokens/forward of {label(plan, line)}",
        how="" if bound.low >= 0 else 'Where "<" is tested, "above" and "below" change places.',
        **said,
    )


def emits_more(plan: TablePlan, first: str, second: str, **said: Any) -> Claim:
    """Line `first` emits more tokens per forward pass than line `second`."""
    return Claim(
        measure=_on_shared(plan, (first, second), _mean(lambda a, b: speed_difference(answers_of(a), answers_of(b)))),
        bound=_MORE,
        unit=TOKENS,
        signed=True,
        published=_published(plan, (first, second), "tokens_per_forward", lambda a, b: a - b),
        **_of_lines(plan, first, second),
        compared=f"tokens/forward: {label(plan, first)} minus {label(plan, second)}",
        how="Tokens per forward pass of two lines are compared on the same questions too, their difference with the "
        "normal interval of a difference of ratios.",
        **said,
    )


def gains_more(plan: TablePlan, first: tuple[str, str], second: tuple[str, str], **said: Any) -> Claim:
    """What one line gains over another in accuracy is more than what a third gains over a fourth."""

    def gain(a: EvaluationRow, b: EvaluationRow, c: EvaluationRow, d: EvaluationRow) -> Estimate:
        return gain_difference((a.correct, b.correct), (c.correct, d.correct))

    pairs = [" minus ".join(label(plan, line) for line in pair) for pair in (first, second)]
    return Claim(
        measure=_on_shared(plan, (*first, *second), _mean(gain, 100)),
        bound=_MORE,
        signed=True,
        published=_published(plan, (*first, *second), "accuracy", lambda a, b, c, d: (a - b) - (c - d)),
        lines=(*first, *second),
        compared=f"({pairs[0]}) minus ({pairs[1]})",
        how="Two differences are compared question by question as well: the difference between them, with an interval "
        "made in the same way. Where lines answer next to nothing, a gain over them can grow no further.",
        **said,
    )


def lies_above(plan: TablePlan, curves: Mapping[str, Sequence[str]], *, margin: float = 0.0, **said: Any) -> Claim:
    """One curve of accuracy against tokens per forward pass lies above another, or at most `margin` points below.

    `curves` holds the two, each by its words in print: its lines, one for each threshold. `margin` is in points.
    """
    (one, first), (other, second) = curves.items()

    def advantage(*rows: EvaluationRow) -> Estimate:
        points = [answers_of(row) for row in rows]
        return curve_advantage(points[: len(first)], points[len(first) :])

    return Claim(
        measure=_on_shared(plan, (*first, *second), _mean(advantage, 100)),
        bound=Bound.losing_less_than(margin),
        signed=True,
        published=lambda scale: _published_gap(plan, first, second, scale),
        lines=(*first, *second),
        compared=f"{one} minus {other}, at equal tokens/forward",
        who=(f"At equal tokens per forward pass, {one}", other),
        how="Two curves of accuracy against tokens/forward, straight between their points, are compared where they "
        "emit equally many tokens per forward pass: the mean difference over the tokens/forward that both reach, with "
        "a bootstrap interval over questions.",
        **said,
    )


def line_numbers(plan: TablePlan, line: str) -> tuple[Claim, Claim]:
    """A line's accuracy in points and its tokens per forward pass: what nothing is claimed of."""
    accuracy_in_points = Claim(measure=_on_shared(plan, (line,), _mean(_right, 100)), bound=Bound())
    return accuracy_in_points, emits(plan, line, Bound())


def _right(row: EvaluationRow) -> Estimate:
    """The share of right answers; of shares of several seeds, their mean gain over none right."""
    if all(right in (0, 1) for right in row.correct):
        return accuracy(row.correct)
    return paired_difference({"": row.correct}, {"": [0.0] * len(row.correct)}).estimate.times(0.01)


def _of_lines(plan: TablePlan, *names: str) -> dict[str, Any]:
    """The lines that a claim compares, by their names and in print."""
    return {"lines": names, "who": tuple(label(plan, name) for name in names)}


def label(plan: TablePlan, name: str) -> str:
    """The words that a plan shows for a line."""
    return next(arm.label for arm in plan.arms if arm.name == name)


def _on_shared(
    plan: TablePlan, lines: Sequence[str], effect: Callable[[Shared], Estimate]
) -> Callable[[Sequence[Row]], Measured]:
    """An effect on the benchmarks that all these lines were measured on."""

    def measure(rows: Sequence[Row]) -> Measured:
        cells = latest_cells(rows)
        done = [done_cells(cells, line) for line in lines]
        names = [name for name in BENCHMARKS if all(name in of_line for of_line in done)]
        shared = {name: [of_line[name] for of_line in done] for name in names}
        if not shared:
            return Measured()
        try:
            return Measured(effect(shared), tuple(shared), len(columns(plan)))
        except ValueError as error:
            return Measured(reason=f"not comparable: {error}")

    return measure


def _mean(effect: Callable[..., Estimate], factor: float = 1.0) -> Callable[[Shared], Estimate]:
    """The mean over benchmarks of an effect of the lines' rows on one of them; `factor` 100 makes points."""
    return lambda shared: mean_of_benchmarks([effect(*rows) for rows in shared.values()]).times(factor)


def _published(
    plan: TablePlan, lines: Sequence[str], metric: str, effect: Callable[..., float]
) -> Callable[[str], float | None]:
    """Scale -> the same effect between the paper's averages; None unless it has them all."""

    def published(scale: str) -> float | None:
        averages = [published_average(plan, line, scale, metric) for line in lines]
        return None if None in averages else effect(*averages)

    return published


def _published_gap(plan: TablePlan, first: Sequence[str], second: Sequence[str], scale: str) -> float | None:
    """The same mean difference of two curves from the paper's numbers, benchmarks weighing the same."""
    gaps = []
    for benchmark in columns(plan):
        one, other = (_published_curve(plan, lines, scale, benchmark) for lines in (first, second))
        if one is None or other is None:
            return None
        gaps.append(points_gap(one, other))
    return sum(gaps) / len(gaps)


def _published_curve(
    plan: TablePlan, lines: Sequence[str], scale: str, benchmark: str
) -> list[tuple[float, float]] | None:
    """(tokens per forward pass, accuracy in %) of a curve's points in the paper; None unless it has them all."""
    points = []
    for arm in (arm for arm in plan.arms if arm.name in lines):
        speed = published_values(plan, arm, scale, "tokens_per_forward").get(benchmark)
        height = published_values(plan, arm, scale, "accuracy").get(benchmark)
        if speed is None or height is None:
            return None
        points.append((speed, height))
    return points
