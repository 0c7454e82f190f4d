"""The lines of the paper's Tables 5 and 6, which a sweep races by the clock."""

from __future__ import annotations

from marsbench.running.plans import Arm, TablePlan
from marsbench.studies.lines import BATCH_SIZES, speculative

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
    (
        speculative("ar_sft", "draft_ar_sft"),
        speculative("mars", "draft_ar_sft"),
        speculative("mars", "draft_mars"),
    ),
    benchmarks=("gsm8k",),
    questions=256,
)
