"""Engine: are the lossless methods exact, how fast is the loop, and where does the time of a step go?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from marsbench.racing.grid import checkpoints_of
from marsbench.rows.kinds import Row
from marsbench.studies.engine.contenders import EXACT, RACE
from marsbench.studies.engine.page import draw, render
from marsbench.studies.study import Study

if TYPE_CHECKING:
    from marsbench.running.run import Run


def _measure(run: Run) -> list[Row]:
    from marsbench.studies.engine.measuring import engine_rows

    return engine_rows(run)


STUDY = Study(
    key="engine",
    name="Engine",
    asks="are the lossless methods exact, and what does each cost?",
    session="Race the decoding methods and check the lossless ones against AR; writes reports/engine.md.",
    place=3,
    in_paper=False,
    measure=_measure,
    timed=True,
    stages=tuple(checkpoints_of((*RACE, *EXACT))),
    render=render,
    draw=draw,
)
