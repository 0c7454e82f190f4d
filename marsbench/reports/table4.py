"""Table 4: accuracy and tokens per forward pass at tau = .95, by block size.

Lines of our own stand above the paper's: AR SFT, and the same checkpoints at one token per forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from marsbench.reports.cells import Cells
from marsbench.reports.claims import AccuracyClaim, Claim, SpeedClaim
from marsbench.reports.curve_figures import average_figure
from marsbench.reports.measured import accuracy_table, speed_table
from marsbench.reports.page import Page
from marsbench.sweeps.plans import BLOCK_SIZES, TABLES, TablePlan, mars_name

THRESHOLD = 0.95


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
        yield AccuracyClaim("c", text, mars_name("mars", size, THRESHOLD), "ar_sft", margin=2.0)
    for size in BLOCK_SIZES:
        pair = mars_name("mars", size, THRESHOLD), mars_name("mars", size)
        yield AccuracyClaim("d", f"Ours: several tokens per forward pass cost little at B = {size}", *pair, margin=2.0)


def _draw(cells: Cells, plan: TablePlan, path_stem: Path) -> list[Path]:
    """From one token per forward pass to tau = .95, for each block size."""
    lines = {f"MARS (B = {size})": [mars_name("mars", size, t) for t in (None, THRESHOLD)] for size in BLOCK_SIZES}
    return average_figure(cells, plan, lines, path_stem)


PAGE = Page(
    plan=TABLES["table4"],
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
