"""What a sweep will take: its contenders, its cells and an estimate of the time; nothing is run, read or fetched."""

from __future__ import annotations

import math

from rich.table import Table

from marsbench.methods import METHODS
from marsbench.presets import Preset
from marsbench.racing.grid import Contender, Grid
from marsbench.running.estimates import cost, decoding_s, terminal_table
from marsbench.running.plans import TrainedStage


def sweep_tables(grid: Grid, scale: Preset, price: float | None = None) -> list[Table | str]:
    """What a sweep will measure, how much it decodes at most, and what that costs at a price for an hour."""
    table = terminal_table(
        "Contenders, each at every batch size", "contender", "method", "options", "checkpoint", "draft"
    )
    for contender in grid.contenders:
        ready = scale.ready_checkpoint(*TrainedStage.of(contender.stage, contender.trained_block_size))
        options = ", ".join(f"{name} {value}" for name, value in contender.shown.items())
        own = f"our own {contender.stage}" if scale.tables_train else "none: skipped unless it is trained first"
        table.add_row(contender.name, contender.method, options or "-", ready or own, contender.draft or "-")
    names = grid.benchmarks or scale.benchmarks
    cells = len(grid.contenders) * len(grid.batch_sizes)
    return [
        f"A sweep at scale {scale.scale}",
        table,
        f"{cells} cells: {len(grid.contenders)} contenders at batch sizes {', '.join(map(str, grid.batch_sizes))}.",
        f"{grid.prompts} prompts of {', '.join(names)}; one lap that is watched and {grid.repeats} that are timed.",
        _in_words(grid, scale, price),
    ]


def race_s(grid: Grid, scale: Preset) -> float:
    """How many seconds a grid's races take at most: every answer as long as it may be, a token for a forward."""
    if scale.assumptions.steps_s is None:
        return decoding_s(_tokens(grid, scale), scale)
    return sum(_laps_s(contender, size, grid, scale) for contender in grid.contenders for size in grid.batch_sizes)


def _laps_s(contender: Contender, batch_size: int, grid: Grid, scale: Preset) -> float:
    """What all laps of a contender at a batch size take on a GPU, where a step takes long whatever its rows."""
    costs, method = scale.assumptions.steps_s, METHODS[contender.method]
    assert costs is not None, "seen to by `race_s`"
    if method.one_row and batch_size > 1:
        return 0.0
    longest = grid.max_new_tokens or scale.max_new_tokens
    step = costs["library" if method.own_loop else "ours"]
    if method.recomputes:  # as many positions as an answer may come to, on average: a prompt and half of it
        step = max(step, batch_size * longest * costs["position"])
    laps = grid.repeats + 1 + contender.compiled  # who is compiled decodes everything once beforehand
    return laps * math.ceil(grid.prompts / batch_size) * longest * step


def _in_words(grid: Grid, scale: Preset, price: float | None) -> str:
    reckoned, hours = scale.assumptions, race_s(grid, scale) / 3600
    if reckoned.steps_s is None:
        how = f"at {reckoned.tokens_per_second:,.0f} tokens per second ({reckoned.source})"
    else:
        ours, library = (1000 * reckoned.steps_s[name] for name in ("ours", "library"))
        how = f"at a token for a forward, {ours:.1f} ms each ({library:.0f} ms in a loop of another library)"
    return (
        f"At most {_tokens(grid, scale):,} tokens, every answer as long as it may be: "
        f"{hours:.1f} hours{cost(hours, price)} {how}. An estimate, not a measurement."
    )


def _tokens(grid: Grid, scale: Preset) -> int:
    """What all contenders decode in all laps, if every answer is as long as it may be."""
    laps, cells = grid.repeats + 1, len(grid.contenders) * len(grid.batch_sizes)
    return cells * laps * grid.prompts * (grid.max_new_tokens or scale.max_new_tokens)
