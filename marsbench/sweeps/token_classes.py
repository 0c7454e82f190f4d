"""Where MARS's gain comes from: the class of every token of its answers, and which forward pass settled it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from marsbench.decoding.engine import context_length, decode
from marsbench.decoding.generation import Generation, Request
from marsbench.evaluation.benchmarks import fingerprint
from marsbench.evaluation.harness import Exam
from marsbench.evaluation.local_data import Unavailable
from marsbench.methods.fitting import default_ids
from marsbench.provenance import provenance
from marsbench.show import token_texts
from marsbench.sweeps.plans import TABLES, mars_name
from marsbench.sweeps.questions import prompts_of, token_ids
from marsbench.sweeps.rows import Row, TokenClassRow
from marsbench.sweeps.runner import Runner, content_hash, explained, source_hash
from marsbench.sweeps.word_classes import CLASSES, CODE_BENCHMARK, template_words, token_class
from marsbench.training.checkpoints import Loaded

PLAN = TABLES["gains"]
ARM = next(arm for arm in PLAN.arms if arm.name == mars_name("mars", 4, 0.95))
QUESTIONS = 100  # of each benchmark, at most


def gains_rows(runner: Runner) -> list[Row]:
    """The rows of the page's table, then the tokens of one line by class; these are not shared out among shards."""
    rows = runner.table(PLAN)
    if runner.shard != (1, 1):
        return rows
    names = runner.asked(PLAN)
    reason, loaded = runner.available(ARM.trained)
    if loaded is None:
        return [*rows, *[_skipped(runner, name, reason) for name in names]]
    return [*rows, *[_row(runner, loaded, name) for name in names]]


def _row(runner: Runner, loaded: Loaded, name: str) -> TokenClassRow:
    """One benchmark, or why there is nothing on it."""
    try:
        return _classified(runner, loaded, runner.exam(name, QUESTIONS))
    except Unavailable as error:
        return _skipped(runner, name, explained(error))


def _skipped(runner: Runner, name: str, reason: str) -> TokenClassRow:
    runner.reporter.say(f"{name}, tokens by class: skipped ({reason})")
    identity = runner.scale.scale, ARM.name, ARM.stage, ARM.method, ARM.options, name
    key = content_hash({"skipped": [TokenClassRow.kind, *identity, reason]})
    return TokenClassRow(key, "skipped", reason, *identity, provenance=provenance(seed=runner.seed))


def _classified(runner: Runner, loaded: Loaded, exam: Exam) -> TokenClassRow:
    content = {
        "kind": TokenClassRow.kind,
        "method": ARM.method,
        "options": ARM.options,
        "benchmark": exam.benchmark.name,
        "tasks": fingerprint(exam.tasks),
        "asked": exam.asked(),
        "weights": loaded.weights,
        "max_new_tokens": runner.scale.max_new_tokens,
        "batch_size": runner.scale.batch_size,
        "source": source_hash("decoding", "methods", "evaluation", "world", "sweeps/word_classes.py"),
    }
    key, title = content_hash(content), f"{exam.benchmark.name}, tokens by class"
    known = runner.existing_row(key, TokenClassRow, title)
    if known is not None:
        return known
    origin = provenance(seed=runner.seed)
    generations = _decoded(runner, loaded, exam, title)
    texts = [token_texts(generation.tokens, loaded.tokenizer) for generation in generations]
    code, template = exam.benchmark.name.removeprefix("mini_") == CODE_BENCHMARK, template_words(texts)
    row = TokenClassRow(
        key=key,
        status="done",
        reason="",
        scale=runner.scale.scale,
        arm=ARM.name,
        stage=ARM.stage,
        method=ARM.method,
        options=ARM.options,
        benchmark=exam.benchmark.name,
        classes=list(CLASSES),
        tokens=[
            [CLASSES.index(token_class(text, code=code, template=template)) for text in with_end(one, generation)]
            for one, generation in zip(texts, generations, strict=True)
        ],
        places=[places(generation.settled_by) for generation in generations],
        template=[] if code else sorted(template),
        max_new_tokens=runner.scale.max_new_tokens,
        checkpoint=loaded.weights,
        provenance=origin,
    )
    runner.keep(row)
    free = sum(place > 0 for found in row.places for place in found)
    tokens = sum(map(len, row.places))
    runner.reporter.say(f"{title}: {free:,} of {tokens:,} came with another token's forward pass")
    return row


def _decoded(runner: Runner, loaded: Loaded, exam: Exam, title: str) -> list[Generation]:
    """The answers to an exam's questions, in their order."""
    prompts, limit = prompts_of(exam, loaded.tokenizer), runner.scale.max_new_tokens
    room = context_length(loaded.model) - limit
    ids = token_ids([prompts[number] for number in exam.asked()], loaded.tokenizer, room)
    eos_id, pad_id = default_ids(loaded, None, None)
    with runner.reporter.bar(title):
        return decode(
            loaded.model,
            runner.method(ARM, loaded),
            [Request(prompt, limit, ARM.options["threshold"]) for prompt in ids],
            eos_id=eos_id,
            pad_id=pad_id,
            batch_size=runner.scale.batch_size,
        )


def with_end(texts: Sequence[str], generation: Generation) -> list[str | None]:
    """The text of every token emitted, None for an EOS."""
    return [*texts, *[None] * (generation.emitted - len(texts))]


def places(settled_by: Sequence[int]) -> list[int]:
    """Each token's place among those that its forward settled, from 0."""
    return [place for _, group in groupby(settled_by) for place, _ in enumerate(group)]
