"""Where MARS's gain comes from: the class of every token of its answers, and which forward pass settled it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import Any

from marsbench.decoding.generation import Generation, Request
from marsbench.evaluation.benchmarks import fingerprint
from marsbench.evaluation.harness import Exam, cut_in_words, room_for_prompt
from marsbench.evaluation.local_data import Unavailable
from marsbench.keys import versions
from marsbench.racing.questions import prompts_of, token_ids
from marsbench.rows.kinds import Row, TokenClassRow
from marsbench.running.cells import Cells
from marsbench.running.checkpoints import Checkpoints
from marsbench.running.run import Run, kept, skipped
from marsbench.show import token_texts
from marsbench.studies.gains.lines import CLASSED, MEASURED
from marsbench.studies.gains.word_classes import CLASSES, CODE_BENCHMARK, template_words, token_class
from marsbench.training.checkpoints import Loaded
from marsbench.world import modelled_on

QUESTIONS = 100  # of each benchmark, at most


def classed_tokens(run: Run) -> list[Row]:
    """A row per benchmark; skipped ones where the checkpoint or the questions are missing."""
    reason, loaded, _ = Checkpoints(run).available(CLASSED)
    names = run.asked(MEASURED)
    return [_row(run, loaded, name) if loaded else _skipped(run, name, reason) for name in names]


def _row(run: Run, loaded: Loaded, name: str) -> TokenClassRow:
    try:
        return _classified(run, loaded, run.exam(name, QUESTIONS))
    except Unavailable as error:
        return _skipped(run, name, error.reason)


def _skipped(run: Run, name: str, reason: str) -> TokenClassRow:
    return skipped(run, TokenClassRow, CLASSED, name, reason, f"{name}, tokens by class")


def _classified(run: Run, loaded: Loaded, exam: Exam) -> TokenClassRow:
    content = {
        "kind": TokenClassRow.kind,
        "method": CLASSED.method,
        "options": CLASSED.options,
        "benchmark": exam.benchmark.name,
        "tasks": fingerprint(exam.tasks),
        "asked": exam.asked(),
        "weights": loaded.weights,
        "max_new_tokens": run.answer_limit(exam.benchmark.name),
        "batch_size": run.scale.batch_size,
        "versions": versions("decoding", "scoring", "world"),
    }
    title = f"{exam.benchmark.name}, tokens by class"
    return kept(run, TokenClassRow, content, title, partial(_counted, run, loaded, exam, title))


def _counted(run: Run, loaded: Loaded, exam: Exam, title: str) -> dict[str, Any]:
    generations = _decoded(run, loaded, exam, title)
    texts = [token_texts(generation.tokens, loaded.tokenizer) for generation in generations]
    code, template = modelled_on(exam.benchmark.name) == CODE_BENCHMARK, template_words(texts)
    tokens = [
        [CLASSES.index(token_class(text, code=code, template=template)) for text in with_end(answer, generation)]
        for answer, generation in zip(texts, generations, strict=True)
    ]
    found = [places(generation.settled_by) for generation in generations]
    free = sum(place > 0 for of_answer in found for place in of_answer)
    run.reporter.say(f"{title}: {free:,} of {sum(map(len, found)):,} came with another token's forward pass")
    return {
        **CLASSED.identity, "benchmark": exam.benchmark.name, "classes": list(CLASSES), "tokens": tokens,
        "places": found, "template": [] if code else sorted(template), "checkpoint": loaded.weights,
        "max_new_tokens": run.answer_limit(exam.benchmark.name),
    }  # fmt: skip


def _decoded(run: Run, loaded: Loaded, exam: Exam, title: str) -> list[Generation]:
    prompts, limit = prompts_of(exam, loaded.tokenizer), run.answer_limit(exam.benchmark.name)
    room = room_for_prompt(loaded.model, limit)
    asked = token_ids([prompts[number] for number in exam.asked()], loaded.tokenizer, room)
    if said := cut_in_words(exam.benchmark.name, asked.cuts, room):
        run.reporter.say(said)
    answering = Cells(run).answering(CLASSED, loaded)
    with run.reporter.bar(title):
        return answering.decode([Request(prompt, limit, CLASSED.threshold) for prompt in asked.ids])


def with_end(texts: Sequence[str], generation: Generation) -> list[str | None]:
    """The text of every token emitted, None for an EOS."""
    return [*texts, *[None] * (generation.emitted - len(texts))]


def places(settled_by: Sequence[int]) -> list[int]:
    """Each token's place among those that its forward settled, from 0."""
    return [place for _, group in groupby(settled_by) for place, _ in enumerate(group)]
