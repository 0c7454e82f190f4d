"""Cells: a line of a table on one benchmark, answered, scored and kept as a row."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from marsbench.compiled.graphs import kind_of_batch
from marsbench.decoding.engine import Batch, KindOfBatch, Method
from marsbench.decoding.outside import OutsideMethod
from marsbench.evaluation.benchmarks import benchmark, fingerprint
from marsbench.evaluation.harness import AnswerLog, EngineModel, Exam, cut_in_words, evaluate
from marsbench.forward.linear import packing_in_words
from marsbench.keys import content_hash, versions
from marsbench.methods import OPTIONS
from marsbench.methods.fitting import fit
from marsbench.methods.settings import load_aloud
from marsbench.provenance import products, provenance
from marsbench.rows.kinds import EvaluationRow
from marsbench.rows.workspace import full_disk_explained
from marsbench.running.checkpoints import Checkpoints
from marsbench.running.plans import Arm, Asked
from marsbench.running.run import Run
from marsbench.training.checkpoints import Loaded, default_device

_COUNT_EVERY_S = 2.0
_DTYPE = "float32"  # in which everything is decoded unless somebody says otherwise


class Cells:
    """Measures the cells of a run; holds nothing itself."""

    def __init__(self, run: Run) -> None:
        self._run, self._checkpoints = run, Checkpoints(run)

    def cell(
        self,
        arm: Arm,
        loaded: Loaded,
        name: str,
        draft: Loaded | None = None,
        *,
        questions: int | None = None,
        title: str = "",
    ) -> EvaluationRow:
        """One arm on one benchmark; tables that ask the same share what was measured."""
        title = title or f"{arm.label}, {name}"
        method = self.method(arm, loaded, draft)
        companion = draft.weights if draft else None
        kind, not_compiled = kind_of_batch(loaded.model, method, self._run.compiled)
        key = self._key(arm, name, questions, loaded.weights, companion, _dtype_of(loaded), kind is not Batch)
        row, log = self._run.store.rows().get(key), self._run.workspace.answers(key)
        if isinstance(row, EvaluationRow) and row.status == "done":
            if not self._run.must_redo(key, f"{arm.label} on {name}", log):
                return replace(row, arm=arm.name)  # another table's line may have measured it
            for file in (log, *self._run.workspace.shards(key)):
                file.unlink(missing_ok=True)
        self._run.reporter.say_once(not_compiled)
        exam = self._run.exam(name, questions).shard(*self._run.shard)
        row = self._measure(arm, loaded, method, exam, key, title, kind)
        if self._run.is_whole:  # one shard's answers are logged, and make a row together with the others'
            self._run.keep(row)
        return row

    def known(self, asked: Asked) -> EvaluationRow | None:
        """The row of a cell that may be taken as it is, decoded from the run's own checkpoints of today."""
        arm, name, questions = asked
        if self._run.existing != "reuse" or self._run.cannot_ask(name, questions):
            return None
        weights = [record.weights for one in arm.needs if (record := self._checkpoints.own(one)) is not None]
        if len(weights) < len(arm.needs):
            return None
        row = self._run.store.rows().get(self._key(arm, name, questions, weights[0], weights[1] if arm.draft else None))
        return replace(row, arm=arm.name) if isinstance(row, EvaluationRow) and row.status == "done" else None

    def method(self, arm: Arm, loaded: Loaded, draft: Loaded | None = None) -> Method | OutsideMethod:
        """An arm's method, with its options, fitted to its checkpoint."""
        with self._checkpoints.others_may_fail(arm.trained):
            return fit(arm.method, loaded, draft=draft, untrained_masks=arm.untrained_masks, **method_options(arm))

    def skipped(self, arm: Arm, name: str, reason: str) -> EvaluationRow:
        scale, origin = self._run.scale.scale, provenance(seed=self._run.seed)
        key = content_hash({"skipped": [arm.name, name, scale, reason]})
        identity = arm.name, arm.stage, arm.method, arm.options, name, benchmark(name).headline
        return EvaluationRow(key, "skipped", reason, scale, *identity, provenance=origin)

    def _key(
        self,
        arm: Arm,
        name: str,
        questions: int | None,
        weights: str | None,
        draft: str | None,
        dtype: str = _DTYPE,
        compiled: bool = False,
    ) -> str:
        """The key of everything that decides a cell's answers and scores.

        Compiled steps change no token, but in 16 bits they round less often, so that close calls may end otherwise.
        """
        return content_hash(
            {
                "stage": arm.stage,
                "method": arm.method,
                "options": arm.options,
                "benchmark": name,
                "tasks": fingerprint(self._run.exam(name, questions).tasks),
                "limit": self._run.questions(questions),
                "max_new_tokens": self._run.answer_limit(name),
                "batch_size": self._run.scale.batch_size,
                "weights": weights,
                "draft": draft,
                "versions": versions("decoding", "scoring", "world"),
                **products(dtype),
                **({} if dtype == _DTYPE else {"dtype": dtype, **({"compiled": True} if compiled else {})}),
            }
        )

    def _measure(
        self, arm: Arm, loaded: Loaded, method: Method | OutsideMethod, exam: Exam, key: str, title: str,
        kind: KindOfBatch,
    ) -> EvaluationRow:  # fmt: skip
        """Answer and score; the answers of an interrupted run are taken up."""
        origin, started = provenance(seed=self._run.seed), time.perf_counter()
        workspace, scale, chosen = self._run.workspace, self._run.scale, exam.benchmark
        limit = self._run.answer_limit(chosen.name)
        log = AnswerLog(workspace.answers(key, self._run.shard), workspace.shards(key))
        with self._run.reporter.bar(title) as bar:
            rate = _Rate(log)
            model = EngineModel(
                exam,
                log,
                loaded,
                method,
                threshold=arm.options.get("threshold"),
                max_new_tokens=limit,
                batch_size=scale.batch_size,
                prefill_positions=self._run.prefill_positions,
                kind=kind,
                progress=lambda done, asked: bar.update(done, asked, tokens_per_second=rate.now()),
            )
            scored = evaluate(model)
        cuts = [answer.prompt_cut for answer in scored.answers]
        if said := cut_in_words(chosen.name, cuts, model.room):
            self._run.reporter.say(said)
        row = EvaluationRow(
            key=key,
            status="done",
            reason="",
            scale=scale.scale,
            arm=arm.name,
            stage=arm.stage,
            method=arm.method,
            options=arm.options,
            benchmark=chosen.name,
            metric=chosen.headline,
            correct=scored.correct,
            others={name: values for name, values in scored.scores.items() if name != chosen.headline},
            emitted=[answer.emitted for answer in scored.answers],
            forwards=[answer.forwards for answer in scored.answers],
            finished=[int(answer.finished) for answer in scored.answers],
            past_stop=[answer.past_stop for answer in scored.answers],
            seconds=round(time.perf_counter() - started, 3),
            max_new_tokens=limit,
            checkpoint=loaded.weights,
            provenance={**origin, **loaded.origin, **packing_in_words()},
            prompt_cut=cuts,
            dtype=_dtype_of(loaded),
            digests=scored.digests,
        )
        share, speed = sum(row.correct) / len(row.correct), sum(row.emitted) / sum(row.forwards)
        self._run.reporter.say(f"{title}: {share:.1%} of {len(row.correct)}, {speed:.2f} tokens/forward")
        return row


class _Rate:
    """How many tokens a second come into a log of answers, counted anew every few seconds."""

    def __init__(self, log: AnswerLog) -> None:
        self._log, self._rate = log, 0.0
        self._counted, self._tokens = time.perf_counter(), self._emitted()

    def now(self) -> float:
        passed = time.perf_counter() - self._counted
        if passed > _COUNT_EVERY_S:
            tokens = self._emitted()
            self._rate = (tokens - self._tokens) / passed
            self._counted, self._tokens = self._counted + passed, tokens
        return self._rate

    def _emitted(self) -> int:
        return sum(answer.emitted for answer in self._log.answers.values())


def _dtype_of(loaded: Loaded) -> str:
    return str(loaded.model.dtype).removeprefix("torch.")


def method_options(arm: Arm) -> dict[str, Any]:
    """Those of an arm's options that are the method's; the others go with every request, or name the draft's stage."""
    return {name: value for name, value in arm.options.items() if name in OPTIONS}


def ask(
    run: Run,
    arm: Arm,
    benchmarks: Sequence[str],
    *,
    checkpoint: str | None = None,
    adapter: str | None = None,
    draft: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Iterator[EvaluationRow]:
    """The rows of one checkpoint on some benchmarks, whoever trained it, as they come.

    Without `checkpoint` (a folder or hub name), the scale's own of the arm's stage, trained now if need be.

    Raises:
        UserError: questions or checkpoints are missing; found out before anything is trained.
    """
    for name in benchmarks:
        run.exam(name)
    with full_disk_explained(run.workspace.runs):
        companion = load_aloud(draft, run.reporter, dtype=dtype, device=default_device()) if draft else None
        loaded, cells = Checkpoints(run).named(checkpoint, adapter, *arm.trained, dtype), Cells(run)
        for name in benchmarks:
            yield cells.cell(arm, loaded, name, companion)
