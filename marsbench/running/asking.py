"""Asking one checkpoint some benchmarks, whoever trained it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from marsbench.methods.settings import load_aloud
from marsbench.rows.kinds import EvaluationRow
from marsbench.rows.workspace import full_disk_explained
from marsbench.running.cells import Cells
from marsbench.running.checkpoints import Checkpoints
from marsbench.running.plans import Arm
from marsbench.running.run import Run
from marsbench.training.checkpoints import default_device


def ask(
    run: Run,
    arm: Arm,
    benchmarks: Sequence[str],
    *,
    checkpoint: str | None = None,
    adapter: str | None = None,
    draft: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Iterator[EvaluationRow]:
    """The row of each benchmark, as they come.

    Args:
        run: where and how many questions.
        arm: how to decode.
        benchmarks: what to ask.
        checkpoint: folder or hub name; None = the scale's own of the arm's stage, trained now if need be.
        adapter: folder of a gated adapter that is to act on the checkpoint.
        draft: the draft model's checkpoint, where the method wants one.
        dtype: of weights and caches.

    Raises:
        UserError: questions or checkpoints are missing; found out before anything is trained.
    """
    for name in benchmarks:
        run.exam(name)
    with full_disk_explained(run.workspace.runs):
        device = default_device()
        companion = load_aloud(draft, run.reporter, dtype=dtype, device=device) if draft is not None else None
        if checkpoint is not None:
            loaded = load_aloud(checkpoint, run.reporter, dtype=dtype, device=device, adapter=adapter)
        else:
            loaded = Checkpoints(run).load(*arm.trained, dtype)
        cells = Cells(run)
        for name in benchmarks:
            yield cells.cell(arm, loaded, name, companion)
