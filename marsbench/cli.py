"""The command line. A command only translates: it loads its room when called, so that `--help` is instant.

Exit codes: 0 all went well, 1 a bug (with its traceback), 2 a mistake that the user can mend (with one
message that says how), 130 interrupted.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from marsbench import __version__
from marsbench.errors import UserError

if TYPE_CHECKING:
    from marsbench.sweeps.rows import EvaluationRow
    from marsbench.sweeps.runner import Runner

# Troubles of the machine that the user can mend, and how; any other OSError is a bug.
MENDS = {
    errno.ENOSPC: "free some space, or write to another disk; the same command then goes on where it stopped",
    errno.EACCES: "change the permissions, or choose another folder",
}


class MendableErrorsGroup(TyperGroup):
    """Gives an error that the user can mend as one message and an exit code; a bug keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as error:
            raise _exit(f"error: {error}", 2) from error
        except OSError as error:
            if error.errno not in MENDS:
                raise
            trouble = UserError(str(error.strerror), where=error.filename or "", fix=MENDS[error.errno])
            raise _exit(f"error: {trouble}", 2) from error
        except KeyboardInterrupt as interrupt:
            raise _exit("interrupted: the same command resumes the run", 130) from interrupt


def _exit(message: str, code: int) -> typer.Exit:
    typer.echo(message, err=True)
    return typer.Exit(code)


app = typer.Typer(
    cls=MendableErrorsGroup,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"marsbench {__version__}")
        raise typer.Exit


@app.callback()
def marsbench(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Is MARS real, how fast is it against a strong baseline, and what would it do for my model?

    marsbench trains MARS checkpoints (arXiv 2604.07023: several tokens per forward pass from one ordinary
    language model), decodes with MARS and with its rivals in one loop, scores and times them with one ruler,
    and sets the outcome beside the paper's tables.

    Three commands to begin with:

    - `marsbench doctor`: is this machine ready?
    - `marsbench reproduce table2`: measure the paper's main table, on a laptop with a tiny model
    - `marsbench report`: render the pages in reports/ again from the measured rows
    """


# Options that several commands share.
Scale = Annotated[str, typer.Option(help="Model, data and budgets: see `marsbench list scales`.")]
Output = Annotated[Path, typer.Option(help="Folder for runs/, results/ and reports/.")]
ExistingPolicy = Annotated[str, typer.Option(help="What is there already: reuse it, rerun it, or fail.")]
Seed = Annotated[int, typer.Option(help="Seed of initial weights and training data.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Only the first N questions of each benchmark.")]
BlockSize = Annotated[int, typer.Option(help="B: tokens predicted per forward pass at most.")]


@app.command()
def doctor(
    scale: Scale = "tiny",
    output: Output = Path("."),
) -> None:
    """Check this machine before a long run.

    Looks at Python, packages, device, memory, disk, output folder, benchmark data, code sandbox and task
    files, and says for each trouble how to mend it. Exits with 2 if a run would fail, with 0 if it would at
    most be narrower.
    """
    from rich.console import Console

    from marsbench.doctor import checks, findings_table

    found = checks(scale, output)
    Console().print(findings_table(found))
    if any(check.ok == "fail" for check in found):
        raise typer.Exit(2)


@app.command(name="list")
def list_(
    what: Annotated[str, typer.Argument(help="scales, stages, methods, benchmarks, tables, or all.")] = "all",
) -> None:
    """Show what there is: scales, training stages, decoding methods, benchmarks and tables."""
    from rich.console import Console

    from marsbench.listing import listing

    for table in listing(what):
        Console().print(table)


@app.command()
def train(
    stage: Annotated[str, typer.Argument(help="What to train: see `marsbench list stages`.")],
    scale: Scale = "tiny",
    block_size: BlockSize = 4,
    seed: Seed = 0,
    existing: ExistingPolicy = "reuse",
    output: Output = Path("."),
) -> None:
    """Train one stage and whatever it starts from; prints the checkpoint's folder.

    An interrupted training goes on where it stopped when the same command is given again. To use several
    devices: `accelerate launch -m marsbench train mars --scale ...`.
    """
    from marsbench.training.stages import recipe

    runner = _runner(scale, output, existing, seed)
    chosen = recipe(runner.scale, stage, block_size=block_size, seed=seed)
    runner.train(chosen)
    typer.echo(runner.workspace.checkpoint(chosen))


@app.command(name="eval")
def eval_(
    benchmark: Annotated[str, typer.Option(help="What to ask: see `marsbench list benchmarks`.")],
    checkpoint: Annotated[
        str | None, typer.Option(help="Checkpoint folder or hub name; without it, the scale's own --stage.")
    ] = None,
    stage: Annotated[str, typer.Option(help="Stage of the scale's own checkpoint, trained if missing.")] = "mars",
    method: Annotated[str, typer.Option(help="How to decode: see `marsbench list methods`.")] = "mars",
    threshold: Annotated[
        float | None, typer.Option(help="Confidence to accept a token; without it, one token per forward.")
    ] = None,
    metric: Annotated[str, typer.Option(help="Confidence: probability, entropy or margin.")] = "probability",
    block_size: BlockSize = 4,
    untrained_masks: Annotated[
        bool, typer.Option("--untrained-masks", help="Use masks even if the checkpoint never saw any.")
    ] = False,
    data_dir: Annotated[
        Path | None, typer.Option(envvar="MARSBENCH_DATA", help="Local copy of the benchmark data.")
    ] = None,
    limit: Limit = None,
    scale: Scale = "tiny",
    seed: Seed = 0,
    existing: ExistingPolicy = "reuse",
    output: Output = Path("."),
) -> None:
    """Ask one checkpoint one benchmark; prints accuracy with its interval, and tokens per forward.

    Answers are logged in runs/SCALE/answers as they come, and the row is added to runs/SCALE/rows.jsonl.
    """
    from marsbench.sweeps.plans import Arm

    options = {"block_size": block_size, "metric": metric}
    options |= {"accept": "one"} if threshold is None else {"threshold": threshold}
    arm = Arm(stage, f"{stage} by {method}", stage, method, options, untrained_masks=untrained_masks)
    runner = _runner(scale, output, existing, seed, limit, data_dir)
    row = runner.single(arm, benchmark, checkpoint)
    typer.echo(_summary(row))


@app.command()
def reproduce(
    table: Annotated[str, typer.Argument(help="table2: see `marsbench list tables`.")],
    scale: Scale = "tiny",
    seed: Seed = 0,
    limit: Limit = None,
    existing: ExistingPolicy = "reuse",
    data_dir: Annotated[
        Path | None, typer.Option(envvar="MARSBENCH_DATA", help="Local copy of the benchmark data.")
    ] = None,
    output: Output = Path("."),
) -> None:
    """Measure one of the paper's tables and write its page.

    Trains what is missing, evaluates what is missing, then writes the rows to results/ and the page with its
    figure to reports/. Interrupted at any moment, the same command goes on where it stopped.
    """
    from marsbench.reports import write_report
    from marsbench.reports.files import write_atomically
    from marsbench.sweeps.plans import table_plan
    from marsbench.sweeps.store import rows_text

    plan = table_plan(table.removeprefix("table"))
    runner = _runner(scale, output, existing, seed, limit, data_dir)
    rows = runner.table(plan)
    write_atomically(runner.workspace.results(plan.number), rows_text(rows).encode())
    pages = write_report(plan.number, rows, scale, runner.workspace.reports)
    typer.echo(f"read {pages[0]}")


@app.command()
def report(
    scale: Scale = "tiny",
    output: Output = Path("."),
) -> None:
    """Render every page of a scale again from its rows in results/."""
    from marsbench.reports import REPORTS, write_report
    from marsbench.sweeps.store import read_rows
    from marsbench.sweeps.workspace import Workspace

    workspace = Workspace(output, scale)
    for table in REPORTS:
        rows = read_rows(workspace.results(table))
        typer.echo(f"wrote {write_report(table, rows, scale, workspace.reports)[0]}")


def _runner(
    scale: str, output: Path, existing: str, seed: int, limit: int | None = None, data_dir: Path | None = None
) -> Runner:
    """The runner of a scale, with the machine's noise kept off the terminal."""
    from marsbench.presets import preset
    from marsbench.quiet import quieten_libraries

    chosen = preset(scale)
    quieten_libraries()
    from marsbench.sweeps.runner import Runner
    from marsbench.sweeps.store import existing_policy
    from marsbench.sweeps.workspace import Workspace

    return Runner(chosen, Workspace(output, scale), existing_policy(existing), seed, limit, data_dir)


def _summary(row: EvaluationRow) -> str:
    """What an evaluation found, in one line."""
    from marsbench.evaluation.statistics import accuracy, tokens_per_forward

    share, speed = accuracy(row.correct), tokens_per_forward(row.emitted, row.forwards)
    return (
        f"{row.benchmark}: accuracy {100 * share.value:.1f} % (95 % interval {100 * share.interval.low:.1f} to "
        f"{100 * share.interval.high:.1f}), n = {share.n}; {speed.value:.2f} tokens per forward pass"
    )


def main() -> None:
    """The console script `marsbench`."""
    app(prog_name="marsbench")
