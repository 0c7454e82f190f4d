"""Figure 1: questions answered by the same checkpoint, one token per forward pass and several."""

from functools import partial
from typing import Any

from marsbench.evaluation.local_data import Unavailable
from marsbench.keys import content_hash, versions
from marsbench.line import Line
from marsbench.provenance import provenance
from marsbench.rows.kinds import GenerationRow, Row
from marsbench.running.cells import Cells
from marsbench.running.checkpoints import Checkpoints
from marsbench.running.run import Run, kept
from marsbench.show import answer, token_texts
from marsbench.studies.figure1 import PLAN, questions
from marsbench.training.checkpoints import Loaded


def figure1_rows(run: Run) -> list[Row]:
    """The answers to one question, and in the world to one of every benchmark."""
    asked = [example.prompt for example in questions(run.scale)]
    return [_row(run, line, question) for question in asked for line in PLAN.lines]


def _row(run: Run, line: Line, question: str) -> GenerationRow:
    reason, loaded, _ = Checkpoints(run).available(line)
    try:
        if loaded is None:
            raise Unavailable(reason)
        content = {
            "kind": GenerationRow.kind, "method": line.method, "options": line.options, "question": question,
            "weights": loaded.weights, "max_new_tokens": run.scale.max_new_tokens, "versions": versions("decoding"),
        }  # fmt: skip
        return kept(run, GenerationRow, content, line.label, partial(_answered, run, line, loaded, question))
    except Unavailable as error:
        run.reporter.say(f"{line.label}: skipped ({error.reason})")
        said: list[Any] = [run.scale.scale, *line.identity.values(), question]
        key = content_hash({"skipped": [GenerationRow.kind, *said, error.reason]})
        return GenerationRow(key, "skipped", error.reason, *said, provenance=provenance(seed=run.seed))


def _answered(run: Run, line: Line, loaded: Loaded, question: str) -> dict[str, Any]:
    generation = answer(Cells(run).answering(line, loaded), question, run.scale.max_new_tokens)
    run.reporter.say(f"{line.label}: {generation.tokens_per_forward:.2f} tokens/forward")
    return {
        **line.identity, "question": question, "texts": token_texts(generation.tokens, loaded.tokenizer),
        "settled_by": generation.settled_by, "forwards": generation.forwards, "finish": generation.finish,
        "max_new_tokens": run.scale.max_new_tokens, "checkpoint": loaded.weights,
    }  # fmt: skip
