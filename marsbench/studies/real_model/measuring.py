"""All rows of the page on a real model: trainings, answers, then the races and how fast it trains."""

from __future__ import annotations

import torch

from marsbench.forward.linear import reads_bf16
from marsbench.racing.sweep import Sweep
from marsbench.rows.kinds import Row
from marsbench.running.run import Run
from marsbench.running.tables import Table
from marsbench.running.training_cost import training_speed_rows
from marsbench.studies.real_model.lines import IN_BF16, PLAN, grid_at

_STEPS = 8  # of each stage, to be timed


def real_model_rows(run: Run) -> list[Row]:
    """The rows, those measured now that were missing; one of several shards only answers."""
    dtypes = _dtypes()
    answered = [*Table(run, PLAN).rows(), *(Table(run, IN_BF16).rows() if "bfloat16" in dtypes else [])]
    dtypes = dtypes if run.is_whole else []
    raced = [row for dtype in dtypes for row in Sweep(run, grid_at(run.scale, dtype)).rows()]
    timed = training_speed_rows(run, _STEPS) if run.is_whole and run.scale.pretrained else []
    return list({row.key: row for row in [*answered, *raced, *timed]}.values())


def _dtypes() -> list[str]:
    """What is raced: fp32, which keeps every promise to the token, and bf16 where the machine computes in it."""
    return ["float32", "bfloat16"] if torch.cuda.is_available() or reads_bf16() else ["float32"]
