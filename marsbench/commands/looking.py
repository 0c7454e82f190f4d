"""Looking around before anything runs: `doctor` and `list`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from marsbench.commands.shared import DataDir, Output, Scale


def doctor(
    scale: Scale = "tiny",
    data_dir: DataDir = None,
    output: Output = Path("."),
) -> None:
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


def list_(
    what: Annotated[str, typer.Argument(help="scales, stages, methods, benchmarks, tables, or all.")] = "all",
) -> None:
    """Show what there is: scales, training stages, decoding methods, benchmarks and tables."""
    from rich.console import Console

    from marsbench.commands.tables import listing

    for table in listing(what):
        Console().print(table)
