"""Real model: what do masks, an adapter and the text so far buy on a model that people use, by the clock too?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from marsbench.rows.kinds import Row
from marsbench.studies.real_model.lines import PLAN
from marsbench.studies.real_model.page import draw, render, tally
from marsbench.studies.study import Study

if TYPE_CHECKING:
    from marsbench.running.run import Run


def _measure(run: Run) -> list[Row]:
    from marsbench.studies.real_model.measuring import real_model_rows

    return real_model_rows(run)


STUDY = Study(
    key="real-model",
    name="Real model",
    asks="what does MARS do for a model that people use, on hardware that everybody has?",
    session="A real model's answers and speed, with and without an adapter; writes reports/real-model.md.",
    place=7,
    in_paper=False,
    plan=PLAN,
    measure=_measure,
    timed=True,
    render=render,
    draw=draw,
    tally=tally,
)
