"""Regime: does a scale stand where the paper stands, by criteria that look at AR training and untrained masks alone?"""

from __future__ import annotations

from marsbench.studies.regime.criteria import PLAN
from marsbench.studies.regime.page import sections, tally
from marsbench.studies.study import Study, measured_by

STUDY = Study(
    key="regime",
    name="Regime",
    asks="is fine-tuning at this scale as gentle, and its base as well trained, as in the paper?",
    place=0,
    in_paper=False,
    plan=PLAN,
    measure=measured_by("marsbench.studies.regime.measuring", "regime_rows"),
    sections=sections,
    tally=tally,
)
