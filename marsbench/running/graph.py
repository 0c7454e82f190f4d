"""What a run has yet to do, as a graph: trainings, answers, races, scoring; what each comes after, and what it costs.

Pure arithmetic over presets and plans: what is there already, somebody else says (`Known`). Nothing is read or run.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from marsbench.evaluation.benchmarks import benchmark as benchmark_of
from marsbench.presets import DEFAULT_BLOCK_SIZE, Preset
from marsbench.running.estimates import questions_of, training
from marsbench.running.plans import Arm, Asked, TablePlan, TrainedStage
from marsbench.training.stages import lineage, recipe, stage

_LEAST_S = 60.0  # of answering; less is not worth a piece of its own
_PER_WORKER = 4  # pieces of answering for each worker, so that none has to wait long for the last one


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A piece of a run's work."""

    name: str
    title: str  # on the terminal
    after: tuple[str, ...] = ()  # names of pieces
    seconds: float = 0.0  # on one device, roughly
    gpus: int = 1
    alone: bool = False  # it times something


@dataclass(frozen=True, kw_only=True)
class TrainingPiece(Piece):
    """A checkpoint to train."""

    trained: TrainedStage


@dataclass(frozen=True, kw_only=True)
class AnsweringPiece(Piece):
    """Cells of one checkpoint to answer, or one part of the questions of one cell."""

    cells: tuple[Asked, ...]
    shard: tuple[int, int] = (1, 1)


@dataclass(frozen=True, kw_only=True)
class PagePiece(Piece):
    """The rows of a page: parts of cells put together and scored, and whatever the page alone measures."""

    study: str


@dataclass(frozen=True, kw_only=True)
class RacePiece(Piece):
    """One race of a page."""

    study: str
    batch_size: int


class Known(Protocol):
    """What is there already, and what can be had."""

    def is_trained(self, trained: TrainedStage) -> bool:
        """Whether a checkpoint of our own is there."""
        ...

    def asked(self, plan: TablePlan) -> list[str]:
        """The benchmarks that a table asks."""
        ...

    def questions_left(self, asked: Asked) -> int:
        """How many questions of a cell have no answers yet."""
        ...


class Nothing:
    """Nothing is there: the whole of what a scale takes."""

    def __init__(self, scale: Preset) -> None:
        self._scale = scale

    def is_trained(self, trained: TrainedStage) -> bool:
        """It is not."""
        return False

    def asked(self, plan: TablePlan) -> list[str]:
        """Those of the scale's benchmarks that a table asks."""
        return plan.of(self._scale.benchmarks)

    def questions_left(self, asked: Asked) -> int:
        """All of them; none where there will be no checkpoint."""
        needed = [stage for stage in (asked.arm.trained, asked.arm.draft) if stage is not None]
        if all(is_ours(one, self._scale) or self._scale.ready_checkpoint(*one) for one in needed):
            return questions_of(asked.benchmark, self._scale, asked.questions)
        return 0


def trainings(
    wanted: Iterable[TrainedStage], scale: Preset, known: Known, *, seed: int = 0, gpus: int = 1
) -> list[TrainingPiece]:
    """What is to be trained for some checkpoints, parents first, each after the one that it starts from."""
    found: dict[TrainedStage, TrainingPiece] = {}
    for one in wanted:
        parent = None
        for name in lineage(scale, one.stage) if is_ours(one, scale) else ():
            trained = TrainedStage.of(name, one.block_size)
            if trained not in found and not known.is_trained(trained):
                found[trained] = _training(trained, found.get(parent) if parent else None, scale, seed, gpus)
            parent = trained
    return list(found.values())


def is_ours(trained: TrainedStage, scale: Preset) -> bool:
    """Whether a run trains a checkpoint that it lacks: not where one is published, or where it would take days."""
    from_afar = scale.pretrained is not None and stage(trained.stage).draft
    return scale.tables_train and not from_afar and scale.ready_checkpoint(*trained) is None


def _training(
    trained: TrainedStage, parent: TrainingPiece | None, scale: Preset, seed: int, gpus: int
) -> TrainingPiece:
    chosen = recipe(scale, trained.stage, block_size=trained.block_size or DEFAULT_BLOCK_SIZE, seed=seed)
    return TrainingPiece(
        name=f"training-{trained.slug}",
        title=f"training {trained.title}",
        after=(parent.name,) if parent else (),
        seconds=training(chosen, scale).hours * 3600 / gpus,
        gpus=gpus,
        trained=trained,
    )


def cells(plans: Iterable[TablePlan], known: Known) -> list[Asked]:
    """The cells of some tables, each once."""
    all_of_them = [
        Asked(arm, name, plan.questions) for plan in plans for arm in plan.arms for name in known.asked(plan)
    ]
    return list({one.place: one for one in all_of_them}.values())


def answerings(
    wanted: Iterable[Asked], trained: Sequence[TrainingPiece], scale: Preset, known: Known, *, workers: int
) -> list[AnsweringPiece]:
    """What is to be answered: pieces of about the same size, each of one checkpoint, after what trains that.

    Several small cells make a piece; a cell that is larger than a piece should be is answered in parts.
    """
    seconds, left = dict[str, float](), list[Asked]()
    for one in wanted:
        if questions := known.questions_left(one):
            seconds[one.place] = questions * _seconds_per_question(one, scale)
            left.append(one)
    size = max(_LEAST_S, sum(seconds.values()) / (_PER_WORKER * workers))
    numbers, found = Counter[TrainedStage](), list[AnsweringPiece]()
    for group in _by_checkpoints(left):
        for some, parts in _in_pieces(group, seconds, size):
            first, whole = some[0].arm, sum(seconds[one.place] for one in some)
            for part in range(1, parts + 1):
                numbers[first.trained] += 1
                number = numbers[first.trained]
                found.append(
                    AnsweringPiece(
                        name=f"answering-{first.trained.slug}-{number}",
                        title=f"answering with {first.trained.title}, piece {number}",
                        after=_needed(first, trained),
                        seconds=whole / parts,
                        cells=tuple(some),
                        shard=(part, parts),
                    )
                )
    return found


def _seconds_per_question(asked: Asked, scale: Preset) -> float:
    """Of an answer that is as long as it may be."""
    tokens = benchmark_of(asked.benchmark).answer_limit(scale.max_new_tokens)
    return tokens / scale.assumptions.tokens_per_second


def _by_checkpoints(wanted: Iterable[Asked]) -> list[list[Asked]]:
    """Cells that share their checkpoint, and that of their draft model."""
    groups = defaultdict(list)
    for one in wanted:
        groups[one.arm.trained, one.arm.draft].append(one)
    return list(groups.values())


def _in_pieces(group: Sequence[Asked], seconds: dict[str, float], size: float) -> list[tuple[list[Asked], int]]:
    """Cells that share their checkpoints, in pieces of about a size -> in how many parts each is answered."""
    found, filling, filled = list[tuple[list[Asked], int]](), list[Asked](), 0.0
    for one in group:
        if seconds[one.place] >= 2 * size:
            found.append(([one], math.ceil(seconds[one.place] / size)))
            continue
        filling.append(one)
        filled += seconds[one.place]
        if filled >= size:
            found.append((filling, 1))
            filling, filled = [], 0.0
    return [*found, *([(filling, 1)] if filling else [])]


def _needed(arm: Arm, trained: Iterable[TrainingPiece]) -> tuple[str, ...]:
    """The trainings that a line comes after."""
    return tuple(piece.name for piece in trained if piece.trained in (arm.trained, arm.draft))


def page_after(stages: Iterable[TrainedStage], wanted: Iterable[Asked], pieces: Iterable[Piece]) -> tuple[str, ...]:
    """What a page comes after: the trainings of its checkpoints, and the answers of its cells."""
    stages, places = set(stages), {one.place for one in wanted}
    return tuple(
        piece.name
        for piece in pieces
        if (isinstance(piece, TrainingPiece) and piece.trained in stages)
        or (isinstance(piece, AnsweringPiece) and any(one.place in places for one in piece.cells))
    )
