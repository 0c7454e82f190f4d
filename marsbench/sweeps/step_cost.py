"""What one training step costs: AR SFT against MARS on the same batches, timed in turn (the paper's Appendix A)."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from marsbench.presets import Preset
from marsbench.training import checkpoints
from marsbench.training.data import Collator, conversations, in_batches, lengths
from marsbench.training.memory import keep_freed_memory
from marsbench.training.objectives import ar_loss, mars_loss

WARM_UP, REPEATS = 5, 30
BLOCK_SIZE = 4


def step_cost(scale: Preset, checkpoint: Path, seed: int) -> dict[str, list[float]]:
    """Seconds of whole optimizer steps, objective by objective: {"ar": [...], "mars": [...]}.

    Each repeat takes a new batch and runs both objectives on it, the one that goes first changing every time.
    """
    keep_freed_memory()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded = checkpoints.load(checkpoint, device=device)
    model, tokenizer, size = loaded.model.train(), loaded.tokenizer, scale.finetuning.batch_size
    sequences = conversations(tokenizer, (WARM_UP + REPEATS) * size, seed)
    order = in_batches(range(len(sequences)), lengths(sequences, noisy=True), size, seed=seed)
    data = [sequences[index] for index in order]
    collate = Collator(tokenizer.pad_token_id, tokenizer.eos_token_id, BLOCK_SIZE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    mask_id = tokenizer.mask_token_id
    losses: dict[str, Callable[..., Tensor]] = {
        "ar": lambda **batch: ar_loss(model, **batch),
        "mars": lambda **batch: mars_loss(model, **batch, block_size=BLOCK_SIZE, mask_token_id=mask_id).total,
    }
    seconds: dict[str, list[float]] = {name: [] for name in losses}
    for repeat in range(WARM_UP + REPEATS):
        batch = {name: values.to(device) for name, values in collate(data[repeat * size : (repeat + 1) * size]).items()}
        for name in sorted(losses, reverse=bool(repeat % 2)):
            took = _timed_step(model, optimizer, losses[name], batch)
            if repeat >= WARM_UP:
                seconds[name].append(took)
    return seconds


def _timed_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[..., Tensor],
    batch: dict[str, Tensor],
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


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
