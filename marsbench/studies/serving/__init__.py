"""Serving: does lowering tau under load buy throughput, as the paper's abstract says, and what does it cost?"""

from __future__ import annotations

from marsbench.running.plans import TrainedStage
from marsbench.studies.serving.page import CLAIMS, draw, sections, tally
from marsbench.studies.study import Study, measured_by, ours

STUDY = Study(
    key="serving",
    name="Serving under load",
    asks="what do users of a server get, and can it raise its throughput on the fly by lowering tau?",
    place=6,
    in_paper=False,
    timed=True,
    measure=measured_by("marsbench.studies.serving.measuring", "serving_rows"),
    stages=(TrainedStage("mars", 4),),
    sections=sections,
    figures=draw,
    tally=tally,
    claims=ours("serving", CLAIMS),
)
