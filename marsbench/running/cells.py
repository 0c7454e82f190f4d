"""Cells: a line of a table on one benchmark, answered, scored and kept as a row."""

import time
from dataclasses import replace

from marsbench.answering import Answering
from marsbench.evaluation.benchmarks import benchmark
from marsbench.evaluation.harness import AnswerLog, answer, cut_in_words
from marsbench.forward.limits import room_for_prompt
from marsbench.forward.linear import packing_in_words
from marsbench.keys import content_hash, versions
from marsbench.line import Line
from marsbench.locks import locked
from marsbench.methods import METHODS
from marsbench.provenance import products, provenance
from marsbench.rows.kinds import EvaluationRow, Status
from marsbench.running.checkpoints import Checkpoints
from marsbench.running.plans import PlannedCell
from marsbench.running.run import Run
from marsbench.training.checkpoints import Loaded


class CellRunner:
    def __init__(self, run: Run) -> None:
        self._run, self._checkpoints = run, Checkpoints(run)

    def row(self, cell: PlannedCell, loaded: Loaded, draft: Loaded | None = None, *, said: str = "") -> EvaluationRow:
        """The row of a cell, answered and scored now unless it was; `said` ends its title on the terminal."""
        answering, say = self.answering(cell.line, loaded, draft), self._run.reporter.say
        key = self._key(cell, loaded.weights, draft.weights if draft else None, loaded.dtype, answering.compiled)
        lock = self._run.answer_logs(key)[0].with_suffix(".jsonl.lock")
        with locked(lock, say=say):  # of two commands, the second waits and finds the row, or the answers
            return self._done(key, cell.line) or self._answered(cell, key, answering, loaded, said)

    def _answered(self, cell: PlannedCell, key: str, answering: Answering, loaded: Loaded, said: str) -> EvaluationRow:
        run, line = self._run, cell.line
        run.reporter.say_once(answering.remark)
        exam, title = run.exam(cell.benchmark, cell.questions), f"{line.label}, {cell.benchmark}{said}"
        origin, started, logs = provenance(seed=run.seed), time.perf_counter(), run.answer_logs(key)
        chosen, limit = exam.benchmark, run.answer_limit(exam.benchmark.name)
        for file in logs if run.existing == "rerun" else ():
            file.unlink(missing_ok=True)
        with run.reporter.bar(title) as bar:
            scored = answer(exam, AnswerLog(*logs), answering, limit, bar.update)
        cuts = [each.prompt_cut for each in scored.answers]
        run.reporter.say_once(cut_in_words(chosen.name, cuts, room_for_prompt(loaded.model, limit)))
        row = EvaluationRow(
            key, "done", "", run.scale.scale, **line.row_fields, benchmark=chosen.name, metric=chosen.headline,
            correct=scored.correct,
            others={name: values for name, values in scored.scores.items() if name != chosen.headline},
            emitted=[each.emitted for each in scored.answers],
            forwards=[each.forwards for each in scored.answers],
            finished=[int(each.finished) for each in scored.answers],
            seconds=round(time.perf_counter() - started, 3), max_new_tokens=limit, checkpoint=loaded.weights,
            provenance={**origin, **loaded.origin, **packing_in_words()},
            prompt_cut=cuts, dtype=loaded.dtype, digests=scored.digests,
        )  # fmt: skip
        share, speed = sum(row.correct) / len(row.correct), sum(row.emitted) / sum(row.forwards)
        run.reporter.say(f"{title}: {share:.1%} of {len(row.correct)}, {speed:.2f} tokens/forward")
        if run.is_whole:
            run.row_file.append(row)
        return row

    def known(self, cell: PlannedCell) -> EvaluationRow | None:
        """The row of a cell that may be taken as it is, decoded from the run's own checkpoints of today."""
        line, name, questions = cell
        if self._run.cannot_ask(name, questions):
            return None
        weights = [record.weights for stage in line.needs if (record := self._checkpoints.own(stage)) is not None]
        if len(weights) < len(line.needs):
            return None
        return self._done(self._key(cell, weights[0], weights[1] if line.draft else None, line.dtype), line)

    def _done(self, key: str, line: Line) -> EvaluationRow | None:
        """A finished row, as the line's: another table's line may have measured it."""
        row = self._run.existing_row(key, EvaluationRow)
        return replace(row, arm=line.name) if row else None

    def answering(self, line: Line, loaded: Loaded, draft: Loaded | None = None) -> Answering:
        """A line with its checkpoints, that answers as many questions at once as the scale says."""
        rows = 1 if METHODS[line.method].one_row else self._run.scale.batch_size
        line, positions = replace(line, compiled=self._run.compiled), self._run.prefill_positions
        with self._checkpoints.others_may_fail(line.trained):
            return Answering.of_line(line, loaded, draft, batch_size=rows, prefill_positions=positions)

    def without(self, cell: PlannedCell, reason: str, status: Status = "skipped") -> EvaluationRow:
        line, scale, origin = cell.line, self._run.scale.scale, provenance(seed=self._run.seed)
        key = content_hash({"skipped": [line.name, cell.benchmark, scale, reason]})
        metric = benchmark(cell.benchmark).headline
        return EvaluationRow(
            key, status, reason, scale, **line.row_fields, benchmark=cell.benchmark, metric=metric, provenance=origin,
            dtype=line.dtype,
        )  # fmt: skip

    def _key(
        self, cell: PlannedCell, weights: str | None, draft: str | None, dtype: str = "float32", compiled: bool = False
    ) -> str:
        """The key of everything that decides a cell's answers; compiled steps round otherwise in 16 bits."""
        (line, name, questions), run = cell, self._run
        return content_hash({
            "stage": line.stage, "method": line.method, "options": line.options, "benchmark": name,
            "tasks": run.exam(name, questions).fingerprint, "limit": run.questions(questions),
            "max_new_tokens": run.answer_limit(name), "batch_size": run.scale.batch_size,
            "weights": weights, "draft": draft, "versions": versions("decoding", "scoring", "world"), **products(dtype),
            **({} if dtype == "float32" else {"dtype": dtype, **({"compiled": True} if compiled else {})}),
        })  # fmt: skip
