"""Gains: where MARS's gain comes from, and what is left of it at equal accuracy, which the paper did not test."""

from __future__ import annotations

from marsbench.studies.gains.lines import MEASURED
from marsbench.studies.gains.page import PAGE
from marsbench.studies.study import Study, measured_by, ours

STUDY = Study(
    key="gains",
    name="Gains",
    asks="where does the gain come from, and what is left of it at equal accuracy?",
    place=2,
    plan=MEASURED,
    measure=measured_by("marsbench.studies.gains.measuring", "gains_rows"),
    sections=PAGE.sections,
    figures=PAGE.figures,
    claims=ours("gains", PAGE.claims),
)
