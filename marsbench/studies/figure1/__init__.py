"""Figure 1: an answer with the tokens of one forward pass shaded together."""

from __future__ import annotations

from marsbench.findings.claims import Section
from marsbench.studies.figure1.page import PLAN, draw, sections
from marsbench.studies.study import Study, measured_by

STUDY = Study(
    key="figure1",
    name="Figure 1",
    asks="what does an answer look like, forward pass by forward pass?",
    section=Section("Figure 1", (1,)),
    plan=PLAN,
    scored=False,
    measure=measured_by("marsbench.studies.figure1.measuring", "figure1_rows"),
    sections=sections,
    figures=draw,
)
