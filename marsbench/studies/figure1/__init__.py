"""Figure 1: an answer with the tokens of one forward pass shaded together, one token per forward pass and several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from marsbench.findings.between_lines import label
from marsbench.findings.cells import why_none
from marsbench.findings.claims import Section
from marsbench.findings.seeds import BySeed
from marsbench.line import Line
from marsbench.rendering.figures import drawn_alike, save
from marsbench.rendering.markdown import paragraphs, table
from marsbench.rendering.page import laid_out
from marsbench.rows.kinds import GenerationRow, Row
from marsbench.running.plans import TablePlan
from marsbench.show import Shown, drawing, merged, shaded
from marsbench.studies.study import Study, measured_by

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
FIGURE = "figures/figure1_answers"  # beside the page, less the extension


def slots(rows: Sequence[Row], scale: str, seeds: BySeed) -> dict[str, str]:
    answers = _answers(rows)
    done = {name: row for name, row in answers.items() if row.status == "done"}
    return {
        "counts": _counts(answers),
        "question": paragraphs(*map(_fenced, dict.fromkeys(row.question for row in answers.values()))),
        **{line.name: _text(done[line.name]) if line.name in done else "" for line in PLAN.lines},
    }


def draw(rows: Sequence[Row], reports_dir: Path) -> list[Path]:
    done = [_shown(row) for row in _answers(rows).values() if row.status == "done"]
    with drawn_alike():
        return save(drawing(done), reports_dir / FIGURE)


def _answers(rows: Sequence[Row]) -> dict[str, GenerationRow]:
    """Line -> its answer to the first question; the page to explore has those to the others."""
    given = [row for row in rows if isinstance(row, GenerationRow)]
    found = {row.arm: row for row in given if row.question == given[0].question}
    return {line.name: found[line.name] for line in PLAN.lines if line.name in found}


def _counts(answers: dict[str, GenerationRow]) -> str:
    lines = []
    for line in PLAN.lines:
        row = answers.get(line.name)
        if row is None or row.status != "done":
            lines.append([line.label, why_none(row), "", ""])
        else:
            tokens = len(row.settled_by)
            lines.append([line.label, str(tokens), str(row.forwards), f"{tokens / row.forwards:.2f}"])
    return table(["", "tokens", "forward passes", "tokens/forward"], lines)


def _text(row: GenerationRow) -> str:
    note = "A bar parts forward passes." + ("" if row.finish == "eos" else " The answer was cut at the token limit.")
    return paragraphs(f"## {_label(row)}", note, _fenced(shaded(_shown(row), color=False).plain))


def _shown(row: GenerationRow) -> Shown:
    return merged(_label(row), row.texts, row.settled_by, row.forwards)


def _label(row: GenerationRow) -> str:
    words = label(PLAN, row.arm)
    return f"{words[0].upper()}{words[1:]}"


def _fenced(text: str) -> str:
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}text\n{text}\n{fence}"


STUDY = Study(
    key="figure1",
    name="Figure 1",
    asks="what does an answer look like, forward pass by forward pass?",
    section=Section("Figure 1", (1,)),
    plan=PLAN,
    scored=False,
    measure=measured_by("marsbench.studies.figure1.measuring", "figure1_rows"),
    sections=laid_out(__package__, slots, PLAN),
    figures=draw,
)
