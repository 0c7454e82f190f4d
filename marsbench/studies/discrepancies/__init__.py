"""Discrepancies: where the paper and its released code differ, and what each difference comes to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from marsbench.rows.kinds import Row
from marsbench.studies.discrepancies.lines import PLAN
from marsbench.studies.discrepancies.page import draw, render, tally
from marsbench.studies.study import Study

if TYPE_CHECKING:
    from marsbench.running.run import Run


def _measure(run: Run) -> list[Row]:
    from marsbench.studies.discrepancies.measuring import discrepancy_rows

    return discrepancy_rows(run)


STUDY = Study(
    key="discrepancies",
    name="Discrepancies",
    asks="where paper and released code differ: does it matter?",
    session="What difference it makes where paper and released code differ; writes reports/discrepancies.md.",
    place=1,
    plan=PLAN,
    measure=_measure,
    timed=True,
    render=render,
    draw=draw,
    tally=tally,
)
