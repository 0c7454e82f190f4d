"""Training one stage with transformers' `Trainer`, resumable at any moment.

While a stage trains, its state lies in `NAME.partial`; the finished checkpoint is moved into place at the end.
`accelerate launch -m marsbench train ...` distributes it: however many processes there are, a step trains on the same
sequences, each process on its share.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import patch_environment
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM, Trainer, set_seed
from transformers.trainer_callback import PrinterCallback, TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from marsbench.errors import UserError
from marsbench.forward.adapter import Adapted
from marsbench.forward.limits import vocabulary_of
from marsbench.forward.window import without_cudnn_attention
from marsbench.json_lines import read_json
from marsbench.progress import Say
from marsbench.provenance import provenance
from marsbench.training import checkpoints, data, records
from marsbench.training.chat_data import read_chat_data
from marsbench.training.data import Collator, TrainingData, TrainingSequence
from marsbench.training.learners import LEARNERS, Learner
from marsbench.training.memory import Fitting, at_hand, keep_freed_memory
from marsbench.training.records import TrainingRecord
from marsbench.training.stages import Recipe
from marsbench.training.tokenizer import build_tokenizer, prepare_for_chat
from marsbench.world import difficulty

# Told at every log step of (step, steps, loss, tokens per second).
OnLog = Callable[[int, int, float, float], None]
_LOG_EVERY, _FEWEST_LOGS = 25, 10  # steps per logged loss; fewer, so that a short stage has a curve too
_SAVES = 8  # resumable states per stage, or per cycle of one

_RESUMABLE = "resumable.json"  # written last into a Trainer checkpoint; one without it was cut short


def train(
    recipe: Recipe, folder: Path, parent: Path | None, progress: OnLog, say: Say, watch: TrainerCallback | None = None
) -> TrainingRecord:
    """Train a stage from `parent`, random weights or its base, or go on where it stopped; the checkpoint's record."""
    keep_freed_memory()
    without_cudnn_attention()
    has_heads = LEARNERS[recipe.objective].freezes_model or recipe.head != "none"
    # Heads and adapters are small, and have no layers to shard: no FSDP for them, even if the launcher asks for it.
    with patch_environment(accelerate_use_fsdp=False) if has_heads else nullcontext():
        return _train(recipe, folder, parent, progress, say, watch)


def _train(
    recipe: Recipe, folder: Path, parent: Path | None, progress: OnLog, say: Say, watch: TrainerCallback | None
) -> TrainingRecord:
    started = provenance(seed=recipe.seed)
    set_seed(recipe.seed)
    work = folder.with_name(folder.name + ".partial")
    tokenizer, model, started_from = weights_of(recipe, parent)
    sequences = data_of(recipe, tokenizer, say)
    arguments, fitting = arguments_of(recipe, len(sequences) // recipe.budget.batch_size, work)
    learner = LEARNERS[recipe.objective](recipe, tokenizer, model)
    nn.Module.to(model, arguments.device)  # the `Trainer` moves only what it trains
    if arguments.bf16 and arguments.device.type != "cpu":
        learner.in_bf16()
    meter = _Meter(sequences.tokens, progress, fitting)
    filled_up_to = recipe.block_size if recipe.variant.fills_with_eos else None
    trainer = _StageTrainer(
        loss=learner.loss, model=learner.trained, args=arguments, train_dataset=sequences,
        data_collator=Collator(tokenizer.pad_token_id, tokenizer.eos_token_id, filled_up_to),
        callbacks=[meter, *([watch] if watch else [])], cycle=recipe.budget.cycle, fitting=fitting,
    )  # fmt: skip
    if arguments.process_index:
        set_seed(recipe.seed + arguments.process_index)  # other rows of a batch are masked at random by other numbers
    if resume := _last_resumable(work):
        meter.go_on(read_json(resume / _RESUMABLE, mend=f"remove the folder {resume}"))
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    parameters = sum(parameter.numel() for parameter in learner.trained.parameters())
    learner.end()
    finished, base = work / "finished", recipe.pretrained.base if recipe.pretrained else ""
    if parent is not None:  # as seen from the checkpoint
        base = os.path.relpath(parent.resolve(), folder.resolve())
    elif Path(base).is_dir():
        base = str(Path(base).resolve())
    _save(trainer, finished, tokenizer, learner, base)
    if trainer.is_world_process_zero():
        record = TrainingRecord(
            key=recipe.key, recipe=asdict(recipe),
            provenance={**started, "processes": arguments.world_size, **(fitting.facts() if fitting else {})},
            parameters=parameters, steps=arguments.max_steps, tokens=sequences.tokens, seconds=meter.seconds,
            loss=meter.loss, losses=[entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
            base_weights=None if learner.saves_model else started_from, weights=records.weights_hash(finished),
        )  # fmt: skip
        records.publish(record, finished, folder)
        shutil.rmtree(work)
    trainer.accelerator.wait_for_everyone()
    published = records.finished(folder)
    assert published is not None, "the first process has just published it"
    return published


def _save(trainer: Trainer, folder: Path, tokenizer: PreTrainedTokenizerBase, learner: Learner, base: str) -> None:
    """Write what plain transformers loads, or an adapter of the model at `base`; every process takes part."""
    if trainer.is_world_process_zero():
        shutil.rmtree(folder, ignore_errors=True)
    trainer.accelerator.wait_for_everyone()
    if not learner.freezes_model:
        if trainer.is_fsdp_enabled:  # its resumable states stay in pieces, the finished checkpoint is whole
            trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
        trainer.save_model(str(folder))
    if trainer.is_world_process_zero():
        learner.save(folder, base)
        tokenizer.save_pretrained(folder)
        (folder / "training_args.bin").unlink(missing_ok=True)


def _last_resumable(work: Path) -> Path | None:
    states = sorted(work.glob("checkpoint-*"), key=lambda state: int(state.name.rpartition("-")[2]))
    complete = [state for state in states if (state / _RESUMABLE).exists()]
    for state in set(states) - set(complete):
        shutil.rmtree(state, ignore_errors=True)  # another process may be about it too
    return complete[-1] if complete else None


def weights_of(recipe: Recipe, parent: Path | None) -> tuple[PreTrainedTokenizerBase, PreTrainedModel, str | None]:
    """Tokenizer and weights: the parent's, the pretrained base's, or new ones; and the hash of the first two."""
    begin = parent or (recipe.pretrained.base if recipe.pretrained else None)
    if begin is None:
        assert recipe.model is not None and recipe.vocabulary_size is not None, "random weights are the world's"
        own = build_tokenizer(recipe.vocabulary_size, level=difficulty(recipe.difficulty))
        special = {"pad_token_id": own.pad_token_id, "eos_token_id": own.eos_token_id, "bos_token_id": None}
        sizes = Qwen2Config(vocab_size=len(own), tie_word_embeddings=True, **special, **recipe.model)
        return own, Qwen2ForCausalLM(sizes), None
    loaded = checkpoints.load(begin)
    tokenizer, model = loaded.tokenizer, loaded.model.train()
    if parent is not None:
        return tokenizer, model, loaded.weights
    if isinstance(loaded.model, Adapted):
        what = "the base has an adapter or a draft head, which training would drop"
        raise UserError(what, where=str(begin), fix="give the model alone")
    prepare_for_chat(tokenizer)
    if len(tokenizer) > vocabulary_of(model):
        if not LEARNERS[recipe.objective].saves_model:
            what, fix = "this base has no row left for the mask's embedding", "train stage mars"
            raise UserError(what, where=str(begin), fix=fix)
        model.resize_token_embeddings(len(tokenizer))
    for config in (model.config, model.generation_config):
        config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    try:
        model.generation_config.validate(strict=True)
    except ValueError:  # settings of sampling beside greedy decoding, which could not be saved
        model.generation_config.do_sample = True
    return tokenizer, model, loaded.weights


def data_of(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, say: Say) -> TrainingData:
    budget, pretrained, noisy = recipe.budget, recipe.pretrained, recipe.block_size is not None
    sequences: Sequence[TrainingSequence]
    if pretrained is not None:
        chat = read_chat_data(pretrained.chat_data, tokenizer, pretrained.max_length)
        sequences, tokens, labelled = chat.sequences, chat.lengths, chat.labelled
        say(f"{pretrained.chat_data}: {len(sequences):,} conversations to learn, {chat.dropped:,} left out")
        steps = budget.total_steps(len(sequences), recipe.passes)
    else:
        steps = budget.total_steps(0, recipe.passes)
        count = budget.sequences or steps * budget.batch_size // recipe.passes
        texts: data.Teaching = "plain_text" if recipe.plain_text else "conversations"
        what: data.Teaching = "instruct_data" if recipe.instruct_base else texts
        sequences = data.taught(what, tokenizer, count, recipe.seed, difficulty(recipe.difficulty))
        tokens, labelled = data.lengths(sequences)
    sizes = [a + b for a, b in zip(tokens, labelled, strict=True)] if noisy else tokens
    if pretrained is None and budget.sequences is None:  # the world makes as many as each pass meets once
        drawn = list(range(len(sequences))) * recipe.passes
    else:  # the last batch of the last pass is filled up with the beginning of one more
        drawn = data.shuffled_passes(len(sequences), steps * budget.batch_size, recipe.seed)
    order = data.in_batches(drawn, sizes, budget.batch_size, seed=recipe.seed)
    weights = data.timestep_weights(len(order), recipe.seed) if recipe.variant.weighs_by_timestep else None
    return TrainingData(sequences, order, sum(tokens[index] for index in order), weights)


def arguments_of(recipe: Recipe, steps: int, work: Path) -> tuple[TrainingArguments, Fitting | None]:
    """What the `Trainer` is told; and how batches are cut where memory decides it, else the scale's file does."""
    kind, pretrained = LEARNERS[recipe.objective], recipe.pretrained
    # Gradient checkpointing, but not for heads and adapters of a frozen model: they keep few activations.
    recomputes = pretrained is not None and not kind.freezes_model and pretrained.gradient_checkpointing
    # bf16 saves time on an accelerator, and on a CPU that has instructions for it.
    fast_in_bf16 = torch.accelerator.is_available() or (
        torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # type: ignore[no-untyped-call]
    )
    arguments = TrainingArguments(
        output_dir=str(work), max_steps=steps, seed=recipe.seed, optim="adamw_torch_fused",
        learning_rate=recipe.budget.learning_rate, adam_beta2=recipe.budget.adam_beta2,
        weight_decay=recipe.budget.weight_decay, warmup_steps=max(1, round(0.03 * steps)),
        lr_scheduler_type="cosine",  # where there are no cycles
        use_cpu=not torch.accelerator.is_available(),  # the Trainer refuses bf16 on a CPU that it was not asked to use
        bf16=pretrained is not None and pretrained.bf16 and fast_in_bf16,
        # None where it is off: the option has a new name in newer versions, which complain about the old one.
        gradient_checkpointing=recomputes or None,
        ddp_find_unused_parameters=False,  # every loss uses them all
        train_sampling_strategy="sequential",  # the data is in its order already
        save_steps=max(1, (recipe.budget.cycle or steps) // _SAVES),  # the end of a cycle is kept
        save_total_limit=2, logging_steps=max(1, min(_LOG_EVERY, steps // _FEWEST_LOGS)), disable_tqdm=True,
        report_to="none", log_level="error", remove_unused_columns=False,
        dataloader_pin_memory=torch.cuda.is_available(),
    )  # fmt: skip
    arguments._n_gpu = min(arguments.n_gpu, 1)  # without `accelerate launch`, one process on one device
    # Several processes must each make as many passes as the others; with checkpointing, what a forward pass keeps does
    # not tell what the backward pass needs; the world's batches are small.
    by_memory = pretrained is not None and kind.is_mean_over_rows and not recomputes and arguments.world_size == 1
    fitting = Fitting(recipe, arguments.device) if by_memory and at_hand(arguments.device) is not None else None
    limit = pretrained.rows_per_device[recipe.objective] if pretrained and not fitting else None
    rows, accumulation = share_of_batch(recipe.budget.batch_size, arguments.world_size, limit)
    arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps = rows, accumulation
    return arguments, fitting


def rate_in_cycle(step: int, cycle: int) -> float:
    """The learning rate at a step, over its peak: it rises for a 40th of each cycle, stays, falls for a fifth."""
    at = step % cycle
    return min(1.0, 40 * at / cycle, 5 * (cycle - at) / cycle)


def share_of_batch(batch_size: int, processes: int, limit: int | None = None) -> tuple[int, int]:
    """Rows per device and accumulation steps that make a batch of equal shares; `UserError` where none do."""
    if batch_size % processes:
        fix = "choose a number of processes that divides it, or another --batch-size"
        raise UserError(f"{processes} processes cannot share a batch of {batch_size} sequences equally", fix=fix)
    share = batch_size // processes
    rows = max(rows for rows in range(1, min(share, limit or share) + 1) if share % rows == 0)
    return rows, share // rows


class _StageTrainer(Trainer):
    """`Trainer` with the stage's own loss, rate and optimizer in cycles, and batches cut, where the stage has it so."""

    def __init__(self, loss: Callable[..., Tensor], cycle: int | None, fitting: Fitting | None, **others: Any) -> None:
        super().__init__(**others)
        self._loss, self._cycle, self._fitting = loss, cycle, fitting
        self._share = 1.0  # of the batch's rows, that are in the piece at hand
        self.remove_callback(PrinterCallback)
        # The losses are means already: gradient accumulation must average them, not sum them.
        self.model_accepts_loss_kwargs = False

    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], *_: Any, **__: Any) -> Tensor:
        return self._loss_of(model, **inputs) * self._share

    def _loss_of(self, model: nn.Module, **batch: Tensor) -> Tensor:
        """The loss, in bf16 on an accelerator: accelerate sees to the model's own forward pass alone."""
        device = self.args.device.type
        with torch.autocast(device, torch.bfloat16) if self.args.bf16 and device != "cpu" else nullcontext():
            return self._loss(model, **batch)

    def training_step(self, model: nn.Module, inputs: dict[str, Tensor], *counted: Any, **named: Any) -> Tensor:
        if self._cycle and self.optimizer and self.state.global_step % self._cycle == 0:
            self.optimizer.state.clear()  # a cycle is a training of its own, from the weights of the last
        if self._fitting is None:
            return super().training_step(model, inputs, *counted, **named)
        model.train()
        frozen = getattr(model, "frozen", None)
        weights = [*model.parameters(), *(frozen.parameters() if isinstance(frozen, nn.Module) else [])]
        rows, losses = len(inputs["labels"]), list[Tensor]()
        for piece in self._fitting.cut(self._prepare_inputs(inputs), partial(self._loss_of, model), weights):
            self._share = len(piece["labels"]) / rows
            losses.append(super().training_step(model, piece, *counted, **named))
        self._fitting.make_room()
        return torch.stack(losses).sum()

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> LRScheduler:
        chosen = optimizer or self.optimizer
        if self._cycle is None or chosen is None:
            return super().create_scheduler(num_training_steps, optimizer)
        self.lr_scheduler = LambdaLR(chosen, partial(rate_in_cycle, cycle=self._cycle))
        return self.lr_scheduler


class _Meter(TrainerCallback):
    """Counts time and tokens across interruptions, reports progress, and marks states as complete."""

    def __init__(self, tokens: int, progress: OnLog, fitting: Fitting | None) -> None:
        self._tokens, self._progress, self._fitting = tokens, progress, fitting
        self.loss = float("nan")
        self._started, self._seconds_before, self._first_step = time.perf_counter(), 0.0, 0

    @property
    def seconds(self) -> float:
        return self._seconds_before + time.perf_counter() - self._started

    def go_on(self, kept: dict[str, Any]) -> None:
        self._seconds_before = float(kept["seconds"])
        if self._fitting:
            self._fitting.most = kept.get("entries_at_once")

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._started, self._first_step = time.perf_counter(), state.global_step

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **said: Any) -> None:
        self.loss = float(said["logs"].get("loss", self.loss))
        tokens = self._tokens * (state.global_step - self._first_step) / args.max_steps
        rate = tokens / (time.perf_counter() - self._started)
        self._progress(state.global_step, args.max_steps, self.loss, rate)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.is_world_process_zero:
            kept = {"seconds": self.seconds, **(self._fitting.facts() if self._fitting else {})}
            file = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}" / _RESUMABLE
            file.write_text(json.dumps(kept), encoding="utf-8")
