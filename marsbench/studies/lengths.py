"""Lengths: the recipes of Table 2 on questions that take no more steps than training shows, beside those that do."""

from __future__ import annotations

from marsbench.rendering.page import TablePage
from marsbench.running.plans import TablePlan
from marsbench.studies.lines import AR_SFT, mars
from marsbench.studies.study import table_study

_RELEASED, _PAPER = mars("mars", 4), mars("mars_paper_alignment", 4)
PLAN = TablePlan(
    "lengths",
    "Questions no longer than those of training",
    (AR_SFT, _RELEASED, _PAPER, mars("mars", 4, 0.95), mars("mars_paper_alignment", 4, 0.95)),
    within_training=True,
    own="Lengths",
)
PAGE = TablePage(
    plan=PLAN,
    opening=(
        "At scale mini, GSM8K asks for six events and HumanEval for up to six operations, one more than training has. "
        "Here the same checkpoints answer questions of the lengths that training has; the other four benchmarks are "
        "those of Table 2."
    ),
    claims=(),
)
STUDY = table_study(
    PAGE, asks="what does MARS lose on questions no longer than those of training?", place=2, on="table2"
)
