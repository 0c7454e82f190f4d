"""Looking around before anything runs: `doctor` and `list`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from marsbench.commands.shared import DataDir, Output, Scale
from marsbench.presets import DEFAULT_SCALE


def doctor(scale: Scale = DEFAULT_SCALE, data_dir: DataDir = None, output: Output = Path(".")) -> None:
    """Check this machine before a long run.

    Looks at Python, packages, device, other processes at work, memory, disk, output folder, benchmark data, code
    sandbox and task files, and says for each trouble how to mend it. Exits with 2 if a run would fail, with 0 if it
    would at most be narrower.
    """
    from rich.console import Console

    from marsbench.doctor import checks, findings_table

    found = checks(scale, output, data_dir)
    Console().print(findings_table(found))
    if any(check.ok == "fail" for check in found):
        raise typer.Exit(2)


def gpu_check(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer questions, shorter answers, one batch size.")] = False,
    cpu: Annotated[bool, typer.Option("--cpu", help="Try the checks small on the CPU; nothing is written.")] = False,
    only: Annotated[list[str] | None, typer.Option(help="A check by name; give it again for another.")] = None,
    output: Output = Path("."),
) -> None:
    """Check that this GPU computes what a CPU does, how fast, and what fits.

    Right: every method answers as on the CPU, captured graphs as eager steps, gradients are finite, trainings resume.
    Fast: attention, steps beside the time of reading the weights, training. Fits: models of the paper's sizes, with
    random weights.
    Nothing is fetched. Rows go to results/gpu/, the page to reports/gpu.md. Exits with 1 if a check does not hold.
    """
    from rich.console import Console

    from marsbench.gpu_check.running import device_here, run_checks

    device = device_here(cpu=cpu)
    rows = run_checks(device, only or (), quick=quick, output=None if cpu else output, console=Console())
    if any(row.status != "done" or row.holds is False for row in rows):
        raise typer.Exit(1)


def list_(
    what: Annotated[str, typer.Argument(help="scales, stages, methods, benchmarks, tables, or all.")] = "all",
) -> None:
    """Show what there is: scales, training stages, decoding methods, benchmarks and tables."""
    from rich.console import Console

    from marsbench.commands.tables import listing

    for table in listing(what):
        Console().print(table)
