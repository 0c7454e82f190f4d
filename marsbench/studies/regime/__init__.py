"""Regime: does a scale stand where the paper stands, by criteria that look at AR training and untrained masks alone?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from marsbench.rows.kinds import Row
from marsbench.studies.regime.lines import PLAN
from marsbench.studies.regime.page import draw, render, tally
from marsbench.studies.study import Study

if TYPE_CHECKING:
    from marsbench.running.run import Run


def _measure(run: Run) -> list[Row]:
    from marsbench.studies.regime.measuring import regime_rows

    return regime_rows(run)


STUDY = Study(
    key="regime",
    name="Regime",
    asks="is fine-tuning at this scale as gentle, and its base as well trained, as in the paper?",
    session="Is a scale in the paper's regime? Criteria by AR training alone; writes reports/regime.md.",
    place=0,
    in_paper=False,
    plan=PLAN,
    measure=_measure,
    render=render,
    draw=draw,
    tally=tally,
)
