"""The map: MARS from a base trained long or short, fine-tuned gently or hard; the tables have one of the corners."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from marsbench.findings.between_lines import emits_more, more_accurate
from marsbench.findings.cells import Cells
from marsbench.findings.claims import Claim
from marsbench.line import Line
from marsbench.rendering.figures import Labelled, labelled_figure, line_on, shared_benchmarks
from marsbench.rendering.page import TablePage
from marsbench.running.plans import TablePlan
from marsbench.statistics.intervals import Estimate
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


def _at(line: Line, ending: str) -> Line:
    """A line of the tables in a corner."""
    return replace(
        line, name=line.name + ending, label=f"{line.label}, {CORNERS[ending]}", stage=line.stage + ending,
        published=None, optional=True,
    )  # fmt: skip


PLAN = TablePlan(
    "map",
    "Where MARS pays",
    tuple(_at(line, ending) for ending in CORNERS for line in _LINES),
    own="Map",
)
_ONE, _B4, _B16 = mars_name("mars", 4), mars_name("mars", 4, _SURE), mars_name("mars", 16, _SURE)
_MATCHES = [more_accurate(PLAN, _ONE + ending, AR_SFT.name + ending) for ending in CORNERS]
_ABLATIONS = [more_accurate(PLAN, _ONE + ending, mars_name("mars_no_sft", 4) + ending) for ending in CORNERS]
_HARD = "_hard_sft"
_RATE = (
    emits_more(
        PLAN, _B4 + _HARD, _B4, "Ten times the learning rate buys MARS tokens per forward pass at tau = .95",
        "hard-emits",
        beside=(
            ("accuracy", more_accurate(PLAN, _B4 + _HARD, _B4)),
            ("what it costs AR SFT", more_accurate(PLAN, AR_SFT.name + _HARD, AR_SFT.name)),
            ("B = 16 over B = 4 there", emits_more(PLAN, _B16 + _HARD, _B4 + _HARD)),
        ),
    ),
)  # fmt: skip


def _draw(cells: Cells, plan: TablePlan, path_stem: Path) -> list[Path]:
    """By corner: what MARS loses at one token, what its ablation loses, and tokens per forward pass by block size."""
    rows, benchmarks = list(cells.values()), shared_benchmarks(cells, plan)

    def effects(claims: Sequence[Claim]) -> dict[str, Estimate]:
        found = zip(CORNERS.values(), [claim.measure(rows).estimate for claim in claims], strict=True)
        return {words: effect for words, effect in found if effect is not None}

    speeds = {
        f"B = {size}": {
            words: line[0]
            for ending, words in CORNERS.items()
            if (line := line_on(cells, mars_name("mars", size, _SURE) + ending, benchmarks))
        }
        for size in BLOCK_SIZES
    }
    panels = (
        Labelled("MARS minus AR SFT, points", {"": effects(_MATCHES)}, level=0.0),
        Labelled("MARS minus w/o SFT loss, points", {"": effects(_ABLATIONS)}, level=0.0),
        Labelled("tokens per forward pass at tau = .95", speeds),
    )
    return labelled_figure(panels, path_stem)


PAGE = TablePage(
    plan=PLAN,
    opening=(
        "The recipes of the tables in four corners: from the base that they start from and from one that was trained "
        "two thirds as long, fine-tuned at their gentle rate and at ten times that (*hard*, AR SFT too). One training "
        "seed but for the first corner. **In part:** curves over training steps stand on this page only where "
        "`marsbench reproduce curves` has measured them."
    ),
    claims=_RATE,
    lines=tuple(name + ending for ending in CORNERS for name in (AR_SFT.name, _ONE, _B4)),
    figure="corners",
    caption=(
        "By corner: what MARS (B = 4) loses to AR SFT at one token per forward pass, what it is ahead of MARS w/o SFT "
        "loss, and its tokens per forward pass at tau = .95 by block size"
    ),
    drawing=_draw,
)
STUDY = table_study(PAGE, asks="where does MARS pay: base, rate and block size?", place=3, in_paper=False, on="regime")
