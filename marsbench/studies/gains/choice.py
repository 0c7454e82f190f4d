"""The line that is worked out: what thresholds give where they lose little, chosen on other questions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from marsbench.findings.cells import BENCHMARKS, Cells, answers_of, latest_cells
from marsbench.findings.sweep import ALLOWED_LOSS
from marsbench.rows.kinds import EvaluationRow, Row
from marsbench.statistics.selection import CrossFitted, cross_fitted, fastest_within
from marsbench.studies.gains.lines import CHOSEN, CURVE


class Choice(NamedTuple):
    """The thresholds chosen on one benchmark."""

    rows: Sequence[EvaluationRow]  # of the lines of `CURVE`
    by_all: int  # place of what all questions choose
    fitted: CrossFitted


def with_choice(rows: Sequence[Row]) -> list[Row]:
    """The rows, and those of the line whose thresholds were chosen on other questions, as if it had been measured."""
    cells = latest_cells(rows)
    return [*rows, *[_as_cell(found) for name in BENCHMARKS if (found := choice(cells, name))]]


def choice(cells: Cells, benchmark: str) -> Choice | None:
    """The thresholds chosen on a benchmark; None unless all lines to choose from answered the same questions."""
    rows = [cells.get((arm, benchmark)) for arm in CURVE]
    done = [row for row in rows if row is not None and row.status == "done"]
    counts = {len(row.correct) for row in done}
    if len(done) < len(CURVE) or len(counts) > 1 or min(counts) < 2:
        return None
    settings = [answers_of(row) for row in done]
    by_all = fastest_within(settings, ALLOWED_LOSS, range(len(done[0].correct)))
    return Choice(done, by_all, cross_fitted(settings, ALLOWED_LOSS))


def _as_cell(found: Choice) -> EvaluationRow:
    answers = found.fitted.answers
    return replace(
        found.rows[0],
        arm=CHOSEN.name,
        method=CHOSEN.method,
        options=CHOSEN.options,
        correct=list(answers.correct),
        emitted=list(answers.emitted),
        forwards=list(answers.forwards),
        others={},
        finished=[],
    )
