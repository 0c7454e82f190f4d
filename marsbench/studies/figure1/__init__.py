"""Figure 1: an answer with the tokens of one forward pass shaded together; the page to explore shows it."""

import re

from marsbench.findings.claims import Section
from marsbench.line import Line
from marsbench.presets import Preset
from marsbench.rows.kinds import GenerationRow
from marsbench.running.plans import TablePlan
from marsbench.studies.study import Study, measured_by
from marsbench.world import Example, modelled_on, test_set
from marsbench.world.difficulty import difficulty
from marsbench.world.ifeval import followed

PLAN = TablePlan(
    "1",
    "One answer, and which forward pass settled each of its tokens",
    (
        Line("ar", "one token per forward pass", "mars", "ar"),
        Line("mars", "MARS (B = 4, tau = .95)", "mars", "mars", {"block_size": 4, "threshold": 0.95}),
        Line("verified", "verified MARS (groups of 4)", "mars", "mars-verified", {"block_size": 4, "layout": "groups"}),
    ),
    benchmarks=("gsm8k",),
    questions=1,
    figure=True,
)

_SAID = re.compile(r"answer is \(?(-?\w+)\)?\.")  # how answers of the world close


def questions(scale: Preset) -> list[Example]:
    """What is asked, in its order: one question, and in the world one of every benchmark; each once."""
    found = test_set("mini_gsm8k", 1)
    if scale.world:
        level = difficulty(scale.world.difficulty)
        found += [test_set(f"mini_{modelled_on(name)}", 1, level=level)[0] for name in scale.benchmarks]
    return list({example.prompt: example for example in found}.values())


def is_right(example: Example, said: str) -> bool | None:
    """Whether an answer is right; None for a program that is not the reference: only running it would tell."""
    if "rules" in example.doc:
        return all(followed(example.doc["rules"], said).values())
    if "target" in example.doc:
        closing = _SAID.search(said)
        return closing is not None and closing[1] == example.doc["target"]
    return True if said.strip() == example.response.strip() else None


STUDY = Study(
    asks="what does an answer look like, forward pass by forward pass?",
    section=Section("Figure 1", (1,)),
    plan=PLAN,
    scored=False,
    measure=measured_by("marsbench.studies.figure1.measuring", "figure1_rows"),
    kinds=(GenerationRow,),
    on="explore",
)
