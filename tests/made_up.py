"""What tests of pages share: the pages, rows that nobody measured, and a page's text taken apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from marsbench.rows.kinds import EvaluationRow
from marsbench.running.plans import Arm
from marsbench.studies import figure6, table2, table3, table4, table8, table9

PAGES = [module.PAGE for module in (table2, table3, table4, table8, table9, figure6)]


def answered(
    arm: Arm, benchmark: str, correct: Sequence[float], emitted: Sequence[int], forwards: Sequence[int], **more: Any
) -> EvaluationRow:
    """The row of a table's line on a benchmark, question by question; `more` of its fields if they matter."""
    return EvaluationRow(
        key=f"{arm.name}/{benchmark}",
        status="done",
        reason="",
        scale="tiny",
        arm=arm.name,
        stage=arm.stage,
        method=arm.method,
        options=arm.options,
        benchmark=f"mini_{benchmark}",
        metric="exact_match",
        correct=[float(right) for right in correct],
        emitted=[int(tokens) for tokens in emitted],
        forwards=[int(passes) for passes in forwards],
        finished=[1] * len(correct),
        **more,
    )


def section(page: str, title: str) -> str:
    """What stands below a heading, up to the next."""
    return next(part for part in page.split("\n## ") if part.startswith(title))


def lines_of(text: str) -> list[list[str]]:
    """All table lines of a text, split into cells."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line[:1] == "|"]
