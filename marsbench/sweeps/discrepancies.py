"""What paper and released code do differently, measured: training either way, and what a sampler's habits cost."""

from __future__ import annotations

from typing import Any

from marsbench.presets import Preset
from marsbench.sweeps.grid import Entry, Grid
from marsbench.sweeps.plans import TABLES
from marsbench.sweeps.rows import Row
from marsbench.sweeps.runner import Runner
from marsbench.sweeps.speedup import SpeedupSweep

PLAN = TABLES["discrepancies"]
AR, WINDOW, BLOCKS, NO_CACHE = "ar", "mars", "mars-block-cache", "mars-no-cache"
CACHE_BLOCKS = (4, 16, 64)
ALL_MASKS = f"{NO_CACHE}, all masks"
_THRESHOLD = 0.95


def discrepancy_rows(runner: Runner) -> list[Row]:
    """All rows of the page: trainings, then cells of accuracy, then two small races, in which no shard takes part."""
    rows = runner.table(PLAN)
    if runner.shard != (1, 1):
        return rows
    for grid in (cache_grid(runner.scale), masks_grid(runner.scale)):
        rows += SpeedupSweep(runner, grid).rows()
    return list({row.key: row for row in rows}.values())  # the races need checkpoints that the table has trained


def cache_grid(scale: Preset) -> Grid:
    """AR, MARS with its sliding window, and with block-level caches whose blocks are windows too, as load grows."""
    blocks = [_entry(BLOCKS, f"{BLOCKS}, B_cache = {size}", cache_block=size) for size in CACHE_BLOCKS]
    return _grid(scale, (Entry(AR, "mars", AR, {}), _entry(WINDOW), *blocks), (1, 4, 16, 48))


def masks_grid(scale: Preset) -> Grid:
    """MARS without a cache, with B - 1 masks in every forward and with as many as tokens may be generated."""
    every = _entry(NO_CACHE, ALL_MASKS, appended_masks=scale.max_new_tokens)
    return _grid(scale, (Entry(AR, "mars", AR, {}), _entry(NO_CACHE), every), (1, 16))


def _entry(method: str, name: str = "", **options: Any) -> Entry:
    return Entry(name or method, "mars", method, {"block_size": 4, **options}, threshold=_THRESHOLD)


def _grid(scale: Preset, contenders: tuple[Entry, ...], batch_sizes: tuple[int, ...]) -> Grid:
    """A race of five laps over 48 prompts; less where the scale asks few questions anyway."""
    if scale.questions is not None:
        return Grid(contenders, tuple(size for size in batch_sizes if size < 16), prompts=12, repeats=3, positions=0)
    return Grid(contenders, batch_sizes, prompts=48, repeats=5, positions=0)
