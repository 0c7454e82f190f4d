"""What `marsbench list` shows: every registry as a table."""

from __future__ import annotations

from collections.abc import Callable

from rich.table import Table

from marsbench.errors import unknown_name


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
    from marsbench.reports import REPORTS
    from marsbench.sweeps.plans import TABLES

    table = _table("tables", "name", "what", "lines", "benchmarks", "how")
    for name, plan in TABLES.items():
        how = f"marsbench reproduce {name}" if name in REPORTS else "planned only"
        table.add_row(name, plan.title, str(len(plan.arms)), ", ".join(plan.benchmarks) or "all six", how)
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


def _table(title: str, *heads: str) -> Table:
    table = Table(title=title, title_justify="left")
    for number, head in enumerate(heads):
        table.add_column(head, overflow="fold", no_wrap=number == 0)
    return table
