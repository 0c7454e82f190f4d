"""The page of discrepancies, from made-up rows whose differences are known."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from made_up import answered, sweep_row

from marsbench.findings.cells import BENCHMARKS
from marsbench.line import Line
from marsbench.rows.kinds import EvaluationRow, Row, SweepRow
from marsbench.studies.discrepancies import ALL_MASKS, NO_CACHE, STUDY, tally

QUESTIONS = 20


def cells(arm: str, right: int, tokens: int) -> list[EvaluationRow]:
    """A line that has so many of twenty questions right and emits so many tokens in ten forwards, everywhere."""
    correct, line = [1.0] * right + [0.0] * (QUESTIONS - right), Line(arm, "", "mars", "mars")
    return [answered(line, name, correct, [tokens] * QUESTIONS, [10] * QUESTIONS) for name in BENCHMARKS]


def cell(contender: str, batch_size: int, seconds: Sequence[float]) -> SweepRow:
    """A contender that emits as many tokens in so many seconds as `ar` beside it in one."""
    return sweep_row(contender, contender.partition(",")[0], batch_size, seconds, forwards=50, positions=200)


def section(rows: Sequence[Row], number: str) -> str:
    parts = STUDY.render(rows, "mini").split("\n## ")
    return next(part for part in parts if part.startswith(f"{number}:")).partition("\n\n</details>")[0]


def test_differences_have_their_size_sign_and_verdict() -> None:
    """Guards against a difference taken the wrong way round, in fractions, or called seen where it is not."""
    rows = [*cells("mars_b4", 18, 10), *cells("mars_paper_alignment_b4", 15, 10)]
    rows += [*cells("mars_b4_0.95", 15, 20), *cells("mars_paper_alignment_b4_0.95", 15, 25)]
    lines = [line for line in section(rows, "D1").splitlines() if line.startswith("| MARS")]
    assert "-15.0" in lines[0] and "+0.00" in lines[0] and "accuracy differs" in lines[0]
    assert "+0.0" in lines[1] and "+0.50" in lines[1] and "tokens/forward differs" in lines[1]
    assert tally({0: rows}) == "2 of 2 comparisons of lines differ (2 of one training seed alone)"
    alike = [*cells("mars_b4", 18, 10), *cells("mars_paper_alignment_b4", 18, 10)]
    assert "no difference seen" in section(alike, "D1")
    assert tally({0: alike}) == "0 of 1 comparisons of lines differ (1 of one training seed alone)"


def test_masks_are_compared_within_their_race() -> None:
    """Guards against a ratio of speeds upside down: all masks take twice as long."""
    rows = [cell(NO_CACHE, 1, [1.0, 1.1, 0.9]), cell(ALL_MASKS, 1, [2.0, 2.2, 1.8])]
    (line,) = [line for line in section(rows, "D10").splitlines() if line.startswith("| 1 ")]
    assert "0.50 [0.50, 0.50]" in line and "differs" in line


@pytest.mark.parametrize(
    ("seconds", "said"),
    [([0.5, 0.6], "up to 48"), ([0.5, 1.0], "From batch size 48 on"), ([1.0, 0.5], "From batch size 1 on")],
)
def test_the_knee_is_the_first_batch_size_without_a_gain(seconds: list[float], said: str) -> None:
    """Guards against a knee that is passed over, or found where MARS is faster."""
    rows = [cell("mars", size, [taken] * 3) for size, taken in zip((1, 48), seconds, strict=True)]
    assert said in section(rows, "D14")
