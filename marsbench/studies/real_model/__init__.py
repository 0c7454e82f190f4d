"""Real model: what do masks, an adapter and the text so far buy on a model that people use, by the clock too?"""

from __future__ import annotations

from marsbench.studies.real_model.lines import PLAN
from marsbench.studies.real_model.page import CLAIMS, draw, sections, tally
from marsbench.studies.study import Study, measured_by, ours

STUDY = Study(
    key="real-model",
    name="Real model",
    asks="what does MARS do for a model that people use, on hardware that everybody has?",
    place=7,
    in_paper=False,
    plan=PLAN,
    measure=measured_by("marsbench.studies.real_model.measuring", "real_model_rows"),
    timed=True,
    sections=sections,
    figures=draw,
    tally=tally,
    claims=ours("real-model", CLAIMS),
)
