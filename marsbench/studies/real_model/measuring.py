"""What the page on a real model has beside its answers: the races, and how fast it trains."""

from __future__ import annotations

import torch

from marsbench.forward.linear import reads_bf16
from marsbench.racing.sweep import Sweep
from marsbench.rows.kinds import Row
from marsbench.running.cells import Table
from marsbench.running.run import Run
from marsbench.running.training_cost import training_speed_rows
from marsbench.studies.real_model.lines import IN_BF16, grid_at

_STEPS = 8  # of each stage, to be timed


def races_and_speeds(run: Run) -> list[Row]:
    """A race in fp32, which keeps every promise to the token, and in bf16 where the machine computes in it."""
    in_bf16 = torch.cuda.is_available() or reads_bf16()
    answered = Table(run, IN_BF16).rows() if in_bf16 else []
    dtypes = ["float32", *(["bfloat16"] if in_bf16 else [])]
    raced = [row for dtype in dtypes for row in Sweep(run, grid_at(run.scale, dtype)).rows()]
    return [*answered, *raced, *(training_speed_rows(run, _STEPS) if run.scale.pretrained else [])]
