"""Rivals: each of them in the ways that were tried for it, on a training seed that no other page has.

What is best here by its own measure stands for the rival elsewhere, so that no page's verdict has had a say in it.
"""

from __future__ import annotations

from dataclasses import replace

from marsbench.line import Line
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
    seed=5,
)
PAGE = TablePage(
    plan=PLAN,
    opening=(
        "What MARS is compared with, trained in the ways that were tried for it, at most three each, on a training "
        "seed that no other page has. Those that keep the model's tokens are judged by what they emit, the others by "
        "their accuracy. Elsewhere each is trained as is best here, for as many steps as MARS; Table 2 has block "
        "diffusion in both forms."
    ),
    claims=(),
)
STUDY = table_study(PAGE, asks="is every rival at its best?", place=3, in_paper=False, on="gains")
