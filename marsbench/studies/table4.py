"""Table 4: accuracy and tokens per forward pass at tau = .95, by block size.

Lines of our own stand above the paper's: AR SFT, and the same checkpoints at one token per forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from marsbench.findings.between_lines import as_accurate, emits, emits_more, more_accurate
from marsbench.findings.claims import OURS, Claim, Section
from marsbench.rendering.measured import accuracy_table, speed_table
from marsbench.rendering.page import TablePage
from marsbench.running.plans import TablePlan
from marsbench.statistics.decisions import Bound
from marsbench.studies.lines import AR_SFT, BLOCK_SIZES, mars, mars_name
from marsbench.studies.study import table_study

THRESHOLD = 0.95
PLAN = TablePlan(
    "4",
    "Accuracy and tokens per forward pass at tau = .95, by block size",
    (AR_SFT, *[mars("mars", size, threshold) for threshold in (None, THRESHOLD) for size in BLOCK_SIZES]),
)


def _claims() -> Iterator[Claim]:
    smallest, *larger = BLOCK_SIZES
    for size, next_size in pairwise(BLOCK_SIZES):
        pair = mars_name("mars", next_size, THRESHOLD), mars_name("mars", size, THRESHOLD)
        text = f"B = {next_size} emits more tokens per forward pass than B = {size}"
        yield emits_more(PLAN, *pair, "a", text, f"more-tokens-b{next_size}")
    for size in larger:
        pair = mars_name("mars", smallest, THRESHOLD), mars_name("mars", size, THRESHOLD)
        text = f"B = {size} costs some accuracy"
        yield more_accurate(PLAN, *pair, "b", text, f"costs-b{size}")
    for size in BLOCK_SIZES:
        pair = mars_name("mars", size, THRESHOLD), "ar_sft"
        text = f"MARS with B = {size} stays level with AR SFT"
        yield as_accurate(PLAN, *pair, "c", text, f"level-b{size}", in_abstract=size == smallest)
    for size in BLOCK_SIZES:
        pair = mars_name("mars", size, THRESHOLD), mars_name("mars", size)
        text = f"several tokens per forward pass cost little at B = {size}"
        yield as_accurate(PLAN, *pair, "d", text, f"cost-little-b{size}", whose=OURS)


# What the page shows without a claim: that there is more than one token per forward pass at all.
_SEVERAL_TOKENS = tuple(
    emits(
        PLAN, mars_name("mars", size, THRESHOLD), Bound(low=1.0), name=f"several-tokens-b{size}", check=True,
        text=f"MARS emits several tokens per forward pass (B = {size})", in_abstract=size == BLOCK_SIZES[0],
    )
    for size in BLOCK_SIZES
)  # fmt: skip
PAGE = TablePage(
    plan=PLAN,
    opening=(
        "MARS at three block sizes, as in the MARS paper's Table 4 (arXiv 2604.07023), decoded greedily and scored by "
        "one program. The lines without tau are ours, for comparison."
    ),
    claims=tuple(_claims()),
    answers=("more-tokens-b8", "more-tokens-b16", "level-b4", "level-b16", "cost-little-b4"),
    figure="tradeoff",
    caption="Average accuracy against tokens per forward pass, by block size, with 95 % intervals",
    curves={f"MARS (B = {size})": [mars_name("mars", size, t) for t in (None, THRESHOLD)] for size in BLOCK_SIZES},
    tables=(accuracy_table, speed_table),
)

STUDY = table_study(
    PAGE,
    asks="how many tokens per forward pass, at what accuracy, by block size?",
    section=Section("Table 4", (4, 4)),
    more_claims=_SEVERAL_TOKENS,
)
