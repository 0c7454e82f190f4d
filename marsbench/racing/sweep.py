"""The speed sweep: every contender of a grid at every batch size, speed and accuracy from the same generations."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from marsbench.decoding.generation import Generation
from marsbench.files import write_atomically
from marsbench.forward.linear import packing_in_words
from marsbench.keys import content_hash
from marsbench.locks import locked
from marsbench.provenance import node, others_cores, provenance, warning
from marsbench.racing.course import Cell, Course
from marsbench.racing.grid import BASELINES, Grid
from marsbench.racing.race import Outcome, RoundLog
from marsbench.rows.kinds import Row, StepTimeRow, SweepRow
from marsbench.rows.workspace import full_disk_explained
from marsbench.running.run import Run, made_once


class Sweep:
    def __init__(self, run: Run, grid: Grid) -> None:
        self._run, self._course = run, Course(run, grid)

    def rows(self) -> list[Row]:
        with full_disk_explained(self._run.workspace.runs):
            rows: list[Row] = list(self._course.trainings())
            if self._course.grid.positions:
                rows.append(_step_times(self._course))
            for batch_size in self._course.grid.batch_sizes:
                rows += self._at(batch_size)
            return rows

    def _at(self, batch_size: int) -> list[SweepRow]:
        cells = self._course.cells(batch_size)
        if self._missing(cells):
            # The laps of one race are run on one machine: it goes on only there.
            race = content_hash([*(cell.key for cell in cells), *filter(None, [node()])])
            file = self._run.workspace.runs / "races" / f"{race}.jsonl"
            # Of two sweeps in one folder, the second waits and finds the rows.
            with locked(file.with_suffix(".jsonl.lock"), say=self._run.reporter.say):
                self._race(cells, RoundLog(file))
                file.unlink(missing_ok=True)  # its rows are kept; who failed may try again
        rows = self._run.row_file.rows()
        return [row for cell in cells if isinstance(row := rows.get(cell.key), SweepRow)]

    def _missing(self, cells: Sequence[Cell]) -> list[Cell]:
        return [cell for cell in cells if not self._run.existing_row(cell.key, SweepRow)]

    def _race(self, cells: Sequence[Cell], log: RoundLog) -> None:
        ready, known = [], self._run.row_file.rows()
        for cell in self._missing(cells):
            if not (reason := self._course.why_not(cell)):
                ready.append(cell)
            elif (row := known.get(cell.key)) is None or (row.status, row.reason) != ("skipped", reason):
                self._run.row_file.append(_sweep_row(self._course, cell, Outcome(status="skipped", reason=reason), {}))
        if not ready:
            return
        racing = [cell for cell in cells if cell.line.name in log.contenders]
        if not {cell.line.name for cell in ready} <= log.contenders:
            log.restart()
            baselines = [cell for cell in cells if cell.line.name in BASELINES and not self._course.why_not(cell)]
            racing = [cell for cell in cells if cell in ready or cell in baselines]
        used = others_cores()
        self._run.reporter.say_once(warning(used))
        with self._run.reporter.bar(f"racing {len(racing)} contenders, {cells[0].batch_size} at once") as bar:
            outcomes = self._course.race(racing).run(log, bar.update)
        for cell in ready:
            row = _sweep_row(self._course, cell, outcomes[cell.line.name], outcomes, others_cores=used)
            self._run.row_file.append(row)
        self._run.reporter.say(f"raced {len(racing)} contenders at batch size {cells[0].batch_size}")


def _step_times(course: Course) -> StepTimeRow:
    loaded, run, grid = course.baseline, course.run, course.grid

    def timed() -> dict[str, Any]:
        used = others_cores()
        run.reporter.say_once(warning(used))
        return {
            **course.step_times(),
            "stage": course.plain.stage,
            "checkpoint": loaded.weights,
            "dtype": grid.dtype,
            "grid": grid.page,
            "provenance": {**loaded.origin, **packing_in_words(), "others_cores": used},
        }

    is_own = grid.page == "speedup" and grid.positions != Grid.positions  # on other pages, all grids time as many
    content = {"kind": "step_time", "weights": loaded.weights, **({"positions": grid.positions} if is_own else {})}
    return made_once(run, StepTimeRow, content | course.everywhere, timed)


def _sweep_row(
    course: Course, cell: Cell, outcome: Outcome, outcomes: Mapping[str, Outcome], **seen: float | None
) -> SweepRow:
    """The row of a cell, its samples written first; `outcomes` are those of its race, `seen` goes to its provenance."""
    contender = cell.line
    origin = course.target(contender).origin if course.weights(contender) else {}
    identity: dict[str, Any] = {
        "key": cell.key, "status": outcome.status, "reason": outcome.reason, "scale": course.run.scale.scale,
        "contender": contender.name, "stage": contender.stage, "draft": contender.options.get("draft", ""),
        "method": contender.method, "options": contender.shown, "compiled": contender.compiled,
        "batch_size": cell.batch_size, "benchmarks": list(course.questions.exams), "prompts": len(course.prompts.ids),
        "prompt_cut": course.prompts.cuts if any(course.prompts.cuts) else [],
        "max_new_tokens": course.max_new_tokens, "dtype": course.grid.dtype, "grid": course.grid.page,
        "provenance": {**provenance(seed=course.run.seed), **origin, **packing_in_words(), **seen},
    }  # fmt: skip
    measured = _measured(course, cell, outcome, outcomes) if outcome.status == "done" else {}
    return SweepRow(**identity, **measured)


def _measured(course: Course, cell: Cell, raced: Outcome, outcomes: Mapping[str, Outcome]) -> dict[str, Any]:
    generations, responses = raced.generations, course.responses(raced)
    correct = course.questions.score(responses)
    done = {name: outcome for name, outcome in outcomes.items() if outcome.status == "done"}
    seconds = {name: [round(lap, 6) for lap in outcome.seconds] for name, outcome in done.items()}
    baselines = {name: {"seconds": seconds[name], "emitted": done[name].emitted} for name in BASELINES if name in done}
    plain = [other.name for other in course.grid.contenders if other.method == "ar" and other.name in done]
    pairs = {name: zip(generations, done[name].generations, strict=True) for name in plain}
    return {
        "seconds": seconds[cell.line.name], "baselines": baselines, "correct": correct,
        "emitted": [made.emitted for made in generations], "row_forwards": [made.forwards for made in generations],
        "finished": [int(made.finish == "eos") for made in generations],
        "first_token": raced.first_token, "last_token": raced.last_token, **vars(raced.meter),
        "same_as": {name: sum(mine.tokens == other.tokens for mine, other in both) for name, both in pairs.items()},
        "samples": _log_samples(course, cell.key, generations, responses, correct),
        "checkpoint": course.target(cell.line).weights, **course.compiling(cell.line),
        "profile": course.profile(cell),
    }  # fmt: skip


def _log_samples(
    course: Course, key: str, generations: Sequence[Generation], responses: Sequence[str], correct: Sequence[float]
) -> str:
    of_each = zip(course.questions.questions, responses, correct, generations, strict=True)
    lines = [
        {
            "benchmark": question.benchmark, "doc_id": question.doc_id, "response": response, "correct": right,
            "tokens": generation.tokens, "eos_id": generation.eos_id, "accepted": generation.accepted,
        }
        for question, response, right, generation in of_each
    ]  # fmt: skip
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    write_atomically(course.run.workspace.samples(key), content)
    return hashlib.sha256(content).hexdigest()
