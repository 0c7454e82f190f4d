"""All rows of the page on a real model: trainings, answers, then the race."""

from __future__ import annotations

from marsbench.racing.sweep import Sweep
from marsbench.rows.kinds import Row
from marsbench.running.run import Run
from marsbench.running.tables import Table
from marsbench.studies.real_model.lines import PLAN, grid_at


def real_model_rows(run: Run) -> list[Row]:
    """The rows, those measured now that were missing; one of several shards only answers."""
    answered = Table(run, PLAN).rows()
    raced = Sweep(run, grid_at(run.scale)).rows() if run.is_whole else []
    return list({row.key: row for row in [*answered, *raced]}.values())
