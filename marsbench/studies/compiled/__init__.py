"""Compiled steps: what does a step as one graph buy, for `ar` and MARS alike, and what bounds it?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from marsbench.rows.kinds import Row
from marsbench.studies.compiled.page import draw, render, tally
from marsbench.studies.study import Study

if TYPE_CHECKING:
    from marsbench.running.run import Run


def _measure(run: Run) -> list[Row]:
    from marsbench.studies.compiled.measuring import compiled_rows

    return compiled_rows(run)


STUDY = Study(
    key="compiled",
    name="Compiled steps",
    asks="what does a step as one graph buy, and how near to the memory's speed is it?",
    session="Race compiled steps against eager ones; writes reports/compiled.md.",
    place=5,
    in_paper=False,
    measure=_measure,
    timed=True,
    render=render,
    draw=draw,
    tally=tally,
)
