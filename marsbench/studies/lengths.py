"""Lengths: the recipes of Table 2 on questions that take no more steps than training shows, beside those that do."""

from __future__ import annotations

from functools import partial

from marsbench.findings.between_lines import as_accurate, more_accurate
from marsbench.findings.claims import OURS
from marsbench.rendering.figures import accuracy_figure
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
_as_accurate = partial(as_accurate, PLAN, whose=OURS)
CLAIMS = (
    _as_accurate(_RELEASED.name, AR_SFT.name, "a", "within these lengths, MARS matches AR SFT", "within-matches"),
    _as_accurate(
        _PAPER.name, AR_SFT.name, "a", "within these lengths, MARS aligned as in the paper matches AR SFT",
        "within-paper-matches",
    ),
    more_accurate(
        PLAN, _PAPER.name, _RELEASED.name, "b", "aligned as in the paper, MARS keeps more", "within-alignment",
        whose=OURS,
    ),
)  # fmt: skip
PAGE = TablePage(
    plan=PLAN,
    opening=(
        "At scale mini, GSM8K asks for six events and HumanEval for up to six operations, where training has three to "
        "five: one step more than was taught. Here the same checkpoints answer questions of the lengths that training "
        "has; the other four benchmarks are those of Table 2. Table 2 stays the headline: its questions were fixed "
        "before any MARS model was trained."
    ),
    claims=CLAIMS,
    answers=("a", "b"),
    figure="accuracy",
    caption="Accuracy per benchmark and line, with 95 % intervals",
    drawing=accuracy_figure,
)
STUDY = table_study(PAGE, asks="what does MARS lose on questions no longer than those of training?", place=2)
