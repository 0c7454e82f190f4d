"""Discrepancies: where the paper and its released code differ, and what each difference comes to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from marsbench.studies.discrepancies.lines import PLAN, cache_grid, masks_grid
from marsbench.studies.discrepancies.page import sections, tally
from marsbench.studies.study import Study

if TYPE_CHECKING:
    from marsbench.rows.kinds import Row
    from marsbench.running.run import Run


def _rows(run: Run) -> list[Row]:
    """Trainings, then cells of accuracy, then two small races, in which no shard takes part."""
    from marsbench.racing.sweep import Sweep
    from marsbench.running.tables import Table

    rows = Table(run, PLAN).rows()
    if not run.is_whole:
        return rows
    for grid in (cache_grid(run.scale), masks_grid(run.scale)):
        rows += Sweep(run, grid).rows()
    return list({row.key: row for row in rows}.values())  # the races need checkpoints that the table has trained


STUDY = Study(
    key="discrepancies",
    name="Discrepancies",
    asks="where paper and released code differ: does it matter?",
    place=1,
    plan=PLAN,
    measure=_rows,
    timed=True,
    sections=sections,
    tally=tally,
)
