"""How long training and decoding will take at a scale.

Pure arithmetic over the presets and the paper's numbers; nothing is run, read or fetched.
"""

from dataclasses import dataclass

from marsbench.line import TrainedStage
from marsbench.paper import published
from marsbench.presets import DEFAULT_BLOCK_SIZE, Preset
from marsbench.running.plans import TablePlan, is_ours, parents_first
from marsbench.training.stages import BLOCKWISE, recipe

# Questions of the benchmarks as their authors publish them (GPQA: the main set); the mini ones have 400 each.
QUESTIONS = {"ifeval": 541, "bbh": 6511, "mmlu_pro": 12032, "gpqa": 448, "gsm8k": 1319, "humaneval": 164}
_MINI_QUESTIONS = 400
_TWO_STREAMS = 1.6  # what a blockwise objective takes over AR


@dataclass(frozen=True)
class Training:
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
    ours = [stage for stage in plan.stages if is_ours(stage, scale)]
    return [training(stage, scale) for stage in parents_first(ours, scale)]


def training(trained: TrainedStage, scale: Preset) -> Training:
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
    return tokens / scale.assumptions.tokens_per_second


def questions_of(benchmark: str, scale: Preset, wanted: int | None) -> int:
    """How many questions of a benchmark are asked where a table asks for so many; None = all."""
    questions = QUESTIONS.get(benchmark, _MINI_QUESTIONS)
    return min(questions, scale.questions or questions, wanted or questions)
