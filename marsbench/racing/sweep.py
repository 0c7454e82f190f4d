"""The speed sweep: every contender of a grid at every batch size, speed and accuracy from the same generations."""

from __future__ import annotations

from collections.abc import Sequence

from marsbench.forward.linear import packing_in_words
from marsbench.keys import content_hash
from marsbench.locks import locked
from marsbench.neighbours import warning
from marsbench.provenance import node, provenance
from marsbench.racing.course import Cell, Course
from marsbench.racing.entrants import Load, size_of
from marsbench.racing.grid import BASELINES, Grid
from marsbench.racing.race import Outcome
from marsbench.racing.rounds import RoundLog
from marsbench.racing.sweep_rows import sweep_row
from marsbench.rows.kinds import Row, StepTimeRow, SweepRow
from marsbench.rows.workspace import full_disk_explained
from marsbench.running.run import Run


class Sweep:
    """A grid's cells: those that are missing are raced, batch size by batch size."""

    def __init__(self, run: Run, grid: Grid, load: Load | None = None) -> None:
        self._run, self._grid, self._course = run, grid, Course(run, grid, load)

    def rows(self) -> list[Row]:
        """All rows, in the grid's order: trainings, what a forward costs, then the cells."""
        with full_disk_explained(self._run.workspace.runs):
            rows: list[Row] = list(self._course.trainings())
            if self._grid.positions:
                rows.append(_step_times(self._course))
            for batch_size in self._grid.batch_sizes:
                rows += self._at(batch_size)
            return rows

    def _at(self, batch_size: int) -> list[SweepRow]:
        """The rows of all cells at a batch size; those that are missing are raced together, with the baselines."""
        cells = self._course.cells(batch_size)
        if self._missing(cells):
            # The laps of one race are run on one machine: it goes on only there.
            here = [node()] if node() else []
            file = self._run.workspace.race(content_hash([*[cell.key for cell in cells], *here]))
            with locked(
                file.with_suffix(".jsonl.lock"), say=self._run.reporter.say
            ):  # of two sweeps in one folder, the second waits and finds the rows
                self._race(cells, RoundLog(file))
                file.unlink(missing_ok=True)  # its rows are kept; who failed may try again
        rows = self._run.store.rows()
        return [row for cell in cells if isinstance(row := rows.get(cell.key), SweepRow)]

    def _missing(self, cells: Sequence[Cell]) -> list[Cell]:
        what = "{0.name} at batch size {0.batch_size}"
        return [cell for cell in cells if not self._run.existing_row(cell.key, SweepRow, what.format(cell))]

    def _race(self, cells: Sequence[Cell], log: RoundLog) -> None:
        """Race the missing cells, or go on with what an interruption has left of that race, and keep the rows."""
        ready = []
        for cell in self._missing(cells):
            if reason := self._course.why_not(cell):
                self._skip(cell, reason)
            else:
                ready.append(cell)
        if not ready:
            return
        if not {cell.name for cell in ready} <= set(log.contenders):
            baselines = [cell for cell in cells if cell.name in BASELINES and not self._course.why_not(cell)]
            log.begin([cell.name for cell in cells if cell in ready or cell in baselines])
        racing = [cell for cell in cells if cell.name in log.contenders]
        self._run.reporter.say_once(warning())
        with self._run.reporter.bar(f"racing {len(racing)} contenders, {cells[0].batch_size} at once") as bar:
            outcomes = self._course.race(racing).run(log, bar.update)
        for cell in ready:
            self._run.keep(sweep_row(self._course, cell, outcomes[cell.name], outcomes))
        self._run.reporter.say(f"raced {len(racing)} contenders at batch size {cells[0].batch_size}")

    def _skip(self, cell: Cell, reason: str) -> None:
        known = self._run.store.rows().get(cell.key)
        if not (isinstance(known, SweepRow) and (known.status, known.reason) == ("skipped", reason)):
            self._run.keep(sweep_row(self._course, cell, Outcome([], status="skipped", reason=reason), {}))


def _step_times(course: Course) -> StepTimeRow:
    """What a forward costs by its shape, on the checkpoint of `ar`."""
    loaded, run = course.baseline, course.run
    key = content_hash({"kind": "step_time", "weights": loaded.weights, **course.everywhere})
    known = run.existing_row(key, StepTimeRow, "the times of forward passes")
    if known is not None:
        return known
    origin = provenance(seed=run.seed)
    run.reporter.say_once(warning())
    found = course.step_times()
    row = StepTimeRow(
        key=key,
        status="done",
        reason="",
        scale=run.scale.scale,
        stage=course.plain.stage,
        context=found.context,
        rows=[shape.rows for shape in found.shapes],
        window=[shape.window for shape in found.shapes],
        seconds=found.seconds,
        copied_per_second=found.copied_per_second,
        read_per_second=found.read_per_second,
        weight_bytes=size_of(loaded.model),
        checkpoint=loaded.weights,
        provenance={**origin, **loaded.origin, **packing_in_words()},
        others_cores=found.others_cores,
        dtype=course.grid.dtype,
    )
    run.keep(row)
    return row
