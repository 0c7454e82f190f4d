"""How fast, against what: `sweep`, `results` and `tune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from marsbench.commands import shared
from marsbench.commands.decoder import check_decoding
from marsbench.errors import UserError
from marsbench.presets import DEFAULT_SCALE


def sweep(
    grid: shared.GridFile = None,
    quick: shared.Quick = False,
    label: Annotated[
        str, typer.Option(help="Rows and page go to folders of this name, beside those of another run.")
    ] = "",
    scale: shared.Scale = DEFAULT_SCALE,
    seed: shared.Seed = 0,
    shard: shared.Shard = None,
    existing: shared.ExistingPolicy = "reuse",
    data_dir: shared.DataDir = None,
    train_all: shared.TrainAll = False,
    checkpoint: shared.StageCheckpoints = None,
    pack: shared.Pack = True,
    output: shared.Output = Path("."),
) -> None:
    """Race thresholds, windows and methods at several batch sizes, and write reports/speedup.md.

    All contenders of a batch size decode the same prompts in turn, so their ratios can be believed; accuracy comes from
    the same generations. Leave the machine alone while it runs. Interrupted at any moment, the same command goes on
    where it stopped; `--existing rerun` races everything again on the same checkpoints. `marsbench plan --sweep` says
    beforehand what it will measure. The parts of `--shard` are put together by `marsbench results`; every part races
    the baselines too.
    """
    from marsbench.presets import preset
    from marsbench.racing.grid import read_grid, shipped_grid

    preset(scale)
    if set(label) & set("/\\") or ".." in label:
        raise UserError(f"--label {label} is no name of a folder", fix="give letters, digits, dots and dashes")
    chosen = read_grid(grid or shipped_grid(scale), quick=quick)
    run = shared.make_run(
        scale, output, existing, seed, shard=shard, data_dir=data_dir, checkpoint=checkpoint, train_all=train_all
    )
    shared.use_packing(pack)
    from marsbench.overview.pages import write_whole_paper
    from marsbench.overview.reproduction import reproduce_sweep
    from marsbench.studies import study_of

    names = "-".join(filter(None, [label, "quick" if quick else ""]))
    page = reproduce_sweep(study_of("speedup"), run, chosen, names)
    write_whole_paper(output, scale)
    typer.echo(f"the page: {page}")


def results(
    files: Annotated[list[Path], typer.Argument(help="Files of rows, such as results/mini/speedup.jsonl.")],
    where: Annotated[
        list[str] | None, typer.Option(help="FIELD=VALUE that rows must have, such as method=mars; several times.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the rows: FILE.csv, FILE.parquet or FILE.jsonl.")] = None,
    against: Annotated[
        Path | None, typer.Option(help="Another run of the same sweep: do the speed-ups of the two agree?")
    ] = None,
) -> None:
    """Merge rows of several files, filter them, and export them for other tools.

    Of a cell that several files hold, the last finished row counts. Nested fields are called as in
    `options.threshold` and `provenance.commit`. Without --out, prints a summary of the rows.
    """
    from rich.console import Console

    from marsbench.findings.export import export, matching, merged
    from marsbench.rows.store import read_rows

    rows = matching(merged(files), where or [])
    if against is not None:
        from marsbench.commands.tables import agreement_table
        from marsbench.findings.sweep import SweepCells, agreement

        cells = agreement(SweepCells.of(rows), SweepCells.of(read_rows(against)))
        if not cells:
            raise UserError(
                "the two have no cell of a sweep in common", where=str(against),
                fix="give the rows of two sweeps of one grid, as in results/mini/speedup.jsonl",
            )  # fmt: skip
        Console().print(agreement_table(cells))
        share = sum(cell.agrees for cell in cells) / len(cells)
        typer.echo(f"{share:.1%} of {len(cells)} cells agree: their intervals overlap")
        return
    if out is not None:
        typer.echo(f"wrote {len(rows):,} rows to {export(rows, out)}")
        return
    from marsbench.commands.tables import rows_table

    Console().print(rows_table(rows) if rows else "no row matches")


def tune(
    checkpoint: shared.Checkpoint = None,
    adapter: shared.Adapter = None,
    stage: shared.OwnStage = None,
    block_size: shared.BlockSize = 4,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts decoded at once.")] = 1,
    max_loss: Annotated[float, typer.Option(min=0, help="Points of accuracy that may be lost against AR.")] = 1.0,
    benchmarks: Annotated[
        str | None, typer.Option(help="What to ask: names, `mini` or `real`, with commas between.")
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts from all benchmarks alike.")] = 96,
    positions: Annotated[int, typer.Option(min=1, help="Time forward passes of up to so many positions.")] = 1024,
    pack: shared.Pack = True,
    data_dir: shared.DataDir = None,
    scale: shared.Scale = DEFAULT_SCALE,
    seed: shared.Seed = 0,
    output: shared.Output = Path("."),
) -> None:
    """Recommend a window and a threshold for a MARS checkpoint, a batch size and an allowed loss of accuracy.

    Times forward passes by their positions on this machine, measures how many tokens each setting accepts, predicts
    which is fastest, and races that one against AR.
    """
    checkpoint, stage = checkpoint or adapter, shared.own_stage(scale, stage)
    check_decoding("mars", threshold=None, draft=None, stage=None if checkpoint else stage, block_size=block_size)
    run = shared.make_run(scale, output, "reuse", seed, benchmarks=benchmarks, data_dir=data_dir)
    shared.use_packing(pack)
    from rich.console import Console

    from marsbench.commands.tables import advice_table
    from marsbench.methods.settings import load_aloud
    from marsbench.racing.questions import per_benchmark
    from marsbench.racing.tune import tune as advise
    from marsbench.running.checkpoints import Checkpoints
    from marsbench.training.checkpoints import default_device

    names = list(run.benchmarks or run.scale.benchmarks)
    per_benchmark(prompts, names)
    for name in names:  # missing data is found out before anything is trained
        run.exam(name)
    if checkpoint:
        loaded = load_aloud(checkpoint, run.reporter, device=default_device(), adapter=adapter)
    else:
        loaded = Checkpoints(run).load(stage, block_size)
    advice = advise(
        run,
        loaded,
        block_size=block_size,
        batch_size=batch_size,
        prompts=prompts,
        max_points_lost=max_loss,
        positions=positions,
    )
    Console().print(advice_table(advice))
    typer.echo(advice.summary(batch_size, max_loss))
