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
    make_runner,
    parse_shard,
)
from marsbench.errors import UserError, unknown_name


def plan(
    table: Annotated[str, typer.Option(help="Its number in the paper, or a name of `marsbench list tables`.")] = "2",
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

    from marsbench.presets import preset
    from marsbench.sweeps.estimates import plan_tables, sweep_tables
    from marsbench.sweeps.grid import read_grid, shipped_grid
    from marsbench.sweeps.plans import table_plan

    chosen = preset(scale).with_checkpoints(checkpoint or [], train_all=train_all)
    if sweep:
        parts = sweep_tables(read_grid(grid or shipped_grid(scale), quick=quick), chosen)
    else:
        parts = plan_tables(table_plan(f"table{table}" if table.isdecimal() else table), chosen)
    for part in parts:
        Console().print(part, highlight=False)


def reproduce(
    what: Annotated[str, typer.Argument(help="A name of `marsbench list tables`, or engine.")],
    scale: Scale = "tiny",
    seed: Seed = 0,
    benchmarks: Annotated[
        str | None, typer.Option(help="Instead of the scale's own: names, `mini` or `real`, with commas between.")
    ] = None,
    limit: Limit = None,
    shard: Shard = None,
    existing: ExistingPolicy = "reuse",
    data_dir: DataDir = None,
    train_all: TrainAll = False,
    checkpoint: StageCheckpoints = None,
    output: Output = Path("."),
) -> None:
    """Measure one of the paper's tables or figures, or what our engine costs, and write the page.

    Trains what is missing, measures what is missing, then writes the rows to results/ and the page with its
    figures to reports/. Interrupted at any moment, the same command goes on where it stopped. With --benchmarks,
    --limit or --seed, rows and page go to folders of their own, as in reports/tiny/real-limit8-seed1/. `marsbench plan`
    says beforehand what it will take.
    """
    part = parse_shard(shard)
    runner = make_runner(
        scale, output, existing, seed, benchmarks=benchmarks, limit=limit, shard=part, data_dir=data_dir
    )  # fmt: skip
    runner.scale = runner.scale.with_checkpoints(checkpoint or [], train_all=train_all)
    from marsbench.files import write_atomically
    from marsbench.reports import REPORTS, write_report
    from marsbench.sweeps.store import rows_text
    from marsbench.sweeps.studies import measure

    known = [name for name in REPORTS if name != "speedup"]
    if what not in known:
        raise unknown_name("thing to reproduce", what, known)
    rows = measure(what, runner)
    if part != (1, 1):
        typer.echo(f"answered part {shard}; when all parts are, the same command without --shard writes the page")
        return
    write_atomically(runner.workspace.results(what), rows_text(rows).encode())
    pages = write_report(what, rows, scale, runner.workspace.reports)
    typer.echo(f"the page: {pages[0]}")


def report(
    scale: Scale = "tiny",
    output: Output = Path("."),
) -> None:
    """Render every page of a scale again from its rows in results/."""
    from marsbench.reports import REPORTS, write_report
    from marsbench.sweeps.store import read_rows
    from marsbench.sweeps.workspace import Workspace

    whole = Workspace(output, scale)
    measured = [(one, name) for one in whole.variants() for name in REPORTS if one.results(name).exists()]
    if not measured:
        raise UserError(
            "there are no rows", where=str(whole.results("table2").parent),
            fix="measure them: marsbench reproduce table2",
        )  # fmt: skip
    for workspace, name in measured:
        rows = read_rows(workspace.results(name))
        typer.echo(f"wrote {write_report(name, rows, scale, workspace.reports)[0]}")
