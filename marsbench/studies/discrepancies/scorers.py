"""Two scorers for the same answers, and what a stop string would have saved."""

from __future__ import annotations

from marsbench.findings.cells import Cells, done_cells
from marsbench.findings.in_words import p_value
from marsbench.findings.sweep import SweepCells
from marsbench.rendering.markdown import table
from marsbench.rows.kinds import EvaluationRow
from marsbench.statistics.intervals import paired_difference
from marsbench.studies.discrepancies.effects import DIFFERS, SAME, arm, signed
from marsbench.studies.lines import mars_name

STRICT, FLEXIBLE = "strict", "flexible"  # GSM8K's two scores
# The lines whose answers are scored twice and looked through for stop strings.
LOOKED_AT = ("base", "ar_sft", mars_name("mars", 4), mars_name("mars", 4, 0.95))


def scorers(cells: Cells, sweep: SweepCells) -> str:
    """GSM8K by its two scores, on the same answers."""
    rows = {arm(name).label: done_cells(cells, name).get("gsm8k") for name in LOOKED_AT}
    lines = [[label, *_scores(row)] for label, row in rows.items() if row is not None]
    known = [line for line in lines if len(line) > 1]
    head = ["GSM8K, in %", "lm-eval's filter", "last number", "last number minus filter, points", "p", "verdict"]
    return table(head, known, text=(0, 5)) if known else ""


def _scores(row: EvaluationRow) -> list[str]:
    """Both scores of one line, and how they differ; nothing where one is missing."""
    scores = {row.metric: row.correct, **row.others}
    if STRICT not in scores or FLEXIBLE not in scores:
        return []
    difference = paired_difference({"gsm8k": scores[FLEXIBLE]}, {"gsm8k": scores[STRICT]})
    shares = [f"{100 * sum(scores[name]) / len(scores[name]):.1f}" for name in (STRICT, FLEXIBLE)]
    verdict = SAME if difference.interval.low <= 0 <= difference.interval.high else DIFFERS
    return [*shares, signed(difference.points, difference.interval, 1), p_value(difference.p_value), verdict]


def stop_rules(cells: Cells, sweep: SweepCells) -> str:
    """How many tokens a stop string would have saved."""
    lines = []
    for name in LOOKED_AT:
        rows = [row for row in done_cells(cells, name).values() if row.past_stop]
        if rows:
            emitted, past = (sum(sum(getattr(row, name)) for row in rows) for name in ("emitted", "past_stop"))
            answers = [count for row in rows for count in row.past_stop]
            ended = [value for row in rows for value in row.finished]
            lines.append(
                [arm(name).label, _percent(sum(ended), len(ended)), f"{sum(map(bool, answers)):,} of {len(answers):,}",
                 _percent(past, emitted), DIFFERS if past else SAME]
            )  # fmt: skip
    head = ["", "ended by EOS, %", "answers with a stop string before", "tokens behind it, % of all", "verdict"]
    return table(head, lines, text=(0, 4)) if lines else ""


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.2f}"
