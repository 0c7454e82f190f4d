"""What training costs here: a step of AR SFT and of MARS (Appendix A), and the first steps of whole trainings."""

import multiprocessing
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.benchmark import timer  # which waits for a GPU first
from transformers import TrainerCallback

from marsbench.forward.window import without_cudnn_attention
from marsbench.keys import versions
from marsbench.line import TrainedStage
from marsbench.presets import DEFAULT_BLOCK_SIZE, Preset
from marsbench.rows.kinds import Row, StepCostRow
from marsbench.running.checkpoints import Checkpoints
from marsbench.running.run import Run, made_once
from marsbench.training import checkpoints, records
from marsbench.training.data import Collator, in_batches, lengths, taught
from marsbench.training.memory import bytes_kept, keep_freed_memory, peak
from marsbench.training.objectives import ar_loss, mars_loss
from marsbench.training.stages import Recipe
from marsbench.training.trainer import train
from marsbench.world import difficulty

STAGES = ("ar_sft", "mars", "base_gated")
_REPEATS = 30  # of one step
_FIRST_REPEATS = 5  # that are not timed
_FIRST_STEPS = 3  # of a training that are not: memory is new, and how much of a batch fits is measured


def step_costs(run: Run) -> list[Row]:
    """The cost of a MARS step over an AR step, on the AR SFT checkpoint, which must be trained."""
    parent = Checkpoints(run).recipe(TrainedStage("ar_sft", None))
    folder = run.workspace.checkpoint(parent)
    record = records.finished(folder)
    started = str(record.provenance["started"]) if record else ""
    content = {"kind": "step_cost", "parent": parent.key, "started": started, "versions": versions("timing")}

    def timed() -> dict[str, Any]:
        with run.reporter.bar("timing training steps"):
            return step_cost(run.scale, folder, run.seed)

    return [made_once(run, StepCostRow, content, timed)]


def step_cost(scale: Preset, checkpoint: Path, seed: int) -> dict[str, dict[str, list[Any]]]:
    """Time and memory of both objectives' whole optimizer steps on the same new batches, as a `StepCostRow` has them.

    Memory is what must be held when the backward pass begins: weights, gradients, AdamW's two moments, and all that the
    forward pass keeps. It is counted, so that it means the same on every device.
    """
    keep_freed_memory()
    without_cudnn_attention()
    device = checkpoints.default_device()
    loaded = checkpoints.load(checkpoint, device=device)
    model, tokenizer, size = loaded.model.train(), loaded.tokenizer, scale.finetuning.batch_size
    level = difficulty(scale.world.difficulty if scale.world else "usual")
    sequences = taught("conversations", tokenizer, (_FIRST_REPEATS + _REPEATS) * size, seed, level)
    order = in_batches(range(len(sequences)), [*map(sum, zip(*lengths(sequences), strict=True))], size, seed=seed)
    data = [sequences[index] for index in order]
    collate = Collator(tokenizer.pad_token_id, tokenizer.eos_token_id, DEFAULT_BLOCK_SIZE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    mask_id = tokenizer.mask_token_id
    losses: dict[str, Callable[..., Tensor]] = {
        "ar": lambda **batch: ar_loss(model, **batch),
        "mars": lambda **batch: mars_loss(model, **batch, block_size=DEFAULT_BLOCK_SIZE, mask_token_id=mask_id).total,
    }
    cost: dict[str, dict[str, list[Any]]] = {what: {name: [] for name in losses} for what in ("seconds", "memory")}
    for repeat in range(_FIRST_REPEATS + _REPEATS):
        batch = {name: values.to(device) for name, values in collate(data[repeat * size : (repeat + 1) * size]).items()}
        for name in sorted(losses, reverse=bool(repeat % 2)):
            took = _timed_step(model, optimizer, losses[name], batch)
            if repeat >= _FIRST_REPEATS:
                cost["seconds"][name].append(took)
                cost["memory"][name].append(_memory(model, losses[name], batch))
    return cost


def _timed_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[..., Tensor], batch: dict[str, Tensor]
) -> float:
    started = timer()
    optimizer.zero_grad()
    loss(**batch).backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return timer() - started


def _memory(model: torch.nn.Module, loss: Callable[..., Tensor], batch: dict[str, Tensor]) -> int:
    """Bytes of a step: four times the weights, and every storage that is saved for the backward pass, once."""
    weights = sum(parameter.nbytes for parameter in model.parameters())
    return 4 * weights + bytes_kept(lambda: loss(**batch), model.parameters())


class TrainingSpeed(NamedTuple):
    stage: str
    tokens: list[int]  # of each step's sequences, padding and noisy copies not counted
    seconds: list[float]
    peak_bytes: int  # of the process, or of its GPU, from its start on

    def in_words(self) -> str:
        rates = sorted(count / took for count, took in zip(self.tokens, self.seconds, strict=True))
        spread = f"{rates[0]:,.0f} to {rates[-1]:,.0f} in {len(rates)} steps"
        return f"{self.stage}: {median(rates):,.0f} tokens/s ({spread}), {self.peak_bytes / 2**30:.2f} GiB at its peak"


class _Enough(Exception):
    """So many steps have been timed."""


class _Stopwatch(TrainerCallback):
    """Times steps, and ends the training when it has seen enough of them."""

    def __init__(self, steps: int) -> None:
        self.tokens, self.seconds = list[int](), list[float]()
        self._steps, self._began = steps, 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        took, data = time.perf_counter() - self._began, given["train_dataloader"].dataset
        if state.global_step > _FIRST_STEPS:
            size = len(data) // state.max_steps
            met = range((state.global_step - 1) * size, state.global_step * size)
            self.tokens.append(sum(len(data[place]["input_ids"]) for place in met))
            self.seconds.append(took)
        if len(self.seconds) == self._steps:
            raise _Enough


def training_speed(chosen: Recipe, steps: int) -> TrainingSpeed:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as alone:
        return alone.submit(_measured, chosen, steps).result()


def _measured(chosen: Recipe, steps: int) -> TrainingSpeed:
    watch = _Stopwatch(steps)
    with tempfile.TemporaryDirectory() as folder, suppress(_Enough):
        train(chosen, Path(folder) / chosen.stage, None, lambda *_: None, lambda line: None, watch)
    return TrainingSpeed(chosen.stage, watch.tokens, watch.seconds, peak())
