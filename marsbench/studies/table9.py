"""Table 9: MARS against Jacobi decoding, which needs no training."""

from __future__ import annotations

from functools import partial

from marsbench.findings.between_lines import as_accurate, emits, emits_more
from marsbench.findings.claims import OURS, Section
from marsbench.line import Line
from marsbench.rendering.measured import HOW_TO_READ_THE_CELLS, accuracy_table, speed_table
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


_emits_more, _as_accurate = partial(emits_more, PLAN), partial(as_accurate, PLAN)
PAGE = TablePage(
    plan=PLAN,
    opening=(
        "Two ways to emit several tokens per forward pass without a second model, as in the MARS paper's Table 9 "
        "(arXiv 2604.07023), decoded greedily and scored by one program."
    ),
    claims=(
        emits(PLAN, "jacobi", Bound(high=1.1), "a", "Jacobi decoding gains almost nothing", "jacobi-slow"),
        _emits_more(
            MARS, "jacobi", "b", "MARS emits more tokens per forward pass than Jacobi decoding", "beats-jacobi"
        ),
        _as_accurate(MARS, "jacobi", "c", "MARS is about as accurate as Jacobi decoding", "level-with-jacobi"),
        _as_accurate(MARS, "ar_sft", "c", "MARS is about as accurate as AR SFT", again=True),  # Table 4's
        _as_accurate("jacobi", "ar_sft", "d", "Jacobi decoding says what AR decoding says", whose=OURS, check=True),
    ),
    answers=("a", "b", "c"),
    figure="tradeoff",
    caption="Average accuracy against tokens per forward pass of MARS and Jacobi decoding, with 95 % intervals",
    curves={line.label: [line.name] for line in reversed(PLAN.lines) if line.name != "ar_sft"},
    reading=f"{HOW_TO_READ_THE_CELLS} Jacobi decoding emits what has come to its fixed point.",
    tables=(accuracy_table, speed_table),
    deviations=(
        "Jacobi decoding is exact, its answers are those of AR decoding; its window holds 4 tokens, and tokens of the "
        "prompt drawn at random enter it.",
    ),
)

STUDY = table_study(
    PAGE, asks="is it better than Jacobi decoding, which needs no training?", section=Section("Table 9", appendix="C")
)
