"""The paper's tables: `plan`, `reproduce` and `report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from marsbench.commands.shared import (
    DataDir,
    ExistingPolicy,
    GridFile,
    Limit,
    Output,
    Quick,
    Scale,
    Seed,
    Shard,
    StageCheckpoints,
    TrainAll,
    make_run,
    scale_of,
)
from marsbench.errors import UserError


def plan(
    table: Annotated[
        str | None, typer.Option(help="Its number in the paper, or a name of `marsbench list tables` [default: 2].")
    ] = None,
    sweep: Annotated[bool, typer.Option("--sweep", help="Not a table, but what `marsbench sweep` would do.")] = False,
    grid: GridFile = None,
    quick: Quick = False,
    scale: Scale = "tiny",
    train_all: TrainAll = False,
    checkpoint: StageCheckpoints = None,
) -> None:
    """Say what reproducing a table, or a sweep, would take, without running anything or asking a hub.

    Lists the lines of the table with their checkpoints and data, and estimates tokens and hours of training and
    decoding, with the assumptions behind them.
    """
    from rich.console import Console

    from marsbench.racing.estimates import sweep_tables
    from marsbench.racing.grid import read_grid, shipped_grid
    from marsbench.running.estimates import plan_tables
    from marsbench.studies import plan_of

    chosen = scale_of(scale, checkpoint, train_all=train_all)
    if sweep and table:
        raise UserError("--sweep and --table are two plans", fix="leave one of them out")
    table = table or "2"
    if sweep:
        parts = sweep_tables(read_grid(grid or shipped_grid(scale), quick=quick), chosen)
    else:
        parts = plan_tables(plan_of(f"table{table}" if table.isdecimal() else table), chosen)
    for part in parts:
        Console().print(part, highlight=False)


def reproduce(
    what: Annotated[
        str, typer.Argument(help="A table or figure by its number, such as table2; appendix-a; a page of ours; all.")
    ],
    scale: Scale = "tiny",
    seed: Seed = 0,
    benchmarks: Annotated[
        str | None, typer.Option(help="Instead of the scale's own: names, `mini` or `real`, with commas between.")
    ] = None,
    limit: Limit = None,
    shard: Shard = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="With `all`, table5 and table6: the sweep's quick grid.")
    ] = False,
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Processes at a time [default: one per GPU; without GPUs, one per core for the world's models].",
        ),
    ] = None,
    existing: ExistingPolicy = "reuse",
    data_dir: DataDir = None,
    train_all: TrainAll = False,
    checkpoint: StageCheckpoints = None,
    output: Output = Path("."),
) -> None:
    """Measure one of the paper's tables or figures, a page of our own, or the whole paper, and write the page.

    The paper's are table2 to table6, table8, table9, figure1, figure3, figure6 and appendix-a; ours are discrepancies,
    gains and engine. Tables 5 and 6 are the speed sweep's, Figure 3 stands on the page of Table 8, Appendix A on that
    of Table 2.

    Trains what is missing, measures what is missing, then writes the rows to results/ and the page with its
    figures to reports/. Several checkpoints are trained, and answer, at a time, each on a core or a GPU; what is
    timed runs alone. Interrupted at any moment, the same command goes on where it stopped. With --benchmarks, --limit
    or --seed, rows and page go to folders of their own, as in reports/tiny/real-limit8-seed1/. `marsbench plan` says
    beforehand what it will take.

    `all` makes every page in turn, the speed sweep (Tables 5 and 6) last, then the index and the page of claims. A
    page that cannot be made is named, and the others go on.
    """
    from marsbench.executors.local import import_ahead
    from marsbench.overview import PRELOAD
    from marsbench.studies import study_of

    study = study_of(what) if what != "all" else None
    if quick and study is not None and study.grid is None:
        raise UserError("--quick is the speed sweep's", fix="leave it out, or give it to marsbench sweep")
    if jobs != 1:
        import_ahead(PRELOAD)
    run = make_run(
        scale, output, existing, seed, benchmarks=benchmarks, limit=limit, shard=shard, data_dir=data_dir,
        checkpoint=checkpoint, train_all=train_all,
    )  # fmt: skip
    from marsbench.findings.collection import whole_paper_folder
    from marsbench.overview.pages import write_whole_paper
    from marsbench.overview.reproduction import reproduce_all, reproduce_page
    from marsbench.overview.work import default_jobs, local_executor

    executor = local_executor(run, jobs or default_jobs(run.scale))
    if what == "all":
        reproduce_all(run, quick=quick, executor=executor)
        index = whole_paper_folder(output, scale) / "index.md"
        typer.echo(f"the pages: {run.workspace.reports}\nthe index: {index}")
        return
    page = reproduce_page(what, run, quick=quick, executor=executor)
    if page is None:
        typer.echo(f"answered part {shard}; when all parts are, the same command without --shard writes the page")
        return
    write_whole_paper(output, scale)
    typer.echo(f"the page: {page}")


def report(
    scale: Scale = "tiny",
    output: Output = Path("."),
) -> None:
    """Render every page of a scale again from its rows in results/, the index and the page of claims too."""
    from marsbench.overview.pages import write_scale, write_whole_paper
    from marsbench.presets import preset
    from marsbench.rows.workspace import Workspace

    preset(scale)
    written = 0
    for page in write_scale(output, scale):
        typer.echo(f"wrote {page}")
        written += 1
    if not written:
        raise UserError(
            "there are no rows", where=str(Workspace(output, scale).results("table2").parent),
            fix=f"measure them: marsbench reproduce table2 --scale {scale}",
        )  # fmt: skip
    for page in write_whole_paper(output, scale):
        typer.echo(f"wrote {page}")
