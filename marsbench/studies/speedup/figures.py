"""The figure of the speed page: speed-up by batch size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from marsbench.findings.sweep import ALLOWED_LOSS, SweepCells, speed_of
from marsbench.rendering.figures import by_batch_figure
from marsbench.rows.kinds import Row, SweepRow
from marsbench.statistics.intervals import Estimate

# Beside the page, less the extension.
BY_BATCH = "figures/speedup_by_batch_size"


def draw(rows: Sequence[Row], reports_dir: Path) -> list[Path]:
    sweep = SweepCells.of(rows)
    series: dict[str, dict[int, Estimate]] = {}
    for size in sweep.batch_sizes:
        for name, row in _best_of_each_method(sweep, size).items():
            if ratio := sweep.over_ar_alike(row):
                form = "" if sweep.has_both_forms(row) else ", eager"
                series.setdefault(f"{name}{form}", {})[size] = ratio
    return by_batch_figure(series, "tokens per second over ar, like over like", reports_dir / BY_BATCH)


def _best_of_each_method(sweep: SweepCells, batch_size: int) -> dict[str, SweepRow]:
    """Of each method but `ar`, the contender that is fastest at a batch size and loses little accuracy.

    What promises the tokens of its own model loses none, whichever checkpoint that is.
    """
    best: dict[str, SweepRow] = {}
    for row in sweep.at(batch_size, lambda row: row.method != "ar"):
        alone = row.method == "mars" and row.options.get("threshold") is None
        cost, kind = sweep.cost(row), ", adapter" if row.is_adapted else ", one token" if alone else ""
        name = f"{row.method}{kind}"
        if row.is_lossless or (cost is not None and cost.value <= ALLOWED_LOSS):
            best[name] = max(best.get(name, row), row, key=speed_of)
    return best
