"""Training one stage with transformers' `Trainer`, resumable at any moment.

While a stage trains, its state lies in `NAME.partial`; the finished checkpoint is moved into place at the end.
`accelerate launch -m marsbench train ...` distributes it.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    Qwen2Config,
    Qwen2ForCausalLM,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)

from marsbench.provenance import provenance
from marsbench.training import checkpoints
from marsbench.training.checkpoints import TrainingRecord
from marsbench.training.data import Collator, TrainingSequence, conversations, in_batches, plain_text
from marsbench.training.medusa import MedusaHeads, head_accuracy, medusa_loss
from marsbench.training.memory import keep_freed_memory
from marsbench.training.objectives import ar_loss, block_diffusion_loss, mars_loss
from marsbench.training.stages import Recipe
from marsbench.training.tokenizer import build_tokenizer

# Called as training goes on: (step, steps, loss, tokens per second).
Progress = Callable[[int, int, float, float], None]
_RESUMABLE = "resumable.json"  # written last into a Trainer checkpoint; one without it was cut short
_LOG_EVERY = 25
_SAVES = 8  # resumable states per stage
_HELD_OUT, _HELD_OUT_SEED = 256, 500_000  # conversations that Medusa heads are measured on


def train(recipe: Recipe, folder: Path, parent: Path | None, progress: Progress) -> TrainingRecord:
    """Train a stage, or go on where an interrupted run stopped; returns the finished checkpoint's record.

    Args:
        recipe: what to train.
        folder: where the finished checkpoint goes.
        parent: the checkpoint to start from, None for random weights.
        progress: called at every log step.
    """
    started = provenance(seed=recipe.seed)
    keep_freed_memory()
    set_seed(recipe.seed)
    work = folder.with_name(folder.name + ".partial")
    arguments = _arguments(recipe, work)
    tokenizer, model = _start(recipe, parent)
    nn.Module.to(model, arguments.device)
    heads = MedusaHeads(model.config.hidden_size) if recipe.objective == "medusa" else None
    sequences = _sequences(recipe, tokenizer)
    meter = _Meter(recipe, sum(len(sequence["input_ids"]) for sequence in sequences), progress)
    trainer = _StageTrainer(
        loss=objective(recipe, tokenizer, model),
        model=heads or model,
        args=arguments,
        train_dataset=sequences,
        data_collator=Collator(tokenizer.pad_token_id, tokenizer.eos_token_id, recipe.block_size),
        callbacks=[meter],
    )
    trainer.remove_callback(PrinterCallback)
    resume = _last_resumable(work)
    if resume:
        meter.seconds_before = float(json.loads((resume / _RESUMABLE).read_text(encoding="utf-8"))["seconds"])
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    if trainer.is_world_process_zero():
        finished = work / "finished"
        shutil.rmtree(finished, ignore_errors=True)
        _save(finished, tokenizer, model, heads)
        measures = head_accuracy(heads, model, _held_out(recipe, tokenizer)) if heads else {}
        checkpoints.publish(
            finished,
            folder,
            recipe,
            provenance=started,
            parameters=sum(parameter.numel() for parameter in (heads or model).parameters()),
            steps=recipe.steps,
            tokens=meter.tokens,
            seconds=meter.seconds,
            loss=meter.loss,
            measures=measures,
        )
        shutil.rmtree(work)
    trainer.accelerator.wait_for_everyone()
    record = checkpoints.finished(folder)
    assert record is not None, "the first process has just published it"
    return record


def _save(folder: Path, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, heads: MedusaHeads | None) -> None:
    """Write a checkpoint that plain transformers loads; Medusa heads lie beside the model that they belong to."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if heads:
        heads.save(folder)


def objective(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> Callable[..., Tensor]:
    """The stage's loss as a function of (what is trained, input_ids=..., labels=...).

    `model` is what Medusa heads stand on; every other objective trains the model itself.
    """
    if recipe.objective == "ar":
        return ar_loss
    if recipe.objective == "medusa":
        return partial(medusa_loss, backbone=model.requires_grad_(False))
    blocks = {"block_size": recipe.block_size, "mask_token_id": tokenizer.mask_token_id}
    if recipe.objective == "block_diffusion":
        return partial(block_diffusion_loss, **blocks)
    return lambda model, **batch: mars_loss(model, **batch, **blocks, ar_weight=recipe.ar_weight).total


def _start(recipe: Recipe, parent: Path | None) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    """Tokenizer and weights to start from: the parent's, or new ones."""
    if parent is not None:
        loaded = checkpoints.load(parent)
        return loaded.tokenizer, loaded.model.train()
    tokenizer = build_tokenizer(recipe.vocabulary_size)
    special = {
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    config = Qwen2Config(vocab_size=len(tokenizer), tie_word_embeddings=True, **special, **recipe.model)
    return tokenizer, Qwen2ForCausalLM(config)


def _sequences(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> list[TrainingSequence]:
    """The stage's data in training order."""
    make = plain_text if recipe.plain_text else conversations
    data = make(tokenizer, recipe.budget.steps * recipe.budget.batch_size, recipe.seed)
    noisy = recipe.block_size is not None
    return in_batches(data, recipe.budget.batch_size, passes=recipe.passes, noisy=noisy, seed=recipe.seed)


def _held_out(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Iterator[dict[str, Tensor]]:
    """Batches of conversations that no stage has been trained on."""
    data, size = conversations(tokenizer, _HELD_OUT, _HELD_OUT_SEED + recipe.seed), recipe.budget.batch_size
    collate = Collator(tokenizer.pad_token_id, tokenizer.eos_token_id)
    return (collate(data[first : first + size]) for first in range(0, len(data), size))


def _arguments(recipe: Recipe, work: Path) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(work),
        max_steps=recipe.steps,
        per_device_train_batch_size=recipe.budget.batch_size,
        learning_rate=recipe.budget.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, round(0.03 * recipe.steps)),
        optim="adamw_torch_fused",
        adam_beta2=0.98,
        weight_decay=0.1,
        train_sampling_strategy="sequential",  # the data is in its order already
        save_steps=max(1, recipe.steps // _SAVES),
        save_total_limit=2,
        logging_steps=min(_LOG_EVERY, recipe.steps),
        disable_tqdm=True,
        report_to="none",
        log_level="error",
        remove_unused_columns=False,
        dataloader_pin_memory=torch.cuda.is_available(),
        seed=recipe.seed,
    )


def _last_resumable(work: Path) -> Path | None:
    """The newest complete state of an interrupted run; incomplete ones are removed."""
    states = sorted(work.glob("checkpoint-*"), key=lambda state: int(state.name.rpartition("-")[2]))
    for state in states:
        if not (state / _RESUMABLE).exists():
            shutil.rmtree(state)
    complete = [state for state in states if state.exists()]
    return complete[-1] if complete else None


class _StageTrainer(Trainer):
    """`Trainer` with the stage's own loss."""

    def __init__(self, *, loss: Callable[..., Tensor], **arguments: Any) -> None:
        super().__init__(**arguments)
        self._loss = loss
        # The losses are means already: gradient accumulation must average them, not sum them.
        self.model_accepts_loss_kwargs = False

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        return self._loss(model, **inputs)


class _Meter(TrainerCallback):
    """Counts time and tokens across interruptions, reports progress, and marks states as complete."""

    def __init__(self, recipe: Recipe, tokens: int, progress: Progress) -> None:
        self.tokens = tokens
        self.loss = float("nan")
        self.seconds_before = 0.0
        self._steps = recipe.steps
        self._progress = progress
        self._started = time.perf_counter()
        self._first_step = 0

    @property
    def seconds(self) -> float:
        """Training time so far, the interrupted run's included."""
        return self.seconds_before + time.perf_counter() - self._started

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._started, self._first_step = time.perf_counter(), state.global_step

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **said: Any) -> None:
        self.loss = float(said["logs"].get("loss", self.loss))
        steps = state.global_step - self._first_step
        rate = self.tokens * steps / self._steps / (time.perf_counter() - self._started)
        self._progress(state.global_step, self._steps, self.loss, rate)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        saved = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero:
            (saved / _RESUMABLE).write_text(json.dumps({"seconds": self.seconds}), encoding="utf-8")
