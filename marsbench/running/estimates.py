"""How long training and decoding will take at a scale.

Pure arithmetic over the presets and the paper's numbers; nothing is run, read or fetched.
"""

from marsbench.line import TrainedStage
from marsbench.paper import published
from marsbench.presets import DEFAULT_BLOCK_SIZE, Preset
from marsbench.training.stages import BLOCKWISE, recipe

# Questions of the benchmarks as their authors publish them (GPQA: the main set); the mini ones have 400 each.
QUESTIONS = {"ifeval": 541, "bbh": 6511, "mmlu_pro": 12032, "gpqa": 448, "gsm8k": 1319, "humaneval": 164}
_MINI_QUESTIONS = 400
_TWO_STREAMS = 1.6  # what a blockwise objective takes over AR


def training_s(trained: TrainedStage, scale: Preset) -> float:
    """Seconds of training a checkpoint: on an H200 as published, or on one core; 0 where nothing says it."""
    reckoned = scale.assumptions
    chosen = recipe(scale, trained.stage, block_size=trained.block_size or DEFAULT_BLOCK_SIZE)
    # The paper gives hours for AR SFT and for MARS; block diffusion has two streams as MARS has.
    two_streams = chosen.objective in BLOCKWISE
    like = "mars" if two_streams else "ar_sft"
    if hours := published("A", scale=scale.scale, method=like, metric="train_h200_hours"):
        return 3600 * hours[0].value * chosen.passes
    if (rate := reckoned.training_tokens_per_second) is None:
        return 0.0
    sequences = chosen.budget.total_steps(reckoned.sequences or 0, chosen.passes) * chosen.budget.batch_size
    return sequences * reckoned.tokens_per_sequence * (_TWO_STREAMS if two_streams else 1) / rate


def decoding_s(tokens: int, scale: Preset) -> float:
    return tokens / scale.assumptions.tokens_per_second


def questions_of(benchmark: str, scale: Preset, wanted: int | None) -> int:
    """How many questions of a benchmark are asked where a table asks for so many; None = all."""
    questions = QUESTIONS.get(benchmark, _MINI_QUESTIONS)
    return min(questions, scale.questions or questions, wanted or questions)
