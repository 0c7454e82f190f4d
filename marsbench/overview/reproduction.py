"""From the name of a page to its rows, the page itself, and the pages on the whole paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.markup import escape

from marsbench.errors import NothingMeasured, UserError
from marsbench.files import write_atomically
from marsbench.overview.pages import write_study, write_whole_paper
from marsbench.racing.grid import Grid
from marsbench.racing.sweep import Sweep
from marsbench.rows.kinds import Row, any_measured
from marsbench.rows.store import rows_text
from marsbench.rows.workspace import Workspace
from marsbench.running.run import Run
from marsbench.running.side_by_side import answer_side_by_side, train_side_by_side
from marsbench.running.tables import Table
from marsbench.studies import studies, study_of
from marsbench.studies.study import Study


def reproduce_page(name: str, run: Run, *, quick: bool = False, jobs: int = 1) -> Path | None:
    """Measure what a page lacks and write it, with its rows; None where only a part of the questions was answered.

    Args:
        name: a study's key, or that of something which stands on a study's page.
        run: where and how.
        quick: with the quick grid, where the study races one.
        jobs: how many of the world's checkpoints to train, or to answer with, at a time; what is timed runs alone.

    Raises:
        UserError: if there is no page of that name.
    """
    study = study_of(name)
    _work_side_by_side([study], run, quick=quick, jobs=jobs)
    if study.grid is not None:
        return reproduce_sweep(study, run, study.grid(run.scale, quick), "quick" if quick else "")
    rows = study.rows(run)
    return _publish(study, rows, run.workspace) if run.is_whole else None


def reproduce_sweep(study: Study, run: Run, grid: Grid, label: str = "") -> Path:
    """Race what a grid lacks, or a shard's part of it, and write its rows and page to folders that a label names."""
    part, parts = run.shard
    names = [label, f"part{part}-of-{parts}" if parts > 1 else "", run.workspace.variant]
    workspace = replace(run.workspace, variant="-".join(filter(None, names)))
    return _publish(study, Sweep(run, grid.part(run.shard)).rows(), workspace)


def whole_paper_studies() -> list[Study]:
    """What reproducing the whole paper makes, in turn."""
    return [study for study in studies().values() if study.in_paper]


def reproduce_all(run: Run, *, quick: bool = False, jobs: int = 1) -> None:
    """Every page of the paper in turn, then those on the whole of it; `quick` is for what races a grid.

    What they lack of the world's checkpoints and answers is trained and answered before, so many at a time.

    Raises:
        UserError: at the end, if pages could not be made; it names them, and the others are there.
    """
    wanted = whole_paper_studies()
    _work_side_by_side(wanted, run, quick=quick, jobs=jobs)
    failed: dict[str, UserError] = {}
    for number, study in enumerate(wanted, 1):
        run.reporter.say(f"page {number} of {len(wanted)}: {study.key}")
        try:
            reproduce_page(study.key, run, quick=quick)
        except UserError as error:
            run.reporter.say(escape(f"{study.key}: {error}"))
            failed[study.key] = error
    if len(failed) < len(wanted):
        write_whole_paper(run.workspace.root, run.scale.scale)
    if failed:
        nothing = len(failed) == len(wanted) and all(isinstance(error, NothingMeasured) for error in failed.values())
        raise (NothingMeasured if nothing else UserError)(
            f"{len(failed)} of {len(wanted)} pages could not be made: {', '.join(failed)}",
            fix="do what the messages above say; the same command then makes what is missing",
        )


def _work_side_by_side(wanted: Sequence[Study], run: Run, *, quick: bool, jobs: int) -> None:
    """Train and answer what some studies lack, so many checkpoints at a time.

    All of it has ended when this returns: what a study times, it times alone, when it is asked for its rows.
    """
    if jobs == 1:
        return
    ready = [study for study in wanted if not _refuses(study, run, quick=quick)]
    train_side_by_side(run, [trained for study in ready for trained in study.trains(run.scale, quick)], jobs)
    answer_side_by_side(run, [study.cells for study in ready if study.cells is not None], jobs)


def _refuses(study: Study, run: Run, *, quick: bool) -> bool:
    """Whether a study will say at once that it cannot be measured, so that nothing is trained for it in vain."""
    try:
        if study.grid is not None:
            Sweep(run, study.grid(run.scale, quick))
        return study.cells is not None and not Table(run, study.cells).can_ask
    except UserError:
        return True


def _publish(study: Study, rows: Sequence[Row], workspace: Workspace) -> Path:
    """Write a page's rows and the page with its figures; returns where it is.

    Raises:
        NothingMeasured: there is nothing to show; what was published before is left as it is.
    """
    if not any_measured(rows):
        reasons = dict.fromkeys(row.reason for row in rows if row.reason)
        raise NothingMeasured(
            f"nothing of {study.name} could be measured at scale {workspace.scale}: {'; '.join(reasons)}",
            fix=f"marsbench doctor --scale {workspace.scale} says what this machine lacks",
        )
    write_atomically(workspace.results(study.key), rows_text(rows).encode())
    return write_study(study, workspace)
