"""What tests of pages share: the pages, made-up rows, and a page's text split into parts."""

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import nox.registry
import numpy as np

from marsbench.errors import UserError
from marsbench.executors.tasks import Here
from marsbench.findings.cells import columns
from marsbench.line import Line
from marsbench.overview.work import carry_out
from marsbench.rows.kinds import EvaluationRow, Row, SweepRow
from marsbench.rows.workspace import Workspace
from marsbench.running.plans import TablePlan
from marsbench.running.run import Run
from marsbench.studies import studies, study_of
from marsbench.studies.study import Study, TablePage

PROVENANCE = {"started": "2026-01-02T03:04:05+00:00", "seed": 0}
PAGES = [study for study in studies().values() if isinstance(study, TablePage) and study.section]


def plan_of(name: str) -> TablePlan:
    """The lines of a page."""
    plan = study_of(name).plan
    assert plan is not None
    return plan


def answered(
    arm: Line, benchmark: str, correct: Sequence[float], emitted: Sequence[int], forwards: Sequence[int], **more: Any
) -> EvaluationRow:
    """The row of a table's line on a benchmark, question by question; `more` of its fields if they matter."""
    return EvaluationRow(
        f"{arm.name}/{benchmark}", "done", "", "mini", arm.name, arm.stage, arm.method, arm.options,
        f"mini_{benchmark}", "exact_match", correct=[*map(float, correct)], emitted=[*map(int, emitted)],
        forwards=[*map(int, forwards)], finished=[1] * len(correct), **more,
    )  # fmt: skip


def answers_of(page: TablePage, seed: int = 0, questions: int = 40) -> Iterator[EvaluationRow]:
    """Answers of a page's lines that differ from cell to cell, and from seed to seed."""
    generator = np.random.default_rng(seed)
    for benchmark in columns(page.plan):
        for arm in page.plan.lines:
            forwards = generator.integers(5, 40, questions)
            correct, extra = generator.integers(0, 2, questions), generator.integers(0, 9, questions)
            yield answered(arm, benchmark, correct, forwards + extra, forwards, provenance=PROVENANCE)


def sweep_row(contender: str, method: str, batch_size: int, seconds: Sequence[float], **more: Any) -> SweepRow:
    """A cell raced against an `ar` that takes one second for as many tokens; `more` of its fields if they matter."""
    fields: dict[str, Any] = {
        "options": {}, "correct": [1.0, 0.0, 1.0, 1.0], "emitted": [10] * 4, "row_forwards": [5] * 4,
        "finished": [1] * 4, "first_token": [0.1] * 4, "last_token": [0.2] * 4, "provenance": PROVENANCE,
        "baselines": {"ar": {"seconds": [1.0] * len(seconds), "emitted": 40}},
    }  # fmt: skip
    return SweepRow(
        f"{contender}/{batch_size}", "done", "", "mini", contender=contender, stage="mars", draft="", method=method,
        batch_size=batch_size, benchmarks=["mini_gsm8k"], prompts=4, max_new_tokens=96,
        seconds=list(seconds), **(fields | more),
    )  # fmt: skip


def section(page: str, title: str) -> str:
    """The text below a heading, up to the next."""
    return next(part for part in page.split("\n## ") if part.startswith(title)).partition("\n\n</details>")[0]


def lines_of(text: str) -> list[list[str]]:
    """All table lines of a text, split into cells."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line[:1] == "|"]


@cache
def nox_sessions() -> frozenset[str]:
    """The names of all nox sessions, those from the noxfile's loops among them; nox registers each once."""
    spec = importlib.util.spec_from_file_location("noxfile", Path(__file__).parent.parent / "noxfile.py")
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    return frozenset(nox.registry.get())


ROOT = Path(__file__).resolve().parent.parent


@cache
def stored(scale: str = "mini", seed: int = 0) -> Sequence[Row]:
    """All committed rows of a scale and training seed."""
    return Workspace(ROOT, scale, f"seed{seed}" if seed else "").rows


def page_rows(page: str, scale: str = "mini", seed: int = 0) -> list[Row]:
    """The committed rows that a page shows."""
    query = study_of(page).query
    return query.of(stored(scale, (*query.seeds, seed)[0]))


def publish(root: Path, rows: Sequence[Row], page: str, scale: str = "mini", variant: str = "") -> Workspace:
    """Add rows to a store, and a page to those that are made from it."""
    place = Workspace(root, scale, variant)
    known = place.rows
    new = [replace(row, scale=scale, key=f"{page} {number}") for number, row in enumerate(rows, len(known))]
    place.publish(page, [*known, *new])
    return place


def measured(run: Run, plan: TablePlan) -> list[Row]:
    """The rows of a table that no page has, measured in this process."""
    return measured_of(Study(key="made-up", name="Made up", asks="", plan=plan), run)


def measured_of(study: Study, run: Run) -> list[Row]:
    """The rows of a page, measured in this process."""
    result = carry_out([study], run, Here(run.workspace.logs, run.reporter))[study.key]
    if isinstance(result, UserError):
        raise result
    return result
