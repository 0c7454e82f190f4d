"""The lines of the page of discrepancies, and the contenders of its two small races."""

from __future__ import annotations

from typing import Any

from marsbench.presets import Preset
from marsbench.racing.grid import Contender, Grid
from marsbench.running.plans import Arm, TablePlan
from marsbench.studies.lines import ABLATIONS, AR_SFT, MARS_VARIANTS, mars

PLAN = TablePlan(
    "discrepancies",
    "What difference it makes where paper and released code differ",
    (
        Arm("base", "Base", "base", "ar", {}),
        AR_SFT,
        *[
            mars(stage, 4, threshold)
            for stage in dict.fromkeys((*MARS_VARIANTS, *ABLATIONS))
            for threshold in (None, 0.95)
        ],
        mars("mars", 4, 1.0),
    ),
    own="Discrepancies",
)
AR, WINDOW, BLOCKS, NO_CACHE = "ar", "mars", "mars-block-cache", "mars-no-cache"
CACHE_BLOCKS = (4, 16, 64)
ALL_MASKS = f"{NO_CACHE}, all masks"
_THRESHOLD = 0.95


def cache_grid(scale: Preset) -> Grid:
    """AR, MARS with its sliding window, and with block-level caches whose blocks are windows too, as load grows."""
    blocks = [_entry(BLOCKS, f"{BLOCKS}, B_cache = {size}", cache_block=size) for size in CACHE_BLOCKS]
    return _grid(scale, (Contender(AR, "mars", AR, {}), _entry(WINDOW), *blocks), (1, 4, 16, 48))


def masks_grid(scale: Preset) -> Grid:
    """MARS without a cache, with B - 1 masks in every forward and with as many as tokens may be generated."""
    every = _entry(NO_CACHE, ALL_MASKS, appended_masks=scale.max_new_tokens)
    return _grid(scale, (Contender(AR, "mars", AR, {}), _entry(NO_CACHE), every), (1, 16))


def _entry(method: str, name: str = "", **options: Any) -> Contender:
    return Contender(name or method, "mars", method, {"block_size": 4, **options}, threshold=_THRESHOLD)


def _grid(scale: Preset, contenders: tuple[Contender, ...], batch_sizes: tuple[int, ...]) -> Grid:
    """A race of five laps over 48 prompts; less where the scale asks few questions anyway."""
    if scale.in_seconds:
        return Grid(contenders, tuple(size for size in batch_sizes if size < 16), prompts=12, repeats=3, positions=0)
    return Grid(contenders, batch_sizes, prompts=48, repeats=5, positions=0)
