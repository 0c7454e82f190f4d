"""One training of a checkpoint at a time: a second command that wants it waits for the first."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from marsbench.locks import locked
from marsbench.progress import is_first_process
from marsbench.running.run import Run
from marsbench.training.stages import Recipe


@contextmanager
def alone_with(chosen: Recipe, run: Run) -> Iterator[bool]:
    """Keeps other commands from training the same checkpoint meanwhile; gives whether it had to wait for one.

    Of the processes of one distributed training, the first holds the lock for all.
    """

    def say(holder: str) -> None:
        run.reporter.say(f"another command is training {chosen.name} ({holder}): waiting for it")

    with locked(run.workspace.lock(chosen), say=say) if is_first_process() else nullcontext(False) as waited:
        _wait_for_all_processes()
        yield waited


def _wait_for_all_processes() -> None:
    """Wait for the other processes of a distributed training, where there are any."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from accelerate import PartialState

        PartialState(cpu=not torch.accelerator.is_available()).wait_for_everyone()
