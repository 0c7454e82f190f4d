"""Gains: where MARS's gain comes from, and what is left of it at equal accuracy, which the paper did not test."""

from __future__ import annotations

from typing import TYPE_CHECKING

from marsbench.rows.kinds import Row
from marsbench.studies.gains.lines import MEASURED
from marsbench.studies.gains.page import draw, render, tally
from marsbench.studies.study import Study

if TYPE_CHECKING:
    from marsbench.running.run import Run


def _measure(run: Run) -> list[Row]:
    from marsbench.studies.gains.measuring import gains_rows

    return gains_rows(run)


STUDY = Study(
    key="gains",
    name="Gains",
    asks="where does the gain come from, and what is left of it at equal accuracy?",
    session="Where the gain comes from: rivals at equal accuracy, tokens by class; writes reports/gains.md.",
    place=2,
    plan=MEASURED,
    measure=_measure,
    render=render,
    draw=draw,
    tally=tally,
)
