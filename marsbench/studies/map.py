"""The map: MARS from a base trained long or short, fine-tuned gently or hard; the tables have one of the corners."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from marsbench.findings.between_lines import as_accurate, emits_more, more_accurate
from marsbench.rendering.measured import accuracy_table, speed_table
from marsbench.rendering.page import TablePage
from marsbench.running.plans import Arm, TablePlan
from marsbench.studies.lines import AR_SFT, BLOCK_SIZES, mars, mars_name
from marsbench.studies.study import table_study

CORNERS = {  # ending of its stages -> its words
    "": "long base, gentle",
    "_of_short_base": "short base, gentle",
    "_hard_sft": "long base, hard",
    "_hard_sft_of_short_base": "short base, hard",
}
_SURE = 0.95
_LINES = (
    AR_SFT,
    mars("mars", 4),
    *[mars("mars", size, _SURE) for size in BLOCK_SIZES],
    mars("mars_no_sft", 4),
)


def _at(arm: Arm, ending: str) -> Arm:
    """A line of the tables in a corner."""
    return replace(
        arm, name=arm.name + ending, label=f"{arm.label}, {CORNERS[ending]}", stage=arm.stage + ending,
        published=None, optional=True,
    )  # fmt: skip


PLAN = TablePlan(
    "map",
    "Where MARS pays",
    tuple(_at(arm, ending) for ending in CORNERS for arm in _LINES),
    own="Map",
)
_ONE, _B4, _B16 = mars_name("mars", 4), mars_name("mars", 4, _SURE), mars_name("mars", 16, _SURE)
_less, _more = partial(as_accurate, PLAN), partial(emits_more, PLAN)
CLAIMS = (
    *[
        _less(_ONE + ending, AR_SFT.name + ending, "a", f"MARS at one token matches AR SFT ({words})",
              f"matches{ending}", again=not ending)
        for ending, words in CORNERS.items()
    ],
    *[
        more_accurate(PLAN, _ONE + ending, mars_name("mars_no_sft", 4) + ending, "b",
                      f"Without the SFT loss MARS is worse ({words})", f"ablation{ending}", again=not ending)
        for ending, words in CORNERS.items()
    ],
    *[
        _more(_B16 + ending, _B4 + ending, "c", f"Larger blocks emit more at tau = .95 ({words})",
              f"larger{ending}")
        for ending, words in CORNERS.items()
    ],
)  # fmt: skip
PAGE = TablePage(
    plan=PLAN,
    opening=(
        "The recipes of the tables in four corners: from the base that they start from and from one that was trained "
        "two thirds as long, fine-tuned at their gentle rate and at the adapter's, ten times as high. *Hard* is AR SFT "
        "too, which MARS continues from."
    ),
    claims=CLAIMS,
    answers=("a",),
    lines=tuple(name + ending for ending in CORNERS for name in (AR_SFT.name, _ONE, _B4)),
    figure="corners",
    caption=(
        "Accuracy against tokens per forward pass, a curve for each corner: MARS at one token, and at tau = .95 with "
        "B = 4, 8 and 16"
    ),
    curves={
        words: [_ONE + ending, *[mars_name("mars", size, _SURE) + ending for size in BLOCK_SIZES]]
        for ending, words in CORNERS.items()
    },
    tables=(accuracy_table, speed_table),
)
STUDY = table_study(PAGE, asks="where does MARS pay: base, rate and block size?", place=3, in_paper=False)
