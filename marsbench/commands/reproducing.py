"""The paper's tables: `plan`, `reproduce` and `report`."""

from typing import Annotated

import typer

from marsbench.commands import shared
from marsbench.errors import UserError
from marsbench.presets import scales_with_chat_data


@shared.starts("scale", "train_all", "checkpoint")
def plan(
    start: shared.Start,
    table: Annotated[
        str | None,
        typer.Option(help="Its number in the paper, a name of `marsbench list tables`, or all [default: 2]."),
    ] = None,
    sweep: Annotated[bool, typer.Option("--sweep", help="Not a table, but what `marsbench sweep` would do.")] = False,
    grid: shared.GridFile = None,
    quick: shared.Quick = False,
) -> None:
    """Say what reproducing a table, or a sweep, would take, without running anything or asking a hub.

    Lists the lines or contenders with their checkpoints, and the work: what is trained, answered, raced and scored,
    what waits for what, and how many hours of a device each takes. `--table all` is the work of the whole paper.
    """
    from rich.console import Console

    from marsbench.overview.planning import plan_tables, sweep_tables, work_tables
    from marsbench.racing.grid import read_grid, shipped_grid
    from marsbench.studies import studies_of_paper, study_of

    chosen, name = start.preset(), table or "2"
    name = f"table{name}" if name.isdecimal() else name
    if sweep and table:
        raise UserError("--sweep and --table are two plans", fix="leave one of them out")
    if sweep:
        parts = sweep_tables(read_grid(grid or shipped_grid(start.scale), quick=quick), chosen)
    else:
        wanted = studies_of_paper() if name == "all" else [study_of(name)]
        parts = work_tables(wanted, chosen)
        if name == "all":
            parts.insert(0, f"The whole paper at scale {chosen.scale}")
        elif line_plan := wanted[0].plan:
            parts[:0] = plan_tables(line_plan, chosen)
        elif race := wanted[0].grid:
            parts[:0] = sweep_tables(race(chosen, quick), chosen)
    for part in parts:
        Console().print(part, highlight=False)


@shared.starts(*shared.OF_RUN)
def reproduce(
    start: shared.Start,
    what: Annotated[str, typer.Argument(help="A table or figure, such as table2; appendix-a; a page of ours; all.")],
    quick: Annotated[bool, typer.Option("--quick", help="With all, table5, table6: the sweep's quick grid.")] = False,
    jobs: shared.Jobs = None,
    cluster: shared.ClusterAddress = None,
) -> None:
    """Measure one of the paper's tables or figures, a page of our own, or the whole paper, and write the page.

    `marsbench list tables` names them all. Tables 5 and 6 are the speed sweep's, Figure 3 stands on the page of Table
    8, Appendix A on that of Table 2.

    What is missing is trained and measured, several checkpoints at a time, each on a core or a GPU; what is timed runs
    alone. Rows go to results/, the page with its figures to reports/; with --benchmarks, --limit or --seed to folders
    of their own, as in reports/mini/real-limit8-seed1/. Interrupted at any moment, the same command goes on where it
    stopped. `marsbench plan` says beforehand what it will take.

    Where models are pretrained, `--train` trains what a page needs: on `--chat-data`, for `--max-steps`, and from
    a `--base` of your own, which wants an `--output` of its own too.

    `all` makes every page, then the index; a page that cannot be made is named. With --cluster, the machines of a Ray
    cluster do the work, on an --output folder that all of them see.
    """
    from marsbench.executors.tasks import import_ahead
    from marsbench.overview import PRELOAD
    from marsbench.studies import study_of

    study = study_of(what) if what != "all" else None
    if quick and study is not None and study.grid is None:
        raise UserError("--quick is the speed sweep's", fix="leave it out, or give it to marsbench sweep")
    if cluster is not None and jobs:
        raise UserError("--jobs and --cluster do not go together", fix="leave --jobs out: a cluster has its own")
    if jobs != 1 and cluster is None:
        import_ahead(PRELOAD)
    run = start.run()
    if start.max_steps and run.scale.world:
        fix = f"leave it out, or choose a scale of {', '.join(scales_with_chat_data())}"
        raise UserError(f"--max-steps is not for scale {start.scale}, whose pages are of trainings in full", fix=fix)
    from marsbench.findings.collection import whole_paper_folder
    from marsbench.overview.pages import write_whole_paper
    from marsbench.overview.reproduction import reproduce_all, reproduce_page
    from marsbench.overview.work import executor_of

    executor = executor_of(run, jobs=jobs, cluster=cluster)
    if what == "all":
        reproduce_all(run, executor, quick=quick)
        index = whole_paper_folder(start.output, start.scale) / "index.md"
        typer.echo(f"the pages: {run.workspace.reports}\nthe index: {index}")
        return
    page = reproduce_page(what, run, executor, quick=quick)
    write_whole_paper(start.output, start.scale)
    typer.echo(f"the page: {page}")


@shared.starts("scale", "output")
def report(start: shared.Start) -> None:
    """Render every page of a scale again from its rows in results/, the index too."""
    from marsbench.gpu_check.page import write_gpu_page
    from marsbench.overview.pages import write_scale, write_whole_paper
    from marsbench.presets import preset
    from marsbench.rows.workspace import Workspace

    scale, output, written = start.scale, start.output, False
    preset(scale)
    for page in write_scale(output, scale):
        typer.echo(f"wrote {page}")
        written = True
    if not written:
        fix = f"measure them: marsbench reproduce table2 --scale {scale}"
        raise UserError("there are no rows", where=str(Workspace(output, scale).store), fix=fix)
    for page in (*write_whole_paper(output, scale), *write_gpu_page(output)):
        typer.echo(f"wrote {page}")
