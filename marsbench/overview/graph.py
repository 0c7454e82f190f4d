"""The graph of work behind some studies: what they train, answer, race and score, as far as it is not done yet."""

from __future__ import annotations

from collections.abc import Sequence

from marsbench.presets import Preset
from marsbench.racing.estimates import race_seconds
from marsbench.running.graph import (
    Known,
    PagePiece,
    Piece,
    RacePiece,
    answerings,
    cells,
    page_after,
    trainings,
)
from marsbench.studies.study import Study

_PAGE_S = 5.0  # of putting answers together and scoring them


def graph_of(
    ready: Sequence[Study], scale: Preset, known: Known, *, quick: bool, workers: int, seed: int = 0, gpus: int = 1
) -> list[Piece]:
    """All pieces behind some studies that are not done yet, each after those that it comes after.

    Args:
        ready: the studies.
        scale: of the run.
        known: what is there already.
        quick: whether a study that races a grid races its quick one.
        workers: among how many the answers are shared out.
        seed: of the trainings.
        gpus: how many GPUs each training of a real model gets.
    """
    stages = [one for study in ready for one in study.trains(scale, quick)]
    trained = trainings(stages, scale, known, seed=seed, gpus=gpus if scale.pretrained else 1)
    asked = cells([study.cells for study in ready if study.cells], known)
    before: list[Piece] = [*trained, *answerings(asked, trained, scale, known, workers=workers)]
    return [*before, *[page for study in ready for page in pages_of(study, scale, known, before, quick=quick)]]


def pages_of(study: Study, scale: Preset, known: Known, before: Sequence[Piece], *, quick: bool) -> list[Piece]:
    """What makes the rows of a page: one race per batch size, or all in one."""
    after = page_after(study.trains(scale, quick), cells([study.cells] if study.cells else [], known), before)
    if study.grid is None:
        timed = study.times(scale)
        title = f"timing and scoring {study.name}" if timed else f"scoring {study.name}"
        return [PagePiece(name=study.key, title=title, after=after, seconds=_PAGE_S, alone=timed, study=study.key)]
    grid = study.grid(scale, quick)
    return [
        RacePiece(
            name=f"{study.key}-batch{size}",
            title=f"racing {study.name}, {size} at once",
            after=after,
            seconds=race_seconds(grid.at(size), scale),
            alone=True,
            study=study.key,
            batch_size=size,
        )
        for size in grid.batch_sizes
    ]
