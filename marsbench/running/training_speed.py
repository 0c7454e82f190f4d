"""How fast a scale trains here, and in how much memory: a stage's own training, stopped after a few steps.

Each stage trains in a process of its own, so that its peak is nobody else's. What is trained is the scale's base with
the scale's data; which weights it starts from changes no speed.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from transformers import TrainerCallback

from marsbench.keys import versions
from marsbench.neighbours import BUSY_CORES, cores, read_clocks, used_between
from marsbench.presets import DEFAULT_BLOCK_SIZE
from marsbench.rows.kinds import TrainingSpeedRow
from marsbench.running.checkpoints import Checkpoints
from marsbench.running.kept import kept
from marsbench.running.run import Run
from marsbench.training.memory import peak
from marsbench.training.stages import Recipe
from marsbench.training.trainer import train

STAGES = ("ar_sft", "mars", "base_gated")
WARM_UP = 3  # steps that are not timed: memory is new, and how much of a batch fits is measured


class TrainingSpeed(NamedTuple):
    """What the timed steps of a stage took."""

    stage: str
    tokens: list[int]  # of each step's sequences, padding and noisy copies not counted
    seconds: list[float]
    peak_bytes: int | None  # of the process, or of its GPU, from its start on; None where the system does not tell
    others_cores: float | None  # cores that other processes kept busy; None = unknown

    def in_words(self) -> str:
        rates = sorted(count / took for count, took in zip(self.tokens, self.seconds, strict=True))
        peak = "peak memory unknown" if self.peak_bytes is None else f"{self.peak_bytes / 2**30:.2f} GiB at its peak"
        others = self.others_cores or 0.0
        beside = f"; others kept {others:.1f} cores busy, so this is no measure of the machine"
        return (
            f"{self.stage}: {median(rates):,.0f} tokens/s ({rates[0]:,.0f} to {rates[-1]:,.0f} "
            f"in {len(rates)} steps), {peak}{beside if others > BUSY_CORES else ''}"
        )


class _Enough(Exception):
    """So many steps have been timed."""


class _Stopwatch(TrainerCallback):
    """Times steps, and ends the training when it has seen enough of them."""

    def __init__(self, steps: int) -> None:
        self.tokens, self.seconds = list[int](), list[float]()
        self._steps, self._data, self._began = steps, list[Any](), 0.0
        self.clocks = read_clocks()

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._data = given["train_dataloader"].dataset

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step == WARM_UP:
            self.clocks = read_clocks()
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        took, size = time.perf_counter() - self._began, len(self._data) // state.max_steps
        if state.global_step > WARM_UP:
            met = range((state.global_step - 1) * size, state.global_step * size)
            self.tokens.append(sum(len(self._data[place]["input_ids"]) for place in met))
            self.seconds.append(took)
        if len(self.seconds) == self._steps:
            raise _Enough


def training_speed_rows(run: Run, steps: int) -> list[TrainingSpeedRow]:
    """The speed of every stage in turn, of those measured now that was missing."""
    return [_row(run, Checkpoints(run).recipe(stage, DEFAULT_BLOCK_SIZE), steps) for stage in STAGES]


def _row(run: Run, chosen: Recipe, steps: int) -> TrainingSpeedRow:
    content = {"kind": "training_speed", "recipe": chosen.key, "steps": steps, "versions": versions("timing")}
    title = f"the speed of training {chosen.stage}"
    return kept(run, TrainingSpeedRow, content, title, partial(_timed, run, chosen, steps))


def _timed(run: Run, chosen: Recipe, steps: int) -> dict[str, Any]:
    run.reporter.say(f"timing {steps} steps of training {chosen.stage}")
    found = training_speed(chosen, steps)
    return {
        "stage": chosen.stage, "block_size": chosen.block_size, "tokens": found.tokens, "seconds": found.seconds,
        "peak_bytes": found.peak_bytes, "others_cores": [] if found.others_cores is None else [found.others_cores],
    }  # fmt: skip


def training_speed(chosen: Recipe, steps: int) -> TrainingSpeed:
    """Train a stage for a few steps in a process of its own; nothing is kept of it."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as alone:
        return alone.submit(_measured, chosen, steps).result()


def _measured(chosen: Recipe, steps: int) -> TrainingSpeed:
    watch = _Stopwatch(steps)
    with tempfile.TemporaryDirectory() as folder, suppress(_Enough):
        train(chosen, Path(folder) / chosen.stage, None, lambda *_: None, lambda line: None, watch)
    others = cores([used_between(watch.clocks, read_clocks())])
    return TrainingSpeed(chosen.stage, watch.tokens, watch.seconds, peak(), others)
