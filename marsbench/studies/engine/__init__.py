"""Engine: are the lossless methods exact, and where does the time of a step go?"""

from __future__ import annotations

from marsbench.racing.grid import checkpoints_of
from marsbench.studies.engine.contenders import EXACT, PROFILED
from marsbench.studies.engine.page import sections
from marsbench.studies.study import Study, measured_by

STUDY = Study(
    key="engine",
    name="Engine",
    asks="are the lossless methods exact, and where does a step's time go?",
    place=3,
    in_paper=False,
    measure=measured_by("marsbench.studies.engine.measuring", "engine_rows"),
    timed=True,
    stages=tuple(checkpoints_of((*PROFILED, *EXACT))),
    sections=sections,
)
