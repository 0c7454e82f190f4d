"""Two lines compared: what one has over the other on the same questions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from marsbench.findings.cells import Cells, answers_of, done_cells
from marsbench.findings.in_words import bracketed, p_value, signed_number
from marsbench.rendering.markdown import table
from marsbench.running.plans import Arm
from marsbench.statistics.intervals import (
    Interval,
    PairedDifference,
    mean_of_benchmarks,
    paired_difference,
    speed_difference,
)
from marsbench.studies.discrepancies.lines import PLAN

DIFFERS, SAME, NOT_RUN = "differs", "no difference seen", "not run"


@dataclass(frozen=True)
class Effect:
    """What a line has over another on the same questions."""

    accuracy: PairedDifference
    tokens: float  # per forward pass
    tokens_interval: Interval

    @property
    def verdict(self) -> str:
        """Which of the two differ."""
        found = {"accuracy": self.accuracy.interval, "tokens/forward": self.tokens_interval}
        names = [name for name, interval in found.items() if not interval.low <= 0 <= interval.high]
        return f"{' and '.join(names)} {DIFFERS if len(names) == 1 else 'differ'}" if names else SAME


def effect(cells: Cells, first: str, second: str) -> Effect | None:
    """Line `first` minus line `second`, on the benchmarks that both were measured on; None if there are none."""
    mine, theirs = done_cells(cells, first), done_cells(cells, second)
    shared = [name for name in mine if name in theirs]
    if not shared:
        return None
    accuracy = paired_difference(
        {name: mine[name].correct for name in shared}, {name: theirs[name].correct for name in shared}
    )
    tokens = mean_of_benchmarks([speed_difference(answers_of(mine[name]), answers_of(theirs[name])) for name in shared])
    return Effect(accuracy, tokens.value, tokens.interval)


def effects_table(cells: Cells, pairs: Sequence[tuple[str, str]]) -> str:
    """A table of differences between pairs of lines."""
    head = ["", "accuracy, points", "p", "tokens/forward", "questions", "verdict"]
    return table(head, [_effect_line(cells, *pair) for pair in pairs], text=(0, 5))


def _effect_line(cells: Cells, first: str, second: str) -> list[str]:
    words = f"{arm(first).label} minus {arm(second).label}"
    found = effect(cells, first, second)
    if found is None:
        return [words, "", "", "", "", NOT_RUN]
    return [
        words,
        signed(found.accuracy.points, found.accuracy.interval, 1),
        p_value(found.accuracy.p_value),
        signed(found.tokens, found.tokens_interval, 2),
        f"{found.accuracy.n:,}",
        found.verdict,
    ]


def signed(value: float, interval: Interval, digits: int) -> str:
    return f"{signed_number(value, digits)} {bracketed(interval, digits, signed=True)}"


def arm(name: str) -> Arm:
    return next(arm for arm in PLAN.arms if arm.name == name)
