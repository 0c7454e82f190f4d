"""What one training step costs: AR SFT against MARS on the same batches, timed in turn (the paper's Appendix A)."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from marsbench.forward.attention import without_cudnn_attention
from marsbench.keys import versions
from marsbench.presets import Preset
from marsbench.rows.kinds import StepCostRow
from marsbench.running.checkpoints import Checkpoints
from marsbench.running.kept import kept
from marsbench.running.run import Run
from marsbench.training import checkpoints, records
from marsbench.training.data import Collator, conversations, in_batches, lengths
from marsbench.training.memory import bytes_kept, keep_freed_memory
from marsbench.training.objectives import ar_loss, mars_loss
from marsbench.world import difficulty

WARM_UP, REPEATS = 5, 30
BLOCK_SIZE = 4


class StepCost(NamedTuple):
    """What whole optimizer steps take, repeat by repeat: {"ar": [...], "mars": [...]}."""

    seconds: dict[str, list[float]]
    memory: dict[str, list[int]]  # bytes


def step_cost_row(run: Run) -> StepCostRow:
    """The cost of a MARS step over an AR step, on the AR SFT checkpoint, which must be trained."""
    parent = Checkpoints(run).recipe("ar_sft", None)
    folder = run.workspace.checkpoint(parent)
    record = records.finished(folder)
    started = str(record.provenance["started"]) if record else ""
    content = {"kind": "step_cost", "parent": parent.key, "started": started, "versions": versions("timing")}

    def timed() -> dict[str, Any]:
        with run.reporter.bar("timing training steps"):
            return step_cost(run.scale, folder, run.seed)._asdict()

    return kept(run, StepCostRow, content, "the step costs", timed)


def step_cost(scale: Preset, checkpoint: Path, seed: int) -> StepCost:
    """Time and memory of both objectives.

    Each repeat takes a new batch and runs both objectives on it, the one that goes first changing every time. Memory is
    what must be held when the backward pass begins: weights, gradients, AdamW's two moments, and all that the forward
    pass keeps. It is counted, not read from an allocator, so that it means the same on every device.
    """
    keep_freed_memory()
    without_cudnn_attention()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded = checkpoints.load(checkpoint, device=device)
    model, tokenizer, size = loaded.model.train(), loaded.tokenizer, scale.finetuning.batch_size
    level = difficulty(scale.world.difficulty if scale.world else "usual")
    sequences = conversations(tokenizer, (WARM_UP + REPEATS) * size, seed, level)
    order = in_batches(range(len(sequences)), lengths(sequences, noisy=True), size, seed=seed)
    data = [sequences[index] for index in order]
    collate = Collator(tokenizer.pad_token_id, tokenizer.eos_token_id, BLOCK_SIZE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    mask_id = tokenizer.mask_token_id
    losses: dict[str, Callable[..., Tensor]] = {
        "ar": lambda **batch: ar_loss(model, **batch),
        "mars": lambda **batch: mars_loss(model, **batch, block_size=BLOCK_SIZE, mask_token_id=mask_id).total,
    }
    cost = StepCost({name: [] for name in losses}, {name: [] for name in losses})
    for repeat in range(WARM_UP + REPEATS):
        batch = {name: values.to(device) for name, values in collate(data[repeat * size : (repeat + 1) * size]).items()}
        for name in sorted(losses, reverse=bool(repeat % 2)):
            took = _timed_step(model, optimizer, losses[name], batch)
            if repeat >= WARM_UP:
                cost.seconds[name].append(took)
                cost.memory[name].append(_memory(model, losses[name], batch))
    return cost


def _timed_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[..., Tensor], batch: dict[str, Tensor]
) -> float:
    """One whole step, synchronised at both ends."""
    _synchronize()
    started = time.perf_counter()
    optimizer.zero_grad()
    loss(**batch).backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    _synchronize()
    return time.perf_counter() - started


def _memory(model: torch.nn.Module, loss: Callable[..., Tensor], batch: dict[str, Tensor]) -> int:
    """Bytes of a step: four times the weights, and every storage that is saved for the backward pass, once."""
    weights = sum(parameter.nbytes for parameter in model.parameters())
    return 4 * weights + bytes_kept(lambda: loss(**batch), model.parameters())


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
