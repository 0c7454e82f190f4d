"""Compiled steps: what does a step as one graph buy, for `ar` and MARS alike, and what bounds it?"""

from __future__ import annotations

from marsbench.studies.compiled.page import draw, sections, tally
from marsbench.studies.study import Study, measured_by

STUDY = Study(
    key="compiled",
    name="Compiled steps",
    asks="what does a step as one graph buy, and how near to the memory's speed is it?",
    place=5,
    in_paper=False,
    measure=measured_by("marsbench.studies.compiled.measuring", "compiled_rows"),
    timed=True,
    sections=sections,
    figures=draw,
    tally=tally,
)
