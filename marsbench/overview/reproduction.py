"""From the name of a page to its rows, the page itself, and the pages on the whole paper."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from marsbench.errors import NothingMeasured, UserError
from marsbench.executors.tasks import Executor
from marsbench.locks import locked
from marsbench.overview.pages import write_study, write_whole_paper
from marsbench.overview.work import carry_out
from marsbench.racing.grid import Grid
from marsbench.racing.sweep import Sweep
from marsbench.rows.kinds import Row, any_measured
from marsbench.rows.workspace import Workspace
from marsbench.running.run import Run
from marsbench.studies import queries, studies_of_paper, study_of
from marsbench.studies.study import Study


def reproduce_page(name: str, run: Run, executor: Executor, *, quick: bool = False) -> Path:
    """Measure what a page lacks and write it, with its rows; `UserError` if there is no page of that name."""
    study = study_of(name)
    if (seeds := study.query.seeds) and run.seed not in seeds:
        fix = f"give --seed {' or '.join(map(str, seeds))}"
        raise UserError(f"{study.name} has training seeds of its own", fix=fix)
    made = carry_out([study], run, executor, quick=quick)
    return _write_page(study, run, made[study.key], quick=quick)


def reproduce_part(wanted: Sequence[Study], run: Run, executor: Executor, *, quick: bool = False) -> None:
    """Train what some pages need, log one part of their answers and race one part of their contenders (`Run.shard`)."""
    asked = [study for study in wanted if study.plans or study.grid]
    if not asked:
        raise UserError("--shard divides questions and races, and this page has none", fix="leave it out")
    for made in carry_out(asked, run, executor, quick=quick).values():
        if isinstance(made, UserError):
            raise made
        if failed := [row.reason for row in made if row.status == "failed"]:
            raise UserError("; ".join(dict.fromkeys(failed)), fix="correct that; the same command then goes on")


def reproduce_sweep(study: Study, run: Run, grid: Grid, label: str = "") -> Path:
    """Race what a grid lacks, and write its rows and page to folders that a label names."""
    return _publish(study, Sweep(run, grid).rows(), _named(run, label))


def _named(run: Run, label: str) -> Workspace:
    return replace(run.workspace, variant="-".join(filter(None, [label, run.workspace.variant])))


def reproduce_all(run: Run, executor: Executor, *, quick: bool = False) -> None:
    """Every page of the paper, then those on the whole of it; at the end `UserError` names those that were not made."""
    wanted = studies_of_paper()
    made = carry_out(wanted, run, executor, quick=quick)
    failed: dict[str, UserError] = {}
    for number, study in enumerate(wanted, 1):
        run.reporter.say(f"page {number} of {len(wanted)}: {study.key}")
        try:
            _write_page(study, run, made[study.key], quick=quick)
        except UserError as error:
            run.reporter.say(f"{study.key}: {error}")
            failed[study.key] = error
    if len(failed) < len(wanted):
        write_whole_paper(run.workspace.root, run.scale.scale)
    if failed:
        nothing = len(failed) == len(wanted) and all(isinstance(error, NothingMeasured) for error in failed.values())
        raise (NothingMeasured if nothing else UserError)(
            f"{len(failed)} of {len(wanted)} pages could not be made: {', '.join(failed)}",
            fix="follow the messages above; the same command then makes the missing pages",
        )


def _write_page(study: Study, run: Run, made: list[Row] | UserError, *, quick: bool) -> Path:
    if isinstance(made, UserError):
        raise made
    return _publish(study, made, _named(run, "quick" if quick and study.grid else ""))


def _publish(study: Study, rows: Sequence[Row], workspace: Workspace) -> Path:
    """Write a page and its rows, which replace those that only this page had; returns where the page is.

    `NothingMeasured` where there is nothing to show; what was published before is left as it is.
    """
    if not any_measured(rows):
        reasons = dict.fromkeys(row.reason for row in rows if row.reason)
        raise NothingMeasured(
            f"nothing of {study.name} could be measured at scale {workspace.scale}: {'; '.join(reasons)}",
            fix=f"marsbench doctor --scale {workspace.scale} shows what is missing here",
        )
    with locked(workspace.runs / "locks" / "publish.lock"):  # two commands may publish into one store
        before, known = workspace.rows, queries()
        others = [known[name] for name in workspace.pages if name in known and name != study.key]
        stale = {row.id for row in study.query.of(before)} - {row.id for query in others for row in query.of(before)}
        workspace.publish(study.key, [*[row for row in before if row.id not in stale], *rows])
        return write_study(study, workspace)
