"""Which measurements a table is made of, and how long they take. A line on a benchmark of the scale is a cell."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from marsbench.line import Line, TrainedStage, checkpoints_of
from marsbench.paper import published
from marsbench.presets import DEFAULT_BLOCK_SIZE, Preset
from marsbench.training.stages import BLOCKWISE, lineage, recipe, stage
from marsbench.world import modelled_on, within_training

AS_RELEASED = ", as released"  # our words, beside the paper's, for what its authors' code does


def parents_first(wanted: Iterable[TrainedStage], scale: Preset) -> dict[TrainedStage, TrainedStage | None]:
    """What is trained for some checkpoints: each -> the one that it starts from, which stands before it."""
    parents: dict[TrainedStage, TrainedStage | None] = {}
    for last in wanted:
        parent = None
        for name in lineage(scale, last.stage):
            trained = TrainedStage.of(name, last.block_size)
            parents.setdefault(trained, parent)
            parent = trained
    return parents


def is_ours(trained: TrainedStage, scale: Preset) -> bool:
    """Whether a run trains a checkpoint that it lacks: not where one is published, or where it would take days."""
    return scale.tables_train and not drafts_from_afar(trained, scale) and scale.ready_checkpoint(*trained) is None


def drafts_from_afar(trained: TrainedStage, scale: Preset) -> bool:
    """Whether a stage is a draft model's, which the paper's scales do not train: another scale's models draft."""
    return scale.pretrained is not None and stage(trained.stage).draft


class PlannedCell(NamedTuple):
    """A line on a benchmark, and how many of its questions at most; None = all."""

    line: Line
    benchmark: str
    questions: int | None

    @property
    def id(self) -> str:
        line = self.line
        what = [line.trained, line.draft, line.method, line.options, line.dtype]
        return json.dumps([*what, self.benchmark, self.questions])


@dataclass(frozen=True)
class TablePlan:
    """A table of the paper, or a figure, or a page of our own: its number, its title and its lines in order."""

    number: str  # in the paper; of a page of our own, what commands and files call it
    title: str
    lines: tuple[Line, ...]
    benchmarks: tuple[str, ...] = ()  # as the paper calls them; none = all six
    within_training: bool = False  # asks no more steps than training shows, where the world has such a benchmark
    questions: int | None = None  # of each benchmark; None = all
    figure: bool = False
    own: str = ""  # the name of a page of our own, which the paper has no table for
    seeds: tuple[int, ...] = ()  # the training seeds to measure it at, where no other page has them; none = any

    @property
    def name(self) -> str:
        """What the paper calls it, as in "Table 2"."""
        return self.own or f"{'Figure' if self.figure else 'Table'} {self.number}"

    @property
    def key(self) -> str:
        """What commands and files call it, as in "table2"."""
        return self.number if self.own else self.name.lower().replace(" ", "")

    def line(self, name: str) -> Line:
        return next(line for line in self.lines if line.name == name)

    def of(self, benchmarks: Iterable[str]) -> list[str]:
        """Those of a scale's benchmarks that the table asks; a mini one stands for the one it is modelled on."""
        names = [name for name in benchmarks if not self.benchmarks or modelled_on(name) in self.benchmarks]
        return [within_training(name) for name in names] if self.within_training else names

    def asks(self, benchmark: str) -> bool:
        return self.of([benchmark]) == [benchmark] and (self.within_training or not benchmark.startswith("within_"))

    def cells(self, benchmarks: Iterable[str]) -> list[PlannedCell]:
        return [PlannedCell(line, name, self.questions) for line in self.lines for name in benchmarks]

    @property
    def stages(self) -> list[TrainedStage]:
        return checkpoints_of(self.lines)


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
