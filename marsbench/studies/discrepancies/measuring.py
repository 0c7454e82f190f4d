"""What paper and released code do differently, measured: training either way, and what a sampler's habits cost."""

from __future__ import annotations

from marsbench.racing.sweep import Sweep
from marsbench.rows.kinds import Row
from marsbench.running.run import Run
from marsbench.running.tables import Table
from marsbench.studies.discrepancies.lines import PLAN, cache_grid, masks_grid


def discrepancy_rows(run: Run) -> list[Row]:
    """All rows of the page: trainings, then cells of accuracy, then two small races, in which no shard takes part."""
    rows = Table(run, PLAN).rows()
    if not run.is_whole:
        return rows
    for grid in (cache_grid(run.scale), masks_grid(run.scale)):
        rows += Sweep(run, grid).rows()
    return list({row.key: row for row in rows}.values())  # the races need checkpoints that the table has trained
