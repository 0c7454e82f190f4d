"""Which measurements a table is made of.

An *arm* is one line of a table: a trained stage, decoded by a method with its options. Every arm is measured on every
benchmark of the scale; one arm on one benchmark is a cell.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from marsbench.presets import DEFAULT_BLOCK_SIZE, Preset
from marsbench.training.stages import BLOCKWISE, lineage, stage
from marsbench.world import modelled_on, within_training

AS_RELEASED = ", as released"  # our words, beside the paper's, for what its authors' code does


class TrainedStage(NamedTuple):
    """A stage, and the block size B that its checkpoint is trained for; None where its objective has no blocks."""

    stage: str
    block_size: int | None

    @classmethod
    def of(cls, name: str, block_size: int | None = DEFAULT_BLOCK_SIZE) -> TrainedStage:
        """A stage at a block size, which is dropped where the objective has no blocks."""
        return cls(name, block_size if stage(name).objective in BLOCKWISE else None)

    @property
    def title(self) -> str:
        """What it is called on the terminal."""
        return self.stage if self.block_size is None else f"{self.stage}, B = {self.block_size}"

    @property
    def slug(self) -> str:
        """What it is called in the names of files."""
        return self.stage if self.block_size is None else f"{self.stage}-b{self.block_size}"

    @property
    def place(self) -> str:
        """What it is called in `Run.failures`."""
        return f"checkpoint {self.slug}"


def parents_first(wanted: Iterable[TrainedStage], scale: Preset) -> dict[TrainedStage, TrainedStage | None]:
    """What is trained for some checkpoints: each -> the one that it starts from, which stands before it."""
    found: dict[TrainedStage, TrainedStage | None] = {}
    for last in wanted:
        parent = None
        for name in lineage(scale, last.stage):
            trained = TrainedStage.of(name, last.block_size)
            found.setdefault(trained, parent)
            parent = trained
    return found


def is_ours(trained: TrainedStage, scale: Preset) -> bool:
    """Whether a run trains a checkpoint that it lacks: not where one is published, or where it would take days."""
    from_afar = drafts_from_afar(trained, scale)
    return scale.tables_train and not from_afar and scale.ready_checkpoint(*trained) is None


def drafts_from_afar(trained: TrainedStage, scale: Preset) -> bool:
    """Whether a stage is a draft model's, which the paper's scales do not train: another scale's models draft."""
    return scale.pretrained is not None and stage(trained.stage).draft


@dataclass(frozen=True)
class Arm:
    """One line of a table.

    `name` is stable and never shown; `label` is shown. `options` go to the method as they are (`block_size`,
    `threshold`, `accept`, `metric`), but for `draft`, which names the stage of the draft model. `published` is the
    paper's name for the line, None for lines of our own.
    """

    name: str
    label: str
    stage: str
    method: str
    options: dict[str, Any] = field(default_factory=dict)
    published: str | None = None
    untrained_masks: bool = False  # decode with masks although the checkpoint has never seen any
    optional: bool = False  # a line that pages leave out where it has no rows
    trained_block_size: int | None = None  # B of the checkpoint; None = the block size that it is decoded with
    dtype: str = "float32"  # of weights and caches

    @property
    def identity(self) -> dict[str, Any]:
        """What rows say of the line, by their fields."""
        return {"arm": self.name, "stage": self.stage, "method": self.method, "options": self.options}

    @property
    def block_size(self) -> int:
        """B of the line's checkpoint, where its training has one."""
        return self.trained_block_size or int(self.options.get("block_size", DEFAULT_BLOCK_SIZE))

    @property
    def trained(self) -> TrainedStage:
        """What trains the line's checkpoint; lines with the same answer share it."""
        return TrainedStage.of(self.stage, self.block_size)

    @property
    def needs(self) -> list[TrainedStage]:
        """The checkpoints that it decodes with: its own, then that of its draft model."""
        return [self.trained, *([self.draft] if self.draft else [])]

    @property
    def draft(self) -> TrainedStage | None:
        """What trains the line's draft model, for a line that has one."""
        return TrainedStage.of(self.options["draft"], self.block_size) if "draft" in self.options else None


class Asked(NamedTuple):
    """A cell: a line on a benchmark, and how many of its questions at most; None = all."""

    arm: Arm
    benchmark: str
    questions: int | None

    @property
    def place(self) -> str:
        """What it is called in `Run.failures`: the same for all tables that share it."""
        arm = self.arm
        return json.dumps([arm.trained, arm.draft, arm.method, arm.options, self.benchmark, self.questions])


@dataclass(frozen=True)
class TablePlan:
    """A table of the paper, or a figure, or a page of our own: its number, its title and its arms in order."""

    number: str  # in the paper; of a page of our own, what commands and files call it
    title: str
    arms: tuple[Arm, ...]
    benchmarks: tuple[str, ...] = ()  # as the paper calls them; none = all six
    within_training: bool = False  # asks no more steps than training shows, where the world has such a benchmark
    questions: int | None = None  # of each benchmark; None = all
    step_cost: bool = False  # also time a training step
    figure: bool = False
    own: str = ""  # the name of a page of our own, which the paper has no table for
    apart: bool = False  # chooses between lines, on a training seed whose rows no other page may take
    elsewhere: tuple[Arm, ...] = ()  # the paper's lines of this table whose counterparts another page measures

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

    @property
    def stages(self) -> list[TrainedStage]:
        """The checkpoints that the arms need, each once, in order; those of draft models come last."""
        found = [arm.needs for arm in self.arms]
        return list(dict.fromkeys([*[own for own, *_ in found], *[draft for _, *drafts in found for draft in drafts]]))
