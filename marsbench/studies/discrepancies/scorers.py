"""Two scorers for the same answers, and what a stop string would have saved."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from marsbench.findings.cells import done_cells, latest_cells
from marsbench.findings.claims import Claim, Measured
from marsbench.findings.in_words import p_value
from marsbench.findings.seeds import BySeed
from marsbench.rendering.markdown import table
from marsbench.rows.kinds import Row
from marsbench.statistics.decisions import Bound
from marsbench.statistics.intervals import paired_difference
from marsbench.studies.discrepancies.effects import DIFFERS, SAME, arm
from marsbench.studies.lines import mars_name

STRICT, FLEXIBLE = "strict", "flexible"  # GSM8K's two scores
# The lines whose answers are scored twice and looked through for stop strings.
LOOKED_AT = ("base", "ar_sft", mars_name("mars", 4), mars_name("mars", 4, 0.95))


def scorers(seeds: BySeed) -> str:
    """GSM8K by its two scores, on the same answers, of all training seeds."""
    lines = []
    for name in LOOKED_AT:
        measure = partial(_last_number_minus_filter, name=name)
        found = Claim(measure=measure, bound=Bound(low=0.0), signed=True).over(seeds.values())
        if found.estimate is not None:
            verdict = DIFFERS if found.decided else SAME
            lines.append([arm(name).label, found.found, p_value(found.p), str(found.seeds), verdict])
    head = ["GSM8K", "last number minus lm-eval's filter", "p", "seeds", "verdict"]
    return table(head, lines, text=(0, 4)) if lines else ""


def _last_number_minus_filter(rows: Sequence[Row], name: str) -> Measured:
    """How the two scores of one line differ; nothing where one is missing."""
    row = done_cells(latest_cells(rows), name).get("gsm8k")
    scores = {row.metric: row.correct, **row.others} if row else {}
    if STRICT not in scores or FLEXIBLE not in scores:
        return Measured()
    return Measured(paired_difference({"gsm8k": scores[FLEXIBLE]}, {"gsm8k": scores[STRICT]}).estimate)


def stop_rules(seeds: BySeed) -> str:
    """How many tokens a stop string would have saved, in the answers of all training seeds."""
    lines = []
    for name in LOOKED_AT:
        cells = [row for rows in seeds.values() for row in done_cells(latest_cells(rows), name).values()]
        rows = [row for row in cells if row.past_stop]
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
