"""Figure 1: questions answered by the same checkpoint, one token per forward pass and several."""

from __future__ import annotations

from functools import partial
from typing import Any

from marsbench.evaluation.local_data import Unavailable
from marsbench.keys import versions
from marsbench.line import Line
from marsbench.rows.kinds import GenerationRow, Row
from marsbench.running.cells import Cells
from marsbench.running.checkpoints import Checkpoints
from marsbench.running.run import Run, kept, skipped
from marsbench.show import answer, sample_question, token_texts
from marsbench.studies.figure1 import PLAN
from marsbench.training.checkpoints import Loaded
from marsbench.world import modelled_on, test_set
from marsbench.world.difficulty import difficulty


def figure1_rows(run: Run) -> list[Row]:
    """Trainings, then the answers: to one question, and in the world to one of every benchmark."""
    answers = [_row(run, line, question) for question in _questions(run) for line in PLAN.lines]
    return [*Checkpoints(run).trainings(PLAN.stages), *answers]


def _questions(run: Run) -> list[str]:
    """What is asked, in its order, each once."""
    found = [sample_question()]
    if run.scale.world:
        level = difficulty(run.scale.world.difficulty)
        names = [f"mini_{modelled_on(name)}" for name in run.scale.benchmarks]
        found += [test_set(name, 1, level=level)[0].prompt for name in names]
    return list(dict.fromkeys(found))


def _row(run: Run, line: Line, question: str) -> GenerationRow:
    reason, loaded, _ = Checkpoints(run).available(line)
    if loaded is None:
        return skipped(run, GenerationRow, line, question, reason, line.label)
    content = {
        "kind": GenerationRow.kind,
        "method": line.method,
        "options": line.options,
        "question": question,
        "weights": loaded.weights,
        "max_new_tokens": run.scale.max_new_tokens,
        "versions": versions("decoding"),
    }
    try:
        return kept(run, GenerationRow, content, line.label, partial(_answered, run, line, loaded, question))
    except Unavailable as error:
        return skipped(run, GenerationRow, line, question, error.reason, line.label)


def _answered(run: Run, line: Line, loaded: Loaded, question: str) -> dict[str, Any]:
    generation = answer(Cells(run).answering(line, loaded), question, run.scale.max_new_tokens)
    run.reporter.say(f"{line.label}: {generation.tokens_per_forward:.2f} tokens/forward")
    return {
        **line.identity, "question": question, "texts": token_texts(generation.tokens, loaded.tokenizer),
        "settled_by": generation.settled_by, "forwards": generation.forwards, "finish": generation.finish,
        "max_new_tokens": run.scale.max_new_tokens, "checkpoint": loaded.weights,
    }  # fmt: skip
