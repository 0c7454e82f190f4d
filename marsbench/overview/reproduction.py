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
from marsbench.running.plans import TrainedStage
from marsbench.running.run import Run
from marsbench.running.side_by_side import answer_side_by_side, train_side_by_side
from marsbench.studies import studies, study_of
from marsbench.studies.study import Study


def reproduce_page(name: str, run: Run, *, quick: bool = False) -> Path | None:
    """Measure what a page lacks and write it, with its rows; None where only a part of the questions was answered.

    Args:
        name: a study's key, or that of something which stands on a study's page.
        run: where and how.
        quick: with the quick grid, where the study races one.

    Raises:
        UserError: if there is no page of that name.
    """
    study = study_of(name)
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
    train_side_by_side(run, _checkpoints(wanted, run, quick=quick), jobs)
    answer_side_by_side(run, [study.cells for study in wanted if study.cells is not None], jobs)
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


def _checkpoints(wanted: Sequence[Study], run: Run, *, quick: bool) -> list[TrainedStage]:
    """The checkpoints behind some studies, each once."""
    of_plans = [trained for study in wanted if study.plan is not None for trained in study.plan.stages]
    grids = [study.grid(run.scale, quick) for study in wanted if study.grid is not None]
    return list(dict.fromkeys([*of_plans, *[trained for grid in grids for trained in grid.checkpoints]]))


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
