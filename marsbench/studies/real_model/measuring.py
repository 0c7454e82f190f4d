"""All rows of the page on a real model: trainings, answers, then the race and how fast it trains."""

from __future__ import annotations

from marsbench.racing.sweep import Sweep
from marsbench.rows.kinds import Row
from marsbench.running.run import Run
from marsbench.running.tables import Table
from marsbench.running.training_speed import training_speed_rows
from marsbench.studies.real_model.lines import PLAN, grid_at

_STEPS = 8  # of each stage, to be timed


def real_model_rows(run: Run) -> list[Row]:
    """The rows, those measured now that were missing; one of several shards only answers."""
    answered = Table(run, PLAN).rows()
    raced = Sweep(run, grid_at(run.scale)).rows() if run.is_whole else []
    timed = training_speed_rows(run, _STEPS) if run.is_whole and run.scale.pretrained else []
    return list({row.key: row for row in [*answered, *raced, *timed]}.values())
