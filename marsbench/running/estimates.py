"""What a table will take at a scale: its lines, checkpoints and data, and estimates of training and decoding.

Pure arithmetic over the presets and the paper's numbers; nothing is run, read or fetched.
"""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table

from marsbench.evaluation.benchmarks import benchmark as benchmark_of
from marsbench.paper import published
from marsbench.presets import DEFAULT_BLOCK_SIZE, Preset
from marsbench.running.plans import TablePlan, TrainedStage, is_ours, parents_first
from marsbench.training.stages import BLOCKWISE, recipe

# Questions of the benchmarks as their authors publish them (GPQA: the main set); the mini ones have 400 each.
QUESTIONS = {"ifeval": 541, "bbh": 6511, "mmlu_pro": 12032, "gpqa": 448, "gsm8k": 1319, "humaneval": 164}
_MINI_QUESTIONS = 400
_TWO_STREAMS = 1.6  # what a blockwise objective takes over AR


@dataclass(frozen=True)
class Training:
    """What one stage to train will take."""

    stage: str
    steps: int
    tokens: int  # of the sequences seen, padding and noisy copies not counted
    gpu_hours: float | None  # None where nothing is published that it could be derived from
    core_hours: float | None = None  # of the world's models, which train on one core

    @property
    def hours(self) -> float:
        return self.gpu_hours or self.core_hours or 0.0


def trainings(plan: TablePlan, scale: Preset) -> list[Training]:
    """The stages to train for a table, parents first."""
    ours = [one for one in plan.stages if is_ours(one, scale)]
    return [training(one, scale) for one in parents_first(ours, scale)]


def training(trained: TrainedStage, scale: Preset) -> Training:
    """What training a checkpoint will take."""
    reckoned = scale.assumptions
    chosen = recipe(scale, trained.stage, block_size=trained.block_size or DEFAULT_BLOCK_SIZE)
    steps = chosen.budget.total_steps(reckoned.sequences or 0, chosen.passes)
    tokens = steps * chosen.budget.batch_size * reckoned.tokens_per_sequence
    # The paper gives hours for AR SFT and for MARS; block diffusion has two streams as MARS has.
    like = "mars" if chosen.objective in BLOCKWISE else "ar_sft"
    hours = published("A", scale=scale.scale, method=like, metric="train_h200_hours")
    rate = reckoned.training_tokens_per_second
    return Training(
        trained.title, steps, tokens,
        hours[0].value * chosen.passes if hours else None,
        tokens * (_TWO_STREAMS if chosen.objective in BLOCKWISE else 1) / rate / 3600 if rate else None,
    )  # fmt: skip


def decoding_s(tokens: int, scale: Preset) -> float:
    """How many seconds one device takes to decode so many tokens."""
    return tokens / scale.assumptions.tokens_per_second


def cost(hours: float, price: float | None) -> str:
    """What so many hours of one device cost, in words; nothing without a price."""
    return "" if price is None else f" ({hours * price:,.0f} at {price:g} an hour)"


def questions_of(benchmark: str, scale: Preset, wanted: int | None) -> int:
    """How many questions of a benchmark are asked where a table asks for so many; None = all."""
    questions = QUESTIONS.get(benchmark, _MINI_QUESTIONS)
    return min(questions, scale.questions or questions, wanted or questions)


def plan_tables(plan: TablePlan, scale: Preset) -> list[Table | str]:
    """Everything as tables and sentences for a terminal."""
    return [
        f"{plan.name} at scale {scale.scale}: {plan.title}",
        _lines_table(plan, scale),
        _training_table(plan, scale),
        _decoding_table(plan, scale),
        *_notes(plan, scale),
    ]


def _lines_table(plan: TablePlan, scale: Preset) -> Table:
    table = terminal_table("Lines", "line", "method", "options", "checkpoint")
    for arm in plan.arms:
        ready = scale.ready_checkpoint(*arm.trained)
        options = ", ".join(f"{name} {value}" for name, value in arm.options.items() if name != "draft")
        if "draft" in arm.options:
            smaller = arm.options["draft"] if scale.world else f"{arm.options['draft'].removeprefix('draft_')} of 0.5b"
            options += f", draft {smaller}"
        own = f"our own {arm.stage}, trained" if scale.tables_train else "none: skipped unless it is trained first"
        there = "shipped with marsbench" if ready and scale.ships(ready) else ready
        table.add_row(arm.label, arm.method, options or "-", there or own)
    return table


def _training_table(plan: TablePlan, scale: Preset) -> Table | str:
    stages = trainings(plan, scale)
    if not stages:
        return "Nothing to train."
    data = scale.pretrained.chat_data if scale.pretrained else "the embedded world"
    table = terminal_table(f"Training on {data}, estimated", "stage", "steps", "tokens", "H200 hours")
    for item in stages:
        hours = f"{item.gpu_hours:,.0f}" if item.gpu_hours is not None else "-"
        table.add_row(item.stage, f"{item.steps:,}", f"{item.tokens:,}", hours)
    known = [item.gpu_hours for item in stages if item.gpu_hours is not None]
    steps, tokens = sum(item.steps for item in stages), sum(item.tokens for item in stages)
    table.add_row("together", f"{steps:,}", f"{tokens:,}", f"{sum(known):,.0f}" if known else "-")
    return table


def _decoding_table(plan: TablePlan, scale: Preset) -> Table:
    """A row per benchmark, with every answer as long as it may be: all lines cost the same."""
    lines, benchmarks = len(plan.arms), plan.of(scale.benchmarks)
    title = f"Decoding {lines * len(benchmarks)} cells ({lines} lines x {len(benchmarks)} benchmarks), at most"
    table = terminal_table(
        title, "benchmark", "questions", "tokens of one line", "hours of one line", "hours of all lines"
    )
    whole = 0
    for name in benchmarks:
        questions = questions_of(name, scale, plan.questions)
        tokens = questions * benchmark_of(name).answer_limit(scale.max_new_tokens)
        hours = decoding_s(tokens, scale) / 3600
        whole += lines * tokens
        table.add_row(name, f"{questions:,}", f"{tokens:,}", f"{hours:.2f}", f"{lines * hours:.1f}")
    table.add_row("together", "", f"{whole:,} in all lines", "", f"{decoding_s(whole, scale) / 3600:.1f}")
    return table


def _notes(plan: TablePlan, scale: Preset) -> list[str]:
    reckoned = scale.assumptions
    notes = [
        f"Estimates, not measurements. Decoding: every answer {scale.max_new_tokens} tokens long, at "
        f"{reckoned.tokens_per_second:,.0f} tokens per second on one device; {reckoned.source}. Answers that end "
        "earlier and several tokens per forward pass make it shorter; so do lines that are skipped."
    ]
    if scale.pretrained and trainings(plan, scale):
        notes += [
            f"Training tokens: {reckoned.tokens_per_sequence} per sequence, without padding and noisy copies.",
            f"Data: {reckoned.sequences:,} conversations. H200 hours: the paper's for AR SFT and for MARS at this "
            "scale (Appendix A); twice AR SFT's for two passes, and MARS's for block diffusion, which has two streams "
            "too.",
            f"Training needs about {reckoned.training_memory_gib:g} GiB per device and "
            f"{reckoned.training_disk_gib:g} GiB of disk.",
        ]
    needs = f"Measuring needs {scale.memory_gib:g} GiB of free memory and {scale.disk_gib:g} GiB of disk."
    packing = (
        "On a CPU, large weights are packed for decoding, which takes as much memory again as they do: it is counted "
        "in, and left out where there is no room, or with --no-pack."
    )
    return [*notes, needs, *([packing] if scale.pretrained else [])]


def terminal_table(title: str, *heads: str) -> Table:
    table = Table(title=title, title_justify="left")
    for head in heads:
        table.add_column(head, overflow="fold")
    return table
