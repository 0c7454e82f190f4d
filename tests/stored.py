"""The committed rows of pages, and rows put where pages are made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from marsbench.errors import UserError
from marsbench.executors.local import Here
from marsbench.overview.work import carry_out
from marsbench.rows.kinds import Row
from marsbench.rows.workspace import Workspace
from marsbench.running.plans import TablePlan
from marsbench.running.run import Run
from marsbench.studies import study_of
from marsbench.studies.study import Study

ROOT = Path(__file__).resolve().parent.parent


@cache
def stored(scale: str = "mini", seed: int = 0) -> Sequence[Row]:
    """All committed rows of a scale and training seed."""
    return Workspace(ROOT, scale, f"seed{seed}" if seed else "").rows


def page_rows(page: str, scale: str = "mini", seed: int = 0) -> list[Row]:
    """The committed rows that a page shows."""
    query = study_of(page).query
    return query.of(stored(scale, seed if query.seed is None else query.seed))


def publish(root: Path, rows: Sequence[Row], page: str, scale: str = "mini", variant: str = "") -> Workspace:
    """Add rows to a store, and a page to those that are made from it."""
    place = Workspace(root, scale, variant)
    known = place.rows
    new = [replace(row, scale=scale, key=f"{page} {number}") for number, row in enumerate(rows, len(known))]
    place.publish(page, [*known, *new])
    return place


def measured(run: Run, plan: TablePlan) -> list[Row]:
    """The rows of a table that no page has, measured in this process."""
    return measured_of(Study(key="made-up", name="Made up", asks="", plan=plan, sections=lambda *given: ()), run)


def measured_of(study: Study, run: Run) -> list[Row]:
    """The rows of a page, measured in this process."""
    made = carry_out([study], run, Here(run.workspace.logs, run.reporter))[study.key]
    if isinstance(made, UserError):
        raise made
    return made
