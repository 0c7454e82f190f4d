"""Figure 1: an answer with the tokens of one forward pass shaded together; the page to explore shows it."""

from __future__ import annotations

from marsbench.findings.claims import Section
from marsbench.line import Line
from marsbench.running.plans import TablePlan
from marsbench.studies.study import Study, measured_by

PLAN = TablePlan(
    "1",
    "One answer, and which forward pass settled each of its tokens",
    (
        Line("ar", "one token per forward pass", "mars", "ar"),
        Line("mars", "MARS (B = 4, tau = .95)", "mars", "mars", {"block_size": 4, "threshold": 0.95}),
        Line("verified", "verified MARS (groups of 4)", "mars", "mars-verified", {"block_size": 4, "layout": "groups"}),
    ),
    benchmarks=("gsm8k",),
    questions=1,
    figure=True,
)

STUDY = Study(
    key="figure1",
    name="Figure 1",
    asks="what does an answer look like, forward pass by forward pass?",
    section=Section("Figure 1", (1,)),
    plan=PLAN,
    scored=False,
    measure=measured_by("marsbench.studies.figure1.measuring", "figure1_rows"),
    sections=lambda rows, scale, seeds: (),
    on="explore",
)
