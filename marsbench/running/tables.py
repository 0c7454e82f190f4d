"""A table's rows: what is missing of its checkpoints is trained, what is missing of its cells is measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from marsbench.evaluation.local_data import Unavailable
from marsbench.rows.kinds import EvaluationRow, Row, Status
from marsbench.rows.workspace import full_disk_explained
from marsbench.running.cells import Cells
from marsbench.running.checkpoints import Checkpoints
from marsbench.running.plans import Arm, Asked, TablePlan
from marsbench.running.run import Run
from marsbench.running.step_cost import step_cost_row
from marsbench.training.checkpoints import Loaded


class Table:
    """One table of a run."""

    def __init__(self, run: Run, plan: TablePlan) -> None:
        self._run, self._plan = run, plan
        self._checkpoints, self._cells = Checkpoints(run), Cells(run)
        self._benchmarks = run.asked(plan)
        cells = [(arm.name, name) for arm in plan.arms for name in self._benchmarks]
        self._numbers = {cell: number for number, cell in enumerate(cells, 1)}

    def rows(self) -> list[Row]:
        """All rows in the table's order: trainings, the cost of a step, then the cells."""
        with full_disk_explained(self._run.workspace.runs):
            reasons = {name: self._run.cannot_ask(name, self._plan.questions) for name in self._benchmarks}
            if all(reasons.values()):  # nothing is trained for questions that cannot be asked
                for name, reason in reasons.items():
                    self._run.reporter.say(f"{name}: skipped ({reason})")
                return [self._cells.skipped(arm, name, reasons[name]) for arm in self._plan.arms for name in reasons]
            rows: list[Row] = [*self._checkpoints.trainings(self._plan.stages)]
            # Its batches are timed, in no shard; the paper says what the real scales cost.
            if self._plan.step_cost and self._run.scale.world and self._run.is_whole:
                rows.append(step_cost_row(self._run))
            for _, arms in groupby(self._plan.arms, key=lambda arm: (arm.trained, arm.draft)):
                rows += self._lines(list(arms))
            return rows

    @property
    def can_ask(self) -> bool:
        """Whether this machine has the questions of any of its benchmarks: for none, nothing is trained."""
        return not all(self._run.cannot_ask(name, self._plan.questions) for name in self._benchmarks)

    def _lines(self, arms: Sequence[Arm]) -> list[EvaluationRow]:
        """Lines that share their checkpoints, on every benchmark; what cannot be measured says why."""
        places = [(arm, name) for arm in arms for name in self._benchmarks]
        known = [self._cells.known(Asked(arm, name, self._plan.questions)) for arm, name in places]
        if len(measured := [row for row in known if row is not None]) == len(places):  # nothing is to be loaded
            return measured
        failures = [self._failure(arm, name) for arm, name in places]
        if all(failures):
            return [self._without("failed", *place, why) for place, why in zip(places, failures, strict=True)]
        reason, loaded, draft = self._checkpoints.available_for(arms[0])
        if loaded is None:
            return [self._without("skipped", arm, name, reason) for arm, name in places]
        return [
            self._without("failed", arm, name, why) if why else self._cell_or_reason(arm, loaded, name, draft)
            for (arm, name), why in zip(places, failures, strict=True)
        ]

    def _failure(self, arm: Arm, name: str) -> str:
        """Why another process of this run could not measure a cell, empty where none has tried in vain."""
        failures = self._run.failures
        asked = Asked(arm, name, self._plan.questions)
        places = [*[one.place for one in arm.needs], asked.place]
        return next(filter(None, (failures.get(place, "") for place in places)), "")

    def _cell_or_reason(self, arm: Arm, loaded: Loaded, name: str, draft: Loaded | None) -> EvaluationRow:
        """One arm on one benchmark, or a row that says why this machine cannot measure it."""
        try:
            title, questions = self._title(arm, name), self._plan.questions
            return self._cells.cell(arm, loaded, name, draft, questions=questions, title=title)
        except Unavailable as error:
            return self._without("skipped", arm, name, error.reason)

    def _without(self, status: Status, arm: Arm, name: str, reason: str) -> EvaluationRow:
        self._run.reporter.say(f"{self._title(arm, name)}: {status} ({reason})")
        return replace(self._cells.skipped(arm, name, reason), status=status)

    def _title(self, arm: Arm, name: str) -> str:
        return f"{arm.label}, {name} (cell {self._numbers[arm.name, name]} of {len(self._numbers)})"
