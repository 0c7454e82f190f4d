"""Speed: how fast, at what accuracy, against what, at which batch size; the paper's Tables 5 and 6 by the clock."""

from __future__ import annotations

from marsbench.racing.grid import read_grid, shipped_grid
from marsbench.rendering.layout import laid_out
from marsbench.running.plans import Arm, TablePlan
from marsbench.studies.lines import BATCH_SIZES, speculative
from marsbench.studies.speedup.claims import TABLE5_SECTION, TABLE6_SECTION, decoded_by_the_sweep, speed_claims
from marsbench.studies.speedup.page import draw, slots
from marsbench.studies.study import Item, Study

# The lines of the paper's Tables 5 and 6, which the sweep races by the clock.
CACHE_BLOCKS = (4, 8, 16, 32, 64, 128, 256)


def _timed(batch_size: int) -> list[Arm]:
    """The lines of Table 5 at a batch size: AR, MARS without a cache, and MARS with caches of several block sizes."""
    batch, mars = {"batch_size": batch_size}, {"block_size": 4, "threshold": 0.95}
    cached = [
        Arm(
            f"mars_cache{block}_x{batch_size}", f"MARS, B_cache = {block}, batch {batch_size}", "mars",
            "mars-block-cache", {**mars, "cache_block": block, **batch}, "mars_block_cache",
        )
        for block in CACHE_BLOCKS
    ]  # fmt: skip
    return [
        Arm(f"ar_x{batch_size}", f"AR SFT, KV cache, batch {batch_size}", "ar_sft", "ar", batch, "ar_kv"),
        Arm(
            f"mars_no_cache_x{batch_size}", f"MARS, no cache, batch {batch_size}", "mars", "mars-no-cache",
            {**mars, **batch}, "mars_no_cache",
        ),
        *cached,
    ]  # fmt: skip


TABLE5 = TablePlan(
    "5",
    "Wall-clock speed with the block-level cache, by batch size",
    tuple(arm for size in BATCH_SIZES for arm in _timed(size)),
    benchmarks=("gsm8k",),
    questions=256,
)
TABLE6 = TablePlan(
    "6",
    "Speculative decoding with AR and MARS drafts and targets",
    (speculative("ar_sft", "draft_ar_sft"), speculative("mars", "draft_ar_sft"), speculative("mars", "draft_mars")),
    benchmarks=("gsm8k",),
    questions=256,
)


STUDY = Study(
    key="speedup",
    name="Speed",
    asks="how fast, at what accuracy, against what, at which batch size?",
    place=4,
    grid=lambda scale, quick: read_grid(shipped_grid(scale.scale), quick=quick),
    sections=laid_out(__package__, slots),
    figures=draw,
    claims=tuple(speed_claims()),
    remark=decoded_by_the_sweep,
    holds=(
        Item(
            key="table5",
            name="Table 5",
            asks="how fast by the clock is the block-level cache, by batch size?",
            anchor="#table-5-the-block-level-cache",
            section=TABLE5_SECTION,
            plan=TABLE5,
        ),
        Item(
            key="table6",
            name="Table 6",
            asks="does MARS help speculative decoding, as target and as draft?",
            anchor="#table-6-speculative-decoding",
            section=TABLE6_SECTION,
            plan=TABLE6,
        ),
    ),
)
