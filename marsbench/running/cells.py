"""Cells: a line of a table on one benchmark, answered, scored and kept as a row."""

import time
from dataclasses import replace

from marsbench.answering import Answering
from marsbench.evaluation.benchmarks import benchmark
from marsbench.evaluation.harness import AnswerLog, Exam, answer, cut_in_words
from marsbench.forward.limits import room_for_prompt
from marsbench.forward.linear import packing_in_words
from marsbench.keys import content_hash, versions
from marsbench.line import Line
from marsbench.methods import METHODS
from marsbench.provenance import products, provenance
from marsbench.rows.kinds import EvaluationRow, Status
from marsbench.running.checkpoints import Checkpoints
from marsbench.running.plans import Asked
from marsbench.running.run import Run
from marsbench.training.checkpoints import Loaded

_DTYPE = "float32"  # of weights and caches, unless a line says otherwise


class Cells:
    """Measures the cells of a run; holds nothing itself."""

    def __init__(self, run: Run) -> None:
        self._run, self._checkpoints = run, Checkpoints(run)

    def cell(self, asked: Asked, loaded: Loaded, draft: Loaded | None = None, *, said: str = "") -> EvaluationRow:
        """A cell, answered and scored now unless it was; its title on the terminal ends by what is `said`."""
        run, line = self._run, asked.line
        answering = self.answering(line, loaded, draft)
        weights = loaded.weights, draft.weights if draft else None
        key = self._key(asked, *weights, loaded.dtype, answering.compiled)
        if (row := self._done(key, line)) is not None:
            return row
        run.reporter.say_once(answering.remark)
        exam = run.exam(asked.benchmark, asked.questions).shard(*run.shard)
        row = self._measure(line, answering, exam, key, f"{line.label}, {asked.benchmark}{said}")
        if run.shard == (1, 1):  # one shard's answers are logged, and make a row together with the others'
            run.store.append(row)
        return row

    def known(self, asked: Asked) -> EvaluationRow | None:
        """The row of a cell that may be taken as it is, decoded from the run's own checkpoints of today."""
        line, name, questions = asked
        if self._run.cannot_ask(name, questions):
            return None
        weights = [record.weights for stage in line.needs if (record := self._checkpoints.own(stage)) is not None]
        if len(weights) < len(line.needs):
            return None
        return self._done(self._key(asked, weights[0], weights[1] if line.draft else None, line.dtype), line)

    def _done(self, key: str, line: Line) -> EvaluationRow | None:
        """A finished row, as the line's: another table's line may have measured it."""
        row = self._run.existing_row(key, EvaluationRow)
        return replace(row, arm=line.name) if row else None

    def answering(self, line: Line, loaded: Loaded, draft: Loaded | None = None) -> Answering:
        """A line with its checkpoints, that answers as many questions at once as the scale says."""
        rows = 1 if METHODS[line.method].one_row else self._run.scale.batch_size
        line = replace(line, compiled=self._run.compiled)
        with self._checkpoints.others_may_fail(line.trained):
            return Answering.of(line, loaded, draft, batch_size=rows, prefill_positions=self._run.prefill_positions)

    def without(self, asked: Asked, reason: str, status: Status = "skipped") -> EvaluationRow:
        line, scale, origin = asked.line, self._run.scale.scale, provenance(seed=self._run.seed)
        key = content_hash({"skipped": [line.name, asked.benchmark, scale, reason]})
        metric = benchmark(asked.benchmark).headline
        return EvaluationRow(
            key, status, reason, scale, **line.identity, benchmark=asked.benchmark, metric=metric, provenance=origin,
            dtype=line.dtype,
        )  # fmt: skip

    def _key(
        self, asked: Asked, weights: str | None, draft: str | None, dtype: str = _DTYPE, compiled: bool = False
    ) -> str:
        """The key of everything that decides a cell's answers and scores.

        Compiled steps change no token, but in 16 bits they round less often, so that close calls may end otherwise.
        """
        (line, name, questions), run = asked, self._run
        return content_hash({
            "stage": line.stage, "method": line.method, "options": line.options, "benchmark": name,
            "tasks": run.exam(name, questions).fingerprint, "limit": run.questions(questions),
            "max_new_tokens": run.answer_limit(name), "batch_size": run.scale.batch_size,
            "weights": weights, "draft": draft, "versions": versions("decoding", "scoring", "world"), **products(dtype),
            **({} if dtype == _DTYPE else {"dtype": dtype, **({"compiled": True} if compiled else {})}),
        })  # fmt: skip

    def _measure(self, line: Line, answering: Answering, exam: Exam, key: str, title: str) -> EvaluationRow:
        """Answer and score; the answers of an interrupted run are taken up."""
        origin, started = provenance(seed=self._run.seed), time.perf_counter()
        workspace, scale, chosen, loaded = self._run.workspace, self._run.scale, exam.benchmark, answering.loaded
        limit = self._run.answer_limit(chosen.name)
        log = AnswerLog(workspace.answers(key, self._run.shard), workspace.shards(key))
        with self._run.reporter.bar(title) as bar:

            def follow(done: int, asked: int) -> None:
                bar.update(done, asked, f"{log.emitted / (time.perf_counter() - started):,.0f} tokens/s")

            scored = answer(exam, log, answering, limit, follow)
        cuts = [one.prompt_cut for one in scored.answers]
        self._run.reporter.say_once(cut_in_words(chosen.name, cuts, room_for_prompt(loaded.model, limit)))
        row = EvaluationRow(
            key, "done", "", scale.scale, **line.identity, benchmark=chosen.name, metric=chosen.headline,
            correct=scored.correct,
            others={name: values for name, values in scored.scores.items() if name != chosen.headline},
            emitted=[one.emitted for one in scored.answers],
            forwards=[one.forwards for one in scored.answers],
            finished=[int(one.finished) for one in scored.answers],
            seconds=round(time.perf_counter() - started, 3), max_new_tokens=limit, checkpoint=loaded.weights,
            provenance={**origin, **loaded.origin, **packing_in_words()},
            prompt_cut=cuts, dtype=loaded.dtype, digests=scored.digests,
        )  # fmt: skip
        share, speed = sum(row.correct) / len(row.correct), sum(row.emitted) / sum(row.forwards)
        self._run.reporter.say(f"{title}: {share:.1%} of {len(row.correct)}, {speed:.2f} tokens/forward")
        return row
