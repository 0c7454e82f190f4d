"""Serving: does lowering tau under load buy throughput, as the paper's abstract says, and what does it cost?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from marsbench.rows.kinds import Row
from marsbench.running.plans import TrainedStage
from marsbench.studies.serving.page import draw, render, tally
from marsbench.studies.study import Study

if TYPE_CHECKING:
    from marsbench.running.run import Run


def _measure(run: Run) -> list[Row]:
    from marsbench.studies.serving.measuring import serving_rows

    return serving_rows(run)


STUDY = Study(
    key="serving",
    name="Serving under load",
    asks="can a server raise its throughput on the fly by lowering tau?",
    session="Put a server under load by several policies; writes reports/serving.md.",
    nox="serving-load",
    place=6,
    in_paper=False,
    timed=True,
    measure=_measure,
    stages=(TrainedStage("mars", 4),),
    render=render,
    draw=draw,
    tally=tally,
)
