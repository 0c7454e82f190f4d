"""One training of a checkpoint at a time: a second command that wants it waits for the first."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from filelock import FileLock, Timeout

from marsbench.progress import is_first_process
from marsbench.running.run import Run
from marsbench.training.stages import Recipe


@contextmanager
def alone_with(chosen: Recipe, run: Run) -> Iterator[bool]:
    """Keeps other commands from training the same checkpoint meanwhile; gives whether it had to wait for one.

    Of the processes of one distributed training, the first holds the lock for all.
    """
    file, waited = run.workspace.lock(chosen), False
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(file)
    if is_first_process():
        try:
            lock.acquire(timeout=0)
        except Timeout:
            waited = True
            run.reporter.say(f"another command is training {chosen.name}: waiting for it")
            lock.acquire()
    _wait_for_all_processes()
    try:
        yield waited
    finally:
        lock.release()


def _wait_for_all_processes() -> None:
    """Wait for the other processes of a distributed training, where there are any."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from accelerate import PartialState

        PartialState(cpu=not torch.accelerator.is_available()).wait_for_everyone()
