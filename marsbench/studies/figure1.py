"""Figure 1: answers, with the tokens of a forward pass in one shade. The page to explore shows them."""

import re
from functools import partial
from typing import TYPE_CHECKING, Any

from marsbench.findings.claims import Section
from marsbench.line import Line
from marsbench.presets import Preset
from marsbench.rows.kinds import GenerationRow
from marsbench.running.plans import TablePlan
from marsbench.studies.study import Study
from marsbench.world import Example, modelled_on, test_set
from marsbench.world.difficulty import difficulty
from marsbench.world.ifeval import followed

if TYPE_CHECKING:
    from marsbench.running.run import Run
    from marsbench.training.checkpoints import Loaded

PLAN = TablePlan(
    "1",
    "One answer, and which forward pass settled each of its tokens",
    (
        Line("ar", "one token per forward pass", "mars", "ar"),
        Line("mars", "MARS (B = 4, tau = .95)", "mars", "mars", {"window": 4, "threshold": 0.95}),
        Line("verified", "verified MARS (groups of 4)", "mars", "mars-verified", {"window": 4, "layout": "groups"}),
    ),
    benchmarks=("gsm8k",),
    questions=1,
    figure=True,
)

_SAID = re.compile(r"answer is \(?(-?\w+)\)?\.")  # how answers of the world end


def questions(scale: Preset) -> list[Example]:
    """The questions in order: one, and in the world one of every benchmark; no question twice."""
    asked = [*test_set("mini_gsm8k", 1)]
    if scale.world:
        level = difficulty(scale.world.difficulty)
        asked += [test_set(f"mini_{modelled_on(name)}", 1, level=level)[0] for name in scale.benchmarks]
    return list({example.prompt: example for example in asked}.values())


def is_right(example: Example, said: str) -> bool | None:
    """Whether an answer is right; None for a program that differs from the reference, because it is not run."""
    if "rules" in example.doc:
        return all(followed(example.doc["rules"], said).values())
    if "target" in example.doc:
        closing = _SAID.search(said)
        return closing is not None and closing[1] == example.doc["target"]
    return True if said.strip() == example.response.strip() else None


def _row(run: "Run", line: Line, question: str) -> GenerationRow:
    from marsbench.evaluation.local_data import Unavailable
    from marsbench.keys import content_hash, versions
    from marsbench.provenance import provenance
    from marsbench.running.checkpoints import Checkpoints
    from marsbench.running.run import made_once

    try:
        (loaded,) = Checkpoints(run).of_line(line)
        content = {
            "kind": GenerationRow.kind, "method": line.method, "options": line.options, "question": question,
            "weights": loaded.weights, "max_new_tokens": run.scale.max_new_tokens, "versions": versions("decoding"),
        }  # fmt: skip
        return made_once(run, GenerationRow, content, partial(_answered, run, line, loaded, question))
    except Unavailable as error:
        run.reporter.say(f"{line.label}: skipped ({error.reason})")
        said: list[Any] = [run.scale.scale, *line.row_fields.values(), question]
        key = content_hash({"skipped": [GenerationRow.kind, *said, error.reason]})
        return GenerationRow(key, "skipped", error.reason, *said, provenance=provenance(seed=run.seed))


def _answered(run: "Run", line: Line, loaded: "Loaded", question: str) -> dict[str, Any]:
    from marsbench.running.cells import CellRunner
    from marsbench.show import answer, token_texts

    generation = answer(CellRunner(run).answering(line, loaded), question, run.scale.max_new_tokens)
    run.reporter.say(f"{line.label}: {generation.tokens_per_forward:.2f} tokens/forward")
    return {
        **line.row_fields, "question": question, "texts": token_texts(generation.tokens, loaded.tokenizer),
        "settled_by": generation.settled_by, "forwards": generation.forwards, "finish": generation.finish,
        "max_new_tokens": run.scale.max_new_tokens, "checkpoint": loaded.weights,
    }  # fmt: skip


STUDY = Study(
    asks="what does an answer look like, forward pass by forward pass?",
    section=Section("Figure 1", (1,)),
    plan=PLAN,
    scored=False,
    measure=lambda run: [_row(run, line, each.prompt) for each in questions(run.scale) for line in PLAN.lines],
    kinds=(GenerationRow,),
    on="explore",
)
