"""Rivals: each of them in the ways that were tried for it, on a training seed that no other page has.

What is best here by its own measure stands for the rival elsewhere, so that no page's verdict has had a say in it.
"""

from __future__ import annotations

from dataclasses import replace

from marsbench.findings.between_lines import emits_more, more_accurate
from marsbench.line import Line
from marsbench.rendering.measured import accuracy_table, speed_table
from marsbench.rendering.page import TablePage
from marsbench.running.plans import TablePlan
from marsbench.studies import table2
from marsbench.studies.gains.lines import MEDUSAS, medusa
from marsbench.studies.lines import AR_SFT, speculative
from marsbench.studies.study import table_study


def _again(line: Line, stage: str, words: str) -> Line:
    """A line whose stage is trained otherwise."""
    return replace(line, name=stage, label=f"{line.label}, {words}", stage=stage, published=None)


_DIFFUSION, _SHIFTED, _NO_SFT = (
    next(line for line in table2.PLAN.lines if line.name == name)
    for name in ("block_diffusion", "block_diffusion_shifted", "mars_no_sft")
)
_LONG = _again(_DIFFUSION, "block_diffusion_4x", "four times the steps")
_NO_SFT_HARD = _again(_NO_SFT, "mars_no_sft_hard", "at the adapter's rate")
_TREES = [medusa(stage, words, 3, "a tree") for stage, words in MEDUSAS.items()]
_DRAFTS = [
    replace(speculative("ar_sft", draft), label=f"AR SFT, speculative decoding{words}", published=None)
    for draft, words in {"draft_ar_sft": "", "draft_ar_sft_hard": ", draft at the adapter's rate"}.items()
]
PLAN = TablePlan(
    "rivals",
    "Rivals and what was tried for them",
    (AR_SFT, _DIFFUSION, _LONG, _SHIFTED, _NO_SFT, _NO_SFT_HARD, *_TREES, *_DRAFTS),
    own="Rivals",
    apart=True,
)
PAGE = TablePage(
    plan=PLAN,
    opening=(
        "What MARS is compared with, trained in the ways that were tried for it, at most three each, on a training "
        "seed that no other page has. Those that keep the model's tokens are judged by what they emit, the others by "
        "their accuracy. Elsewhere each is trained as is best here, for as many steps as MARS; Table 2 has block "
        "diffusion in both forms."
    ),
    claims=(
        more_accurate(PLAN, _LONG.name, _DIFFUSION.name, "a", "Block diffusion wants more training"),
        more_accurate(PLAN, _SHIFTED.name, _DIFFUSION.name, "b", "Block diffusion wants tokens predicted as in AR"),
        more_accurate(PLAN, _NO_SFT_HARD.name, _NO_SFT.name, "c", "MARS w/o SFT loss wants a higher rate"),
        emits_more(PLAN, _TREES[1].name, _TREES[0].name, "d", "Medusa wants a higher rate"),
        emits_more(PLAN, _DRAFTS[1].name, _DRAFTS[0].name, "e", "A draft model wants a higher rate"),
    ),
    tables=(accuracy_table, speed_table),
)
STUDY = table_study(PAGE, asks="is every rival at its best?", place=3, in_paper=False)
