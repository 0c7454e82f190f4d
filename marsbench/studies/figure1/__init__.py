"""Figure 1: an answer with the tokens of one forward pass shaded together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from marsbench.findings.claims import Section
from marsbench.rows.kinds import Row
from marsbench.studies.figure1.lines import PLAN
from marsbench.studies.figure1.page import draw, render
from marsbench.studies.study import Study

if TYPE_CHECKING:
    from marsbench.running.run import Run


def _measure(run: Run) -> list[Row]:
    from marsbench.studies.figure1.measuring import figure1_rows

    return figure1_rows(run)


STUDY = Study(
    key="figure1",
    name="Figure 1",
    asks="what does an answer look like, forward pass by forward pass?",
    session="Reproduce the paper's Figure 1 (an answer, forward pass by forward pass); writes reports/figure1.md.",
    section=Section("Figure 1", (1,)),
    plan=PLAN,
    scored=False,
    measure=_measure,
    render=render,
    draw=draw,
)
