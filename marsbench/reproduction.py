"""From the name of a page to its rows, the page itself, and the pages on the whole paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.markup import escape

from marsbench.errors import UserError, unknown_name
from marsbench.files import write_atomically
from marsbench.reports import REPORTS, write_report, write_whole_paper
from marsbench.sweeps.grid import Grid, read_grid, shipped_grid
from marsbench.sweeps.plans import TABLES, TrainedStage
from marsbench.sweeps.rows import Row
from marsbench.sweeps.runner import Runner
from marsbench.sweeps.side_by_side import answer_side_by_side, train_side_by_side
from marsbench.sweeps.speedup import SpeedupSweep
from marsbench.sweeps.store import rows_text
from marsbench.sweeps.studies import measure
from marsbench.sweeps.workspace import Workspace

SWEEP = "speedup"
PAGE_NAMES = [name for name in REPORTS if name != SWEEP]
WHOLE_PAPER = [name for name in (*PAGE_NAMES, SWEEP) if name != "engine"]  # the engine's page is about us
HELD_BY = {  # what the paper numbers without a page of its own -> the page that holds it
    "table5": SWEEP,
    "table6": SWEEP,
    "figure3": "table8",
    "appendix-a": "table2",
}
_ANSWERED = [TABLES[name] for name in WHOLE_PAPER if name in TABLES and name != "figure1"]  # which has one answer


def reproduce_page(name: str, runner: Runner, *, quick: bool = False) -> Path | None:
    """Measure what a page lacks and write it, with its rows; None where only a part of the questions was answered.

    Args:
        name: a page's, or one of `HELD_BY`.
        quick: with the sweep's quick grid, where the page is the sweep's.

    Raises:
        UserError: if there is no page of that name.
    """
    page = HELD_BY.get(name, name)
    if page == SWEEP:
        grid = read_grid(shipped_grid(runner.scale.scale), quick=quick)
        return reproduce_sweep(runner, grid, "quick" if quick else "")
    if page not in PAGE_NAMES:
        raise unknown_name("thing to reproduce", name, [*PAGE_NAMES, *HELD_BY, "all"])
    rows = measure(page, runner)
    return _publish(page, rows, runner.workspace) if runner.shard == (1, 1) else None


def reproduce_sweep(runner: Runner, grid: Grid, label: str = "") -> Path:
    """Race what a grid lacks, or a shard's part of it, and write its rows and page to folders that a label names."""
    part, parts = runner.shard
    names = [label, f"part{part}-of-{parts}" if parts > 1 else "", runner.workspace.variant]
    workspace = replace(runner.workspace, variant="-".join(filter(None, names)))
    return _publish(SWEEP, SpeedupSweep(runner, grid.part(runner.shard)).rows(), workspace)


def reproduce_all(runner: Runner, *, quick: bool = False, jobs: int = 1) -> None:
    """Every page of the paper in turn, then those on the whole of it; `quick` is the sweep's.

    What they lack of the world's checkpoints and answers is trained and answered before, so many at a time.

    Raises:
        UserError: at the end, if pages could not be made; it names them, and the others are there.
    """
    grid = read_grid(shipped_grid(runner.scale.scale), quick=quick)
    train_side_by_side(runner, _checkpoints(grid), jobs)
    answer_side_by_side(runner, _ANSWERED, jobs)
    failed = []
    for number, name in enumerate(WHOLE_PAPER, 1):
        runner.reporter.say(f"page {number} of {len(WHOLE_PAPER)}: {name}")
        try:
            reproduce_page(name, runner, quick=quick)
        except UserError as error:
            runner.reporter.say(escape(f"{name}: {error}"))
            failed.append(name)
    write_whole_paper(runner.workspace.root, runner.scale.scale)
    if failed:
        raise UserError(
            f"{len(failed)} of {len(WHOLE_PAPER)} pages could not be made: {', '.join(failed)}",
            fix="do what the messages above say; the same command then makes what is missing",
        )


def _checkpoints(grid: Grid) -> list[TrainedStage]:
    """The checkpoints behind the whole paper, each once."""
    of_tables = [trained for name in WHOLE_PAPER if name in TABLES for trained in TABLES[name].stages]
    of_sweep = [
        TrainedStage.of(name, entry.trained_block_size)
        for entry in grid.contenders
        for name in filter(None, (entry.stage, entry.draft))
    ]
    return list(dict.fromkeys([*of_tables, *of_sweep]))


def _publish(name: str, rows: Sequence[Row], workspace: Workspace) -> Path:
    """Write a page's rows and the page with its figures; returns where it is."""
    write_atomically(workspace.results(name), rows_text(rows).encode())
    return write_report(name, rows, workspace.scale, workspace.reports)[0]
