"""Discrepancies: where the paper and its released code differ, and what each difference comes to."""

from __future__ import annotations

from marsbench.studies.discrepancies.lines import PLAN
from marsbench.studies.discrepancies.page import sections, tally
from marsbench.studies.study import Study, measured_by

STUDY = Study(
    key="discrepancies",
    name="Discrepancies",
    asks="where paper and released code differ: does it matter?",
    place=1,
    plan=PLAN,
    measure=measured_by("marsbench.studies.discrepancies.measuring", "discrepancy_rows"),
    timed=True,
    sections=sections,
    tally=tally,
)
