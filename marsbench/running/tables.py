"""A table's rows: what is missing of its checkpoints is trained, what is missing of its cells is measured."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from marsbench.evaluation.local_data import Unavailable
from marsbench.rows.kinds import EvaluationRow, Row, Status
from marsbench.rows.workspace import full_disk_explained
from marsbench.running.cells import Cells
from marsbench.running.checkpoints import Checkpoints
from marsbench.running.plans import Asked, TablePlan
from marsbench.running.run import Run
from marsbench.running.training_cost import step_cost_row
from marsbench.training.checkpoints import Loaded


class Table:
    """One table of a run."""

    def __init__(self, run: Run, plan: TablePlan) -> None:
        self._run, self._plan = run, plan
        self._checkpoints, self._cells = Checkpoints(run), Cells(run)
        self._benchmarks = run.asked(plan)
        self._asked = [Asked(arm, name, plan.questions) for arm in plan.arms for name in self._benchmarks]

    def rows(self) -> list[Row]:
        """All rows in the table's order: trainings, the cost of a step, then the cells."""
        with full_disk_explained(self._run.workspace.runs):
            reasons = self._reasons()
            if all(reasons.values()):  # nothing is trained for questions that cannot be asked
                for name, reason in reasons.items():
                    self._run.reporter.say(f"{name}: skipped ({reason})")
                return [self._cells.without(one, reasons[one.benchmark]) for one in self._asked]
            rows: list[Row] = [*self._checkpoints.trainings(self._plan.stages)]
            # Its batches are timed, in no shard; the paper says what the real scales cost.
            if self._plan.step_cost and self._run.scale.world and self._run.is_whole:
                rows.append(step_cost_row(self._run))
            for _, cells in groupby(self._asked, key=lambda one: (one.arm.needs, one.arm.dtype)):
                rows += self._lines([*cells])
            return rows

    @property
    def can_ask(self) -> bool:
        """Whether this machine has the questions of any of its benchmarks: for none, nothing is trained."""
        return not all(self._reasons().values())

    def _reasons(self) -> dict[str, str]:
        """Why each benchmark cannot be asked here, empty where it can."""
        return {name: self._run.cannot_ask(name, self._plan.questions) for name in self._benchmarks}

    def _lines(self, cells: Sequence[Asked]) -> list[EvaluationRow]:
        """Lines that share their checkpoints, on every benchmark; what cannot be measured says why."""
        known = [self._cells.known(one) for one in cells]
        if len(measured := [row for row in known if row is not None]) == len(cells):  # nothing is to be loaded
            return measured
        failures = [self._failure(one) for one in cells]
        if all(failures):
            return [self._without("failed", one, why) for one, why in zip(cells, failures, strict=True)]
        reason, loaded, draft = self._checkpoints.available_for(cells[0].arm)
        if loaded is None:
            return [self._without("skipped", one, reason) for one in cells]
        return [
            self._without("failed", one, why) if why else self._cell_or_reason(one, loaded, draft)
            for one, why in zip(cells, failures, strict=True)
        ]

    def _failure(self, asked: Asked) -> str:
        """Why another process of this run could not measure a cell, empty where none has tried in vain."""
        places = [*[one.place for one in asked.arm.needs], asked.place]
        return next(filter(None, (self._run.failures.get(place, "") for place in places)), "")

    def _cell_or_reason(self, asked: Asked, loaded: Loaded, draft: Loaded | None) -> EvaluationRow:
        """A cell, or a row that says why this machine cannot measure it."""
        try:
            return self._cells.cell(asked, loaded, draft, self._title(asked))
        except Unavailable as error:
            return self._without("skipped", asked, error.reason)

    def _without(self, status: Status, asked: Asked, reason: str) -> EvaluationRow:
        self._run.reporter.say(f"{self._title(asked)}: {status} ({reason})")
        return self._cells.without(asked, reason, status)

    def _title(self, asked: Asked) -> str:
        return f"{asked.arm.label}, {asked.benchmark} (cell {self._asked.index(asked) + 1} of {len(self._asked)})"
