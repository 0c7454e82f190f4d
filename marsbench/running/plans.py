"""Which measurements a table is made of.

An *line* is one line of a table: a trained stage, decoded by a method with its options. Every line is measured on every
benchmark of the scale; one line on one benchmark is a cell.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from marsbench.line import Line, TrainedStage
from marsbench.presets import Preset
from marsbench.training.stages import lineage, stage
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
    from_afar = drafts_from_afar(trained, scale)
    return scale.tables_train and not from_afar and scale.ready_checkpoint(*trained) is None


def drafts_from_afar(trained: TrainedStage, scale: Preset) -> bool:
    """Whether a stage is a draft model's, which the paper's scales do not train: another scale's models draft."""
    return scale.pretrained is not None and stage(trained.stage).draft


class Asked(NamedTuple):
    """A cell: a line on a benchmark, and how many of its questions at most; None = all."""

    line: Line
    benchmark: str
    questions: int | None

    @property
    def place(self) -> str:
        """What it is called in `Run.failures`: the same for all tables that share it."""
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
    seed: int | None = None  # the training seed to measure it at, where it chooses between lines for other pages

    def __post_init__(self) -> None:
        if not self.own and not self.number.isdecimal():
            raise ValueError(f"{self.number!r} is no number of the paper's; a page of our own gives its name in `own`")

    @property
    def name(self) -> str:
        """What the paper calls it, as in "Table 2"."""
        return self.own or f"{'Figure' if self.figure else 'Table'} {self.number}"

    @property
    def key(self) -> str:
        """What commands and files call it, as in "table2"."""
        return self.number if self.own else self.name.lower().replace(" ", "")

    def of(self, benchmarks: Iterable[str]) -> list[str]:
        """Those of a scale's benchmarks that the table asks; a mini one stands for the one it is modelled on."""
        asked = [name for name in benchmarks if not self.benchmarks or modelled_on(name) in self.benchmarks]
        return [within_training(name) for name in asked] if self.within_training else asked

    def asks(self, benchmark: str) -> bool:
        """Whether its lines answer a benchmark, under this name."""
        return self.of([benchmark]) == [benchmark] and (self.within_training or not benchmark.startswith("within_"))

    def cells(self, benchmarks: Iterable[str]) -> list[Asked]:
        return [Asked(line, name, self.questions) for line in self.lines for name in benchmarks]

    @property
    def stages(self) -> list[TrainedStage]:
        """The checkpoints that the lines need, each once, in order; those of draft models come last."""
        needed = [line.needs for line in self.lines]
        return list(
            dict.fromkeys([*[own for own, *_ in needed], *[draft for _, *drafts in needed for draft in drafts]])
        )
