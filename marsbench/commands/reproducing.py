"""The paper's tables and the clock: `plan`, `reproduce` and `report`, `sweep`, `results` and `tune`."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from marsbench.commands import shared
from marsbench.errors import UserError
from marsbench.methods import Decoding
from marsbench.presets import preset, scales_with_chat_data

if TYPE_CHECKING:
    from marsbench.rows.kinds import Row


@shared.starts("scale", "train_all", "checkpoint")
def plan(
    start: shared.Start,
    table: Annotated[
        str | None, typer.Option(help="Number in the paper, name in `marsbench list tables`, or all [default: 2].")
    ] = None,
    sweep: Annotated[bool, typer.Option("--sweep", help="Plan `marsbench sweep` instead of a table.")] = False,
    grid: shared.GridFile = None,
    quick: shared.Quick = False,
) -> None:
    """Show what reproducing a table, or a sweep, would take. Runs and downloads nothing.

    Lists the lines or contenders with their checkpoints, then the tasks: what is trained, answered, raced and scored,
    what waits for what, and the device hours of each. `--table all` plans the whole paper.
    """
    from rich.console import Console

    from marsbench.overview.planning import plan_tables, sweep_tables, work_tables
    from marsbench.racing.grid import read_grid, shipped_grid
    from marsbench.studies import studies_of_paper, study_of

    chosen, name = start.preset(), table or "2"
    name = f"table{name}" if name.isdecimal() else name
    if (sweep and table) or (grid and not sweep):
        raise UserError("--sweep, with or without --grid, and --table are two plans", fix="leave one of them out")
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


@shared.starts(
    "scale", "seed", "benchmarks", "limit", "shard", "data_dir", "train_all", "checkpoint", "output", "base",
    "chat_data", "max_steps", "compiled", "existing",
)  # fmt: skip
def reproduce(
    start: shared.Start,
    what: Annotated[str, typer.Argument(help="Table or figure (table2), appendix-a, another page, or all.")],
    quick: Annotated[bool, typer.Option("--quick", help="For all, table5 and table6: the sweep's quick grid.")] = False,
    jobs: shared.Jobs = None,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="auto|ADDRESS", help="Use a Ray cluster: this machine's, or the one at ADDRESS."),
    ] = None,
    gpus_per_training: Annotated[int, typer.Option(min=1, help="GPUs of one machine that train a stage together.")] = 1,
) -> None:
    """Measure a table or figure of the paper, another page, or the whole paper, and write the page.

    `marsbench list tables` names all pages. The speed sweep makes Tables 5 and 6. Figure 3 is on the page of Table 8,
    Appendix A on that of Table 2.

    The command trains and measures what is missing, several checkpoints at a time, each on a core or a GPU. Timed work
    runs alone. Rows go to results/, the page with its figures to reports/; with --benchmarks, --limit or --seed to
    their own folders, for example reports/mini/real-limit8-seed1/. After an interruption, the same command goes on.
    `marsbench plan` shows the work before.

    At scales with pretrained models, `--train` trains what a page needs: on `--chat-data`, for `--max-steps`, and from
    your own `--base`, which also needs its own `--output`.

    `all` makes every page, then the index, and names the pages that failed. With --cluster, a Ray cluster does the
    work; all its machines must see the --output folder.
    """
    from marsbench.executors.tasks import import_ahead
    from marsbench.overview import PRELOAD
    from marsbench.studies import studies_of_paper, study_of

    study = study_of(what) if what != "all" else None
    if quick and study is not None and study.grid is None:
        raise UserError("--quick is only for the speed sweep", fix="leave it out, or give it to marsbench sweep")
    if cluster is not None and jobs:
        raise UserError("--jobs and --cluster do not go together", fix="leave --jobs out: the cluster decides")
    if jobs != 1 and cluster is None:
        import_ahead(PRELOAD)
    run = start.run()
    run.gpus_per_training = gpus_per_training
    if run.scale.world and (start.max_steps or gpus_per_training > 1):
        fix = f"leave them out, or choose a scale of {', '.join(scales_with_chat_data())}"
        raise UserError(f"--max-steps and --gpus-per-training are not for scale {start.scale}", fix=fix)
    from marsbench.findings.collection import whole_paper_folder
    from marsbench.overview.pages import write_whole_paper
    from marsbench.overview.reproduction import reproduce_all, reproduce_page, reproduce_part
    from marsbench.overview.work import executor_of

    executor = executor_of(run, jobs=jobs, cluster=cluster)
    if not run.is_whole:
        reproduce_part([study] if study else studies_of_paper(), run, executor, quick=quick)
        typer.echo(f"part {start.shard} is done; after all parts, the same command without --shard makes the page")
        return
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
    """Render all pages of a scale, and the index, from the rows in results/."""
    from marsbench.gpu_check.page import write_gpu_page
    from marsbench.overview.pages import write_scale, write_whole_paper
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


@shared.starts("scale", "seed", "shard", "existing", "data_dir", "train_all", "checkpoint", "output")
def sweep(
    start: shared.Start,
    grid: shared.GridFile = None,
    quick: shared.Quick = False,
    label: Annotated[str, typer.Option(help="Folder name for rows and page [default: none].")] = "",
    pack: shared.Pack = True,
) -> None:
    """Race thresholds, windows and methods at several batch sizes, and write reports/speedup.md.

    All contenders of a batch size decode the same prompts in turn, so their ratios are comparable. Do not use the
    machine while it runs. After an interruption, the same command goes on.
    """
    from marsbench.racing.grid import read_grid, shipped_grid

    if set(label) & set("/\\") or ".." in label or label == "." or label.startswith("seed"):
        raise UserError(f"--label {label} names no folder of its own", fix="give letters, digits, dots and dashes")
    chosen = read_grid(grid or shipped_grid(start.scale), quick=quick)
    run = start.run()
    shared.use_packing(pack)
    from marsbench.overview.pages import write_whole_paper
    from marsbench.overview.reproduction import reproduce_sweep
    from marsbench.studies import study_of

    part = "" if run.is_whole else "part{}-of-{}".format(*run.shard)
    names = "-".join(filter(None, [label, "quick" if quick else "", part]))
    page = reproduce_sweep(study_of("speedup"), run, chosen.part(*run.shard), names)
    write_whole_paper(start.output, start.scale)
    typer.echo(f"the page: {page}")


def results(
    files: Annotated[list[Path], typer.Argument(help="Files or folders of rows: results/mini/sweep.jsonl.")],
    where: Annotated[list[str] | None, typer.Option(help="Rows with FIELD=VALUE (method=mars); repeatable.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the rows to FILE.csv, .parquet or .jsonl.")] = None,
    against: Annotated[Path | None, typer.Option(help="Rows of another run of a sweep: do both agree?")] = None,
) -> None:
    """Merge rows of several files, filter them, and export them for other tools.

    If several files hold a cell, its last finished row counts. Nested fields have names like `options.threshold` and
    `provenance.commit`. Without --out, the command prints a summary. With --against, it compares the speed-ups of two
    runs of a sweep: they agree where their intervals overlap.
    """
    from marsbench.findings.export import export, matching, merged

    if against is not None and out is not None:
        raise UserError("--against only prints", fix="leave it or --out out")
    rows = matching(merged(files), where or [])
    if against is not None:
        _compare(rows, merged([against]), against)
        return
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


def _compare(first: "list[Row]", second: "list[Row]", against: Path) -> None:
    from marsbench.findings.sweep import SweepCells, agreement, printed_ratio

    cells = agreement(SweepCells.of(first), SweepCells.of(second))
    if not cells:
        fix = "give the rows of two sweeps of one grid, such as results/mini/sweep.jsonl"
        raise UserError("the two have no cell of a sweep in common", where=str(against), fix=fix)
    lines, agreed = [], 0
    for (*_, name, size), pair in cells.items():
        overlap = max(ratio.interval.low for ratio in pair) <= min(ratio.interval.high for ratio in pair)
        lines.append((name, f"{size}", *map(printed_ratio, pair), "yes" if overlap else "no"))
        agreed += overlap
    shared.print_table("speed-up over ar", ("contender", "batch size", "first", "second", "agree"), lines)
    typer.echo(f"{agreed:,} of {len(cells):,} cells agree: their intervals overlap")


@shared.starts("whose", "adapter", "stage", "block_size", "data_dir", "scale", "seed", "output")
def tune(
    start: shared.Start,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts decoded together.")] = 1,
    max_loss: Annotated[float, typer.Option(min=0, help="Maximum loss of accuracy against AR, in points.")] = 1.0,
    benchmarks: Annotated[str | None, typer.Option(help="Benchmarks: names, mini or real, with commas.")] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts, equally many of each benchmark.")] = 96,
    positions: Annotated[int, typer.Option(min=1, help="Maximum positions of timed forward passes.")] = 1024,
    pack: shared.Pack = True,
) -> None:
    """Recommend a window and a threshold for a MARS checkpoint at a batch size and an allowed loss of accuracy.

    Times forward passes on this machine, measures how many tokens each setting accepts, predicts the fastest setting,
    and races it against AR.
    """
    shared.check_for(Decoding(window=start.block_size), start.trained_stage)
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
