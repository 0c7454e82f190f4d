"""What a sweep will take: its contenders, its cells and an estimate of the time; nothing is run, read or fetched."""

from __future__ import annotations

from rich.table import Table

from marsbench.presets import Preset
from marsbench.racing.grid import Grid
from marsbench.running.estimates import decoding_s, terminal_table
from marsbench.running.plans import TrainedStage


def sweep_tables(grid: Grid, scale: Preset) -> list[Table | str]:
    """What a sweep will measure, and how much it decodes at most."""
    table = terminal_table(
        "Contenders, each at every batch size", "contender", "method", "options", "checkpoint", "draft"
    )
    for contender in grid.contenders:
        ready = scale.ready_checkpoint(*TrainedStage.of(contender.stage, contender.trained_block_size))
        options = ", ".join(f"{name} {value}" for name, value in contender.shown.items())
        own = f"our own {contender.stage}" if scale.tables_train else "none: skipped unless it is trained first"
        table.add_row(contender.name, contender.method, options or "-", ready or own, contender.draft or "-")
    names = grid.benchmarks or scale.benchmarks
    cells, tokens = len(grid.contenders) * len(grid.batch_sizes), _tokens(grid, scale)
    return [
        f"A sweep at scale {scale.scale}",
        table,
        f"{cells} cells: {len(grid.contenders)} contenders at batch sizes {', '.join(map(str, grid.batch_sizes))}.",
        f"{grid.prompts} prompts of {', '.join(names)}; one lap that is watched and {grid.repeats} that are timed.",
        f"At most {tokens:,} tokens, every answer as long as it may be: {race_s(grid, scale) / 3600:.1f} hours at "
        f"{scale.assumptions.tokens_per_second:,.0f} tokens per second ({scale.assumptions.source}). An estimate, not "
        "a measurement.",
    ]


def race_s(grid: Grid, scale: Preset) -> float:
    """How many seconds a grid's races take at most."""
    return decoding_s(_tokens(grid, scale), scale)


def _tokens(grid: Grid, scale: Preset) -> int:
    """What all contenders decode in all laps, if every answer is as long as it may be."""
    laps, cells = grid.repeats + 1, len(grid.contenders) * len(grid.batch_sizes)
    return cells * laps * grid.prompts * (grid.max_new_tokens or scale.max_new_tokens)
