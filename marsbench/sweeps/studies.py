"""What stands behind the name of a page: a table's plan, or a study of its own."""

from __future__ import annotations

from marsbench.sweeps.discrepancies import discrepancy_rows
from marsbench.sweeps.engine_study import EngineStudy
from marsbench.sweeps.figure1 import figure1_rows
from marsbench.sweeps.plans import table_plan
from marsbench.sweeps.rows import Row
from marsbench.sweeps.runner import Runner
from marsbench.sweeps.token_classes import gains_rows


def measure(what: str, runner: Runner) -> list[Row]:
    """All rows of a page, those measured now that were missing."""
    if what == "engine":
        return EngineStudy(runner).rows()
    if what == "discrepancies":
        return discrepancy_rows(runner)
    if what == "figure1":
        return figure1_rows(runner)
    if what == "gains":
        return gains_rows(runner)
    return runner.table(table_plan(what))
