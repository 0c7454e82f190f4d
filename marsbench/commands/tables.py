"""What is shown on a terminal as a table: every registry, rows, the outcome of a comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from marsbench.errors import unknown_name

if TYPE_CHECKING:
    from marsbench.findings.sweep import Agreement
    from marsbench.racing.tune import Advice
    from marsbench.rows.kinds import Row


def _scales() -> Table:
    from marsbench.presets import preset, scales

    table = _table("scales", "name", "what")
    for name in scales():
        table.add_row(name, preset(name).summary)
    return table


def _stages() -> Table:
    from marsbench.training.stages import STAGES

    table = _table("stages", "name", "starts from", "what")
    for name, stage in STAGES.items():
        table.add_row(name, stage.parent or "-", stage.summary)
    return table


def _methods() -> Table:
    from marsbench.methods import METHODS, NEEDS

    table = _table("methods", "name", "what", "output equals", "lossless", "needs", "batch size")
    for name, info in METHODS.items():
        needs = ", ".join(NEEDS[need] for need in info.needs)
        lossless, rows = "yes" if info.lossless else "no", "1" if info.one_row else "any"
        table.add_row(name, info.summary, info.exact, lossless, needs or "-", rows)
    return table


def _benchmarks() -> Table:
    from marsbench.evaluation.benchmarks import BENCHMARKS

    table = _table("benchmarks", "name", "stands for", "what")
    for benchmark in BENCHMARKS.values():
        table.add_row(benchmark.name, benchmark.paper_name, benchmark.summary)
    return table


def _tables() -> Table:
    from marsbench.studies import items, studies

    table = _table("tables, figures and pages", "name", "what", "asks", "lines", "benchmarks", "how")
    for item in items():
        asked = ", ".join(item.plan.benchmarks) or "all six" if item.plan else "-"
        lines = str(len(item.plan.arms)) if item.plan else "-"
        table.add_row(item.key, item.name, item.asks, lines, asked, f"marsbench reproduce {item.key}")
    apart = ", ".join(study.key for study in studies().values() if not study.in_paper)
    table.add_row("all", "The whole paper", f"all of the above but {apart}", "", "", "marsbench reproduce all")
    return table


LISTINGS: dict[str, Callable[[], Table]] = {
    "scales": _scales,
    "stages": _stages,
    "methods": _methods,
    "benchmarks": _benchmarks,
    "tables": _tables,
}


def listing(what: str) -> list[Table]:
    """The tables to print for one of the registries, or for `all` of them."""
    if what == "all":
        return [make() for make in LISTINGS.values()]
    if what not in LISTINGS:
        raise unknown_name("list", what, [*LISTINGS, "all"])
    return [LISTINGS[what]()]


def rows_table(rows: Sequence[Row]) -> Table:
    """Measured rows, a line each, by what tells them apart."""
    table = _table(f"{len(rows):,} rows", "key", "kind", "scale", "what", "batch size", "status", "measured")
    for row in rows:
        words = [getattr(row, name, "") for name in ("contender", "arm", "benchmark", "stage")]
        what = ", ".join(dict.fromkeys(filter(None, words)))
        batch_size, started = getattr(row, "batch_size", ""), row.provenance.get("started", "")
        table.add_row(row.key, row.kind, row.scale, what, str(batch_size), row.status, str(started))
    return table


def agreement_table(cells: Sequence[Agreement]) -> Table:
    """The cells of two sweeps and whether their speed-ups over `ar` agree."""
    table = _table("speed-up over ar in two runs", "contender", "batch size", "first", "second", "agree")
    for cell in cells:
        shown = [
            f"{one.value:.2f} [{one.interval.low:.2f}, {one.interval.high:.2f}]" for one in (cell.first, cell.second)
        ]
        table.add_row(cell.contender, str(cell.batch_size), *shown, "yes" if cell.agrees else "no")
    return table


def advice_table(advice: Advice) -> Table:
    """The settings of a checkpoint, the fastest expected first."""
    table = _table("settings", "setting", "tokens/forward", "points of accuracy lost", "expected speed over ar")
    for setting in advice.settings:
        numbers = f"{setting.tokens_per_forward:.2f}", f"{setting.points_lost:+.1f}", f"{setting.speed_up:.2f}"
        table.add_row(setting.contender.name, *numbers)
    return table


def _table(title: str, *heads: str) -> Table:
    table = Table(title=title, title_justify="left")
    for number, head in enumerate(heads):
        table.add_column(head, overflow="fold", no_wrap=number == 0)
    return table
