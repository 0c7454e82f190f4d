"""Figure 1: one question answered by the same checkpoint, one token per forward pass and several."""

from __future__ import annotations

from marsbench.evaluation.local_data import Unavailable
from marsbench.provenance import provenance
from marsbench.show import answer, sample_question, token_texts
from marsbench.sweeps.plans import TABLES, Arm
from marsbench.sweeps.rows import GenerationRow, Row
from marsbench.sweeps.runner import Runner, content_hash, explained, source_hash
from marsbench.training.checkpoints import Loaded

PLAN = TABLES["figure1"]


def figure1_rows(runner: Runner) -> list[Row]:
    """The trainings that the figure needs, then one answer per line."""
    return [*runner.trainings(PLAN), *[_row(runner, arm, sample_question()) for arm in PLAN.arms]]


def _row(runner: Runner, arm: Arm, question: str) -> GenerationRow:
    """One line's answer, or why there is none."""
    reason, loaded = runner.available(arm.trained)
    if loaded is None:
        return _skipped(runner, arm, question, reason)
    try:
        return _answered(runner, arm, loaded, question)
    except Unavailable as error:
        return _skipped(runner, arm, question, explained(error))


def _skipped(runner: Runner, arm: Arm, question: str, reason: str) -> GenerationRow:
    runner.reporter.say(f"{arm.label}: skipped ({reason})")
    identity = runner.scale.scale, arm.name, arm.stage, arm.method, arm.options, question
    key = content_hash({"skipped": [*identity, reason]})
    return GenerationRow(key, "skipped", reason, *identity, provenance=provenance(seed=runner.seed))


def _answered(runner: Runner, arm: Arm, loaded: Loaded, question: str) -> GenerationRow:
    content = {
        "kind": GenerationRow.kind,
        "method": arm.method,
        "options": arm.options,
        "question": question,
        "weights": loaded.weights,
        "max_new_tokens": runner.scale.max_new_tokens,
        "source": source_hash("decoding", "methods"),
    }
    key = content_hash(content)
    known = runner.existing_row(key, GenerationRow, arm.label)
    if known is not None:
        return known
    generation = answer(
        loaded,
        runner.method(arm, loaded),
        question,
        threshold=arm.options.get("threshold"),
        max_new_tokens=runner.scale.max_new_tokens,
    )
    row = GenerationRow(
        key=key,
        status="done",
        reason="",
        scale=runner.scale.scale,
        arm=arm.name,
        stage=arm.stage,
        method=arm.method,
        options=arm.options,
        question=question,
        texts=token_texts(generation.tokens, loaded.tokenizer),
        settled_by=generation.settled_by,
        forwards=generation.forwards,
        finish=generation.finish,
        max_new_tokens=runner.scale.max_new_tokens,
        checkpoint=loaded.weights,
        provenance=provenance(seed=runner.seed),
    )
    runner.keep(row)
    runner.reporter.say(f"{arm.label}: {generation.tokens_per_forward:.2f} tokens/forward")
    return row
