"""Table 9: MARS against Jacobi decoding, which needs no training."""

from __future__ import annotations

from marsbench.findings.between_lines import as_accurate, emits, emits_more
from marsbench.findings.claims import Section
from marsbench.line import Line
from marsbench.rendering.page import TablePage
from marsbench.running.plans import TablePlan
from marsbench.statistics.decisions import Bound
from marsbench.studies.lines import AR_SFT, mars, mars_name
from marsbench.studies.study import table_study

MARS = mars_name("mars", 4, 0.95)
PLAN = TablePlan(
    "9",
    "MARS against Jacobi decoding",
    (
        AR_SFT,
        Line("jacobi", "AR SFT, Jacobi decoding", "ar_sft", "jacobi", {"block_size": 4}, "jacobi"),
        mars("mars", 4, 0.95),
    ),
)

PAGE = TablePage(
    plan=PLAN,
    opening=(
        "Two ways to emit several tokens per forward pass without a second model, as in the MARS paper's Table 9 "
        "(arXiv 2604.07023)."
    ),
    claims=(
        emits(PLAN, "jacobi", Bound(high=1.1), "Jacobi decoding gains almost nothing", "jacobi-slow"),
        emits_more(
            PLAN, MARS, "jacobi", "MARS emits more tokens per forward pass than Jacobi decoding", "beats-jacobi"
        ),
        as_accurate(PLAN, MARS, "jacobi", "MARS is about as accurate as Jacobi decoding", "level-with-jacobi"),
    ),
    deviations=(
        "Jacobi decoding is exact, its answers are those of AR decoding; its window holds 4 tokens, and tokens of the "
        "prompt drawn at random enter it.",
    ),
)

STUDY = table_study(
    PAGE,
    asks="is it better than Jacobi decoding, which needs no training?",
    section=Section("Table 9", appendix="C"),
    on="gains",
)
