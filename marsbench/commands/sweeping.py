"""How fast, against what: `sweep`, `results` and `tune`."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from marsbench.commands import shared
from marsbench.commands.shared import check_for
from marsbench.errors import UserError
from marsbench.methods import Decoding


@shared.starts("scale", "seed", "data_dir", "train_all", "checkpoint", "output")
def sweep(
    start: shared.Start,
    grid: shared.GridFile = None,
    quick: shared.Quick = False,
    label: Annotated[str, typer.Option(help="Rows and page go to folders of this name, beside those of others.")] = "",
    pack: shared.Pack = True,
) -> None:
    """Race thresholds, windows and methods at several batch sizes, and write reports/speedup.md.

    All contenders of a batch size decode the same prompts in turn, so their ratios can be believed. Leave the machine
    alone while it runs. Interrupted at any moment, the same command goes on where it stopped.
    """
    from marsbench.presets import preset
    from marsbench.racing.grid import read_grid, shipped_grid

    preset(start.scale)
    if set(label) & set("/\\") or ".." in label:
        raise UserError(f"--label {label} is no name of a folder", fix="give letters, digits, dots and dashes")
    chosen = read_grid(grid or shipped_grid(start.scale), quick=quick)
    run = start.run()
    shared.use_packing(pack)
    from marsbench.overview.pages import write_whole_paper
    from marsbench.overview.reproduction import reproduce_sweep
    from marsbench.studies import study_of

    names = "-".join(filter(None, [label, "quick" if quick else ""]))
    page = reproduce_sweep(study_of("speedup"), run, chosen, names)
    write_whole_paper(start.output, start.scale)
    typer.echo(f"the page: {page}")


def results(
    files: Annotated[list[Path], typer.Argument(help="Files or stores of rows, such as results/mini/sweep.jsonl.")],
    where: Annotated[list[str] | None, typer.Option(help="FIELD=VALUE of rows (method=mars); repeatable.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the rows: FILE.csv or FILE.jsonl.")] = None,
) -> None:
    """Merge rows of several files, filter them, and export them for other tools.

    Of a cell that several files hold, the last finished row counts. Nested fields are called as in
    `options.threshold` and `provenance.commit`. Without --out, prints a summary of the rows.
    """
    from marsbench.findings.export import export, matching, merged

    rows = matching(merged(files), where or [])
    if out is not None:
        typer.echo(f"wrote {len(rows):,} rows to {export(rows, out)}")
        return
    if not rows:
        typer.echo("no row matches")
        return
    heads = ("key", "kind", "scale", "what", "batch size", "status", "measured")
    lines = []
    for row in rows:
        what = dict.fromkeys(getattr(row, name, "") for name in ("contender", "arm", "benchmark", "stage"))
        size, started = str(getattr(row, "batch_size", "")), str(row.provenance.get("started", ""))
        lines.append((row.key, row.kind, row.scale, ", ".join(filter(None, what)), size, row.status, started))
    shared.print_table(f"{len(rows):,} rows", heads, lines)


@shared.starts("whose", "adapter", "stage", "block_size", "data_dir", "scale", "seed", "output")
def tune(
    start: shared.Start,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts decoded at once.")] = 1,
    max_loss: Annotated[float, typer.Option(min=0, help="Points of accuracy that may be lost against AR.")] = 1.0,
    benchmarks: Annotated[str | None, typer.Option(help="What to ask: names, mini or real, commas between.")] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts from all benchmarks alike.")] = 96,
    positions: Annotated[int, typer.Option(min=1, help="Time forward passes of up to so many positions.")] = 1024,
    pack: shared.Pack = True,
) -> None:
    """Recommend a window and a threshold for a MARS checkpoint, a batch size and an allowed loss of accuracy.

    Times forward passes by their positions on this machine, measures how many tokens each setting accepts, predicts
    which is fastest, and races that one against AR.
    """
    check_for(Decoding(window=start.block_size), start.trained_stage)
    run = replace(start, benchmarks=benchmarks).run()
    shared.use_packing(pack)
    from marsbench.racing.course import per_benchmark
    from marsbench.racing.tune import tune as advise

    names = list(run.benchmarks or run.scale.benchmarks)
    per_benchmark(prompts, names)
    for name in names:  # what cannot be asked is found out before anything is trained
        run.exam(name)
    advice = advise(
        run, start.loaded(run), block_size=start.block_size, batch_size=batch_size, prompts=prompts,
        max_points_lost=max_loss, positions=positions,
    )  # fmt: skip
    lines = [
        (way.contender.name, f"{way.tokens_per_forward:.2f}", f"{way.points_lost:+.1f}", f"{way.speed_up:.2f}")
        for way in advice.settings
    ]
    heads = ("setting", "tokens/forward", "points of accuracy lost", "expected speed over ar")
    shared.print_table("settings", heads, lines)
    typer.echo(advice.summary(batch_size, max_loss))
