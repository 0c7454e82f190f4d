"""What transformers' `Trainer` is told of a stage: rates, saves, number types, and how a batch is shared and cut."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import TrainingArguments

from marsbench.errors import UserError
from marsbench.training.learners import LEARNERS
from marsbench.training.memory import at_hand
from marsbench.training.micro_batches import Fitting
from marsbench.training.stages import Recipe

_LOG_EVERY, _FEWEST_LOGS = 25, 10  # steps per logged loss; fewer, so that a short stage has a curve too
_SAVES = 8  # resumable states per stage, or per cycle of one


def arguments_of(recipe: Recipe, steps: int, work: Path) -> tuple[TrainingArguments, Fitting | None]:
    """What the `Trainer` is told; and how batches are cut where memory decides it."""
    arguments = TrainingArguments(
        output_dir=str(work),
        max_steps=steps,
        learning_rate=recipe.budget.learning_rate,
        lr_scheduler_type="cosine",  # where there are no cycles
        warmup_steps=max(1, round(0.03 * steps)),
        optim="adamw_torch_fused",
        adam_beta2=recipe.budget.adam_beta2,
        weight_decay=recipe.budget.weight_decay,
        use_cpu=not torch.accelerator.is_available(),  # the Trainer refuses bf16 on a CPU that it was not asked to use
        bf16=recipe.pretrained is not None and recipe.pretrained.bf16 and _computes_in_bf16(),
        # None where it is off: the option has a new name in newer versions, which complain about the old one.
        gradient_checkpointing=_recomputes(recipe) or None,
        ddp_find_unused_parameters=False,  # every loss uses them all
        train_sampling_strategy="sequential",  # the data is in its order already
        save_steps=max(1, (recipe.budget.cycle or steps) // _SAVES),  # the end of a cycle is kept
        save_total_limit=2,
        logging_steps=max(1, min(_LOG_EVERY, steps // _FEWEST_LOGS)),
        disable_tqdm=True,
        report_to="none",
        log_level="error",
        remove_unused_columns=False,
        dataloader_pin_memory=torch.cuda.is_available(),
        seed=recipe.seed,
    )
    arguments._n_gpu = min(arguments.n_gpu, 1)  # without `accelerate launch`, one process on one device
    fitting = Fitting(recipe, arguments.device) if _cuts_by_memory(recipe, arguments) else None
    limit = recipe.pretrained.rows_per_device[recipe.objective] if recipe.pretrained and not fitting else None
    rows, accumulation = share_of_batch(recipe.budget.batch_size, arguments.world_size, limit)
    arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps = rows, accumulation
    return arguments, fitting


def rate_in_cycle(step: int, cycle: int) -> float:
    """The learning rate at a step, over its peak: it rises for a 40th of each cycle, stays, falls for a fifth."""
    at = step % cycle
    return min(1.0, 40 * at / cycle, 5 * (cycle - at) / cycle)


def _computes_in_bf16() -> bool:
    """Whether bf16 saves time here: on an accelerator, and on a CPU that has instructions for it."""
    if torch.accelerator.is_available():
        return True
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # type: ignore[no-untyped-call]


def _recomputes(recipe: Recipe) -> bool:
    """Whether activations are computed twice; what is trained beside a frozen model has few."""
    if recipe.pretrained is None or LEARNERS[recipe.objective].freezes_model:
        return False
    return recipe.pretrained.gradient_checkpointing


def _cuts_by_memory(recipe: Recipe, arguments: TrainingArguments) -> bool:
    """Whether a batch is cut by the memory at hand; else, rows per device are those of the scale's file.

    Several processes must each make as many passes as the others. What is computed twice is not seen to be kept. The
    world's batches are small.
    """
    cut = recipe.pretrained is not None and LEARNERS[recipe.objective].is_mean_over_rows
    if not cut or _recomputes(recipe) or arguments.world_size > 1:
        return False
    return at_hand(arguments.device) is not None


def share_of_batch(batch_size: int, processes: int, limit: int | None = None) -> tuple[int, int]:
    """Rows per device and accumulation steps, such that rows x accumulation x processes is the batch size exactly.

    Takes as many rows as fit below `limit`. All shares are equal, so the mean of the processes' mean losses is the mean
    over the batch.

    Raises:
        UserError: the processes cannot share the batch equally.
    """
    if batch_size % processes:
        raise UserError(
            f"{processes} processes cannot share a batch of {batch_size} sequences equally",
            fix="choose a number of processes that divides it, or another --batch-size",
        )
    share = batch_size // processes
    rows = max(rows for rows in range(1, min(share, limit or share) + 1) if share % rows == 0)
    return rows, share // rows
