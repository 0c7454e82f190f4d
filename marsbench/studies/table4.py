"""Table 4: accuracy and tokens per forward pass at tau = .95, by block size.

Lines of our own stand above the paper's: AR SFT, and the same checkpoints at one token per forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from marsbench.findings.cells import Cells
from marsbench.findings.claims import AccuracyClaim, Claim, SpeedClaim, TokensClaim
from marsbench.findings.paper_claims import on_cells
from marsbench.rendering.curve_figures import average_figure
from marsbench.rendering.measured import accuracy_table, speed_table
from marsbench.rendering.page import Page
from marsbench.running.plans import TablePlan
from marsbench.studies.lines import AR_SFT, BLOCK_SIZES, mars, mars_name
from marsbench.studies.study import table_study

THRESHOLD = 0.95
SECTION = "Section 4.4: Table 4"
PLAN = TablePlan(
    "4",
    "Accuracy and tokens per forward pass at tau = .95, by block size",
    (AR_SFT, *[mars("mars", size, threshold) for threshold in (None, THRESHOLD) for size in BLOCK_SIZES]),
)


def _claims() -> Iterator[Claim]:
    smallest, *larger = BLOCK_SIZES
    for size, next_size in pairwise(BLOCK_SIZES):
        pair = mars_name("mars", next_size, THRESHOLD), mars_name("mars", size, THRESHOLD)
        yield SpeedClaim("a", f"B = {next_size} emits more tokens per forward pass than B = {size}", *pair)
    for size in larger:
        pair = mars_name("mars", smallest, THRESHOLD), mars_name("mars", size, THRESHOLD)
        yield AccuracyClaim("b", f"B = {size} costs some accuracy", *pair)
    for size in BLOCK_SIZES:
        text = f"MARS with B = {size} stays level with AR SFT"
        pair = mars_name("mars", size, THRESHOLD), "ar_sft"
        yield AccuracyClaim("c", text, *pair, margin=2.0, in_abstract=size == smallest)
    for size in BLOCK_SIZES:
        pair = mars_name("mars", size, THRESHOLD), mars_name("mars", size)
        yield AccuracyClaim("d", f"Ours: several tokens per forward pass cost little at B = {size}", *pair, margin=2.0)


def _several_tokens() -> Iterator[Claim]:
    """What the page shows without a claim: that there is more than one token per forward pass at all."""
    for size in BLOCK_SIZES:
        text = f"MARS emits several tokens per forward pass (B = {size})"
        line = mars_name("mars", size, THRESHOLD)
        yield TokensClaim("", text, line, bound=1.0, in_abstract=size == BLOCK_SIZES[0], check=True)


def _draw(cells: Cells, plan: TablePlan, path_stem: Path) -> list[Path]:
    """From one token per forward pass to tau = .95, for each block size."""
    lines = {f"MARS (B = {size})": [mars_name("mars", size, t) for t in (None, THRESHOLD)] for size in BLOCK_SIZES}
    return average_figure(cells, plan, lines, path_stem)


PAGE = Page(
    plan=PLAN,
    opening=(
        "MARS at three block sizes, as in the MARS paper's Table 4 (arXiv 2604.07023), decoded greedily and scored by "
        "one program. The lines without tau are ours, for comparison."
    ),
    claims=tuple(_claims()),
    figure="tradeoff",
    caption="Average accuracy against tokens per forward pass, by block size, with 95 % intervals",
    drawing=_draw,
    tables=(accuracy_table, speed_table),
)

STUDY = table_study(
    PAGE,
    asks="how many tokens per forward pass, at what accuracy, by block size?",
    section=SECTION,
    session="Reproduce the paper's Table 4 (several tokens per forward, by block size); writes reports/table4.md.",
    more_claims=tuple(on_cells(tuple(_several_tokens()), PLAN, SECTION)),
)
