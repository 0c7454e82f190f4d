"""What is shown on a terminal as a table: every registry, rows, the outcome of a comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from marsbench.errors import unknown_name

if TYPE_CHECKING:
    from marsbench.findings.sweep import Agreement
    from marsbench.racing.tune import Advice
    from marsbench.rows.kinds import Row


def _scales() -> Table:
    from marsbench.presets import preset, scales

    return _table("scales", ("name", "what"), [(name, preset(name).summary) for name in scales()])


def _stages() -> Table:
    from marsbench.training.stages import STAGES

    rows = [(name, stage.parent or "-", stage.summary) for name, stage in STAGES.items()]
    return _table("stages", ("name", "starts from", "what"), rows)


def _methods() -> Table:
    from marsbench.methods import METHODS, NEEDS

    rows = [
        (
            name, info.summary, info.exact, "yes" if info.lossless else "no",
            ", ".join(NEEDS[need] for need in info.needs) or "-", "1" if info.one_row else "any",
        )
        for name, info in METHODS.items()
    ]  # fmt: skip
    return _table("methods", ("name", "what", "output equals", "lossless", "needs", "batch size"), rows)


def _benchmarks() -> Table:
    from marsbench.evaluation.benchmarks import BENCHMARKS

    rows = [(one.name, one.paper_name, one.summary) for one in BENCHMARKS.values()]
    return _table("benchmarks", ("name", "stands for", "what"), rows)


def _tables() -> Table:
    from marsbench.studies import items, studies

    rows = []
    for item in items():
        asked = ", ".join(item.plan.benchmarks) or "all six" if item.plan else "-"
        lines = str(len(item.plan.arms)) if item.plan else "-"
        rows.append((item.key, item.name, item.asks, lines, asked, f"marsbench reproduce {item.key}"))
    apart = ", ".join(study.key for study in studies().values() if not study.in_paper)
    rows.append(("all", "The whole paper", f"all of the above but {apart}", "", "", "marsbench reproduce all"))
    return _table("tables, figures and pages", ("name", "what", "asks", "lines", "benchmarks", "how"), rows)


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
    lines = []
    for row in rows:
        words = [getattr(row, name, "") for name in ("contender", "arm", "benchmark", "stage")]
        what = ", ".join(dict.fromkeys(filter(None, words)))
        batch_size, started = getattr(row, "batch_size", ""), row.provenance.get("started", "")
        lines.append((row.key, row.kind, row.scale, what, str(batch_size), row.status, str(started)))
    return _table(f"{len(rows):,} rows", ("key", "kind", "scale", "what", "batch size", "status", "measured"), lines)


def agreement_table(cells: Sequence[Agreement]) -> Table:
    """The cells of two sweeps and whether their speed-ups over `ar` agree."""
    lines = []
    for cell in cells:
        shown = (
            f"{one.value:.2f} [{one.interval.low:.2f}, {one.interval.high:.2f}]" for one in (cell.first, cell.second)
        )
        lines.append((cell.contender, str(cell.batch_size), *shown, "yes" if cell.agrees else "no"))
    return _table("speed-up over ar in two runs", ("contender", "batch size", "first", "second", "agree"), lines)


def advice_table(advice: Advice) -> Table:
    """The settings of a checkpoint, the fastest expected first."""
    lines = [
        (one.contender.name, f"{one.tokens_per_forward:.2f}", f"{one.points_lost:+.1f}", f"{one.speed_up:.2f}")
        for one in advice.settings
    ]
    heads = ("setting", "tokens/forward", "points of accuracy lost", "expected speed over ar")
    return _table("settings", heads, lines)


def _table(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for number, head in enumerate(heads):
        table.add_column(head, overflow="fold", no_wrap=number == 0)
    for row in rows:
        table.add_row(*row)
    return table
