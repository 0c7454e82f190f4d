"""Breaks: where answers of MARS with a threshold first differ from those at one token per forward pass."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from marsbench.findings.cells import latest_cells
from marsbench.findings.seeds import BySeed
from marsbench.line import Line
from marsbench.rendering.markdown import table
from marsbench.rows.kinds import BreakRow, Row
from marsbench.running.plans import TablePlan
from marsbench.statistics.intervals import mcnemar
from marsbench.studies import longer
from marsbench.studies.lines import short
from marsbench.studies.study import Study

if TYPE_CHECKING:
    from marsbench.decoding.generation import Generation
    from marsbench.running.run import Run

_, _ONE, *_SEVERAL = longer.PLAN.lines  # of one checkpoint: at one token per forward pass, and with thresholds
PLAN = TablePlan("breaks", "Which tokens change", (_ONE, *_SEVERAL), own="Breaks")
_REACH = 3  # how far behind the first mask the last one stands, at B = 4
KINDS = WORDS, DIGITS, MARKS, END = "words", "digits", "marks", "end of the answer"
PLACES = LATER, EARLIER, ELSEWHERE = "stands later", "stands earlier", "stands in neither"


def kind_of(text: str) -> str:
    """What a token is by its text: (part of) a word or number, or a mark, such as a full stop or a line's end."""
    said = text.strip()
    return DIGITS if said.isdigit() else WORDS if said.isalpha() else MARKS


def compared(one: "Generation", several: "Generation", kind: Callable[[int], str]) -> tuple[Counter[str], str, str]:
    """Accepted drafts by kind; the first changed token's kind; and where near it `one` has what `several` emits there.

    A draft is a token that is not the first of its forward pass. Both strings are empty where the answers are alike.
    """
    expected, emitted = ([*each.tokens, *([] if each.eos_id is None else [each.eos_id])] for each in (one, several))
    settled = zip(several.settled_by[1:], several.settled_by, strict=False)
    drafts = Counter(kind(token) for token, (now, before) in zip(emitted[1:], settled, strict=True) if now == before)
    pairs = enumerate(zip(expected, emitted, strict=False))
    place, token = next(((place, token) for place, (other, token) in pairs if other != token), (None, 0))
    if place is None:
        return drafts, "", ""
    later, earlier = expected[place + 1 :][:_REACH], expected[max(place - _REACH, 0) : place]
    return drafts, kind(expected[place]), LATER if token in later else EARLIER if token in earlier else ELSEWHERE


def _measured(run: "Run") -> list[Row]:
    from marsbench.decoding.generation import Request
    from marsbench.keys import versions
    from marsbench.running.cells import CellRunner
    from marsbench.running.checkpoints import Checkpoints
    from marsbench.running.run import made_once
    from marsbench.training.data import chat_prompt

    (loaded,) = Checkpoints(run).of_line(_ONE)
    tokenizer: Any = loaded.tokenizer
    kind = cache(lambda token: END if token == tokenizer.eos_token_id else kind_of(tokenizer.decode([token])))

    @cache
    def answers(of: str, name: str) -> "list[Generation]":
        line, exam = PLAN.line(of), run.exam(name)
        docs = [exam.tasks[task].eval_docs[place] for task, places in exam.places.items() for place in places]
        prompts = tokenizer([chat_prompt(tokenizer, doc["prompt"]) for doc in docs], add_special_tokens=False).input_ids
        requests = [Request(ids, run.answer_limit(name), line.threshold) for ids in prompts]
        return CellRunner(run).answering(line, loaded).decode_all(requests, run.reporter, f"{line.label}, {name}")

    def made(line: Line, name: str) -> dict[str, Any]:
        pairs = zip(answers(_ONE.name, name), answers(line.name, name), strict=True)
        drafts, changed, near = zip(*[compared(one, several, kind) for one, several in pairs], strict=True)
        of_kind = {kind: [counts[kind] for counts in drafts] for kind in KINDS}
        where = {"benchmark": name, "checkpoint": loaded.weights}
        return {**line.row_fields, **where, "drafts": of_kind, "changed": list(changed), "near": list(near)}

    def row(line: Line, name: str) -> Row:
        content = {
            "kind": BreakRow.kind, "weights": loaded.weights, "options": line.options, "limit": run.questions(None),
            "tasks": run.exam(name).fingerprint, "max_new_tokens": run.answer_limit(name),
            "versions": versions("decoding", "world"),
        }  # fmt: skip
        return made_once(run, BreakRow, content, partial(made, line, name))

    return [row(line, name) for name in run.benchmarks_of(PLAN) for line in _SEVERAL]


_COLUMNS = {  # slot of the layout, for the paper's threshold -> head of the table
    "asked": "answers", "changed": "changed", "lost": "now wrong", "won": "now right",
    "later": "later", "earlier": "earlier", "elsewhere": "elsewhere",
    "changed_words": "words", "changed_digits": "digits", "changed_marks": "punctuation", "changed_end": "end",
}  # fmt: skip


def _flips(line: Line, seeds: BySeed) -> list[int]:
    """How many right answers become wrong, and how many wrong ones right."""
    cells = [latest_cells(rows) for rows in seeds.values()]
    pairs = [(of[_ONE.name, name], row) for of in cells for (arm, name), row in of.items() if arm == line.name]
    flips = [mcnemar(one.correct, row.correct)[:2] for one, row in pairs if one.correct and row.correct]
    return [sum(counts) for counts in zip(*flips, strict=True)] or [0, 0]


def _slots(rows: Sequence[Row], scale: str, seeds: BySeed) -> dict[str, str]:
    every = [row for of_seed in seeds.values() for row in of_seed if isinstance(row, BreakRow)]
    lines = dict[str, list[str]]()
    for line in _SEVERAL if every else ():
        words, of_line = f"tau = {short(line.options['threshold'])}", [row for row in every if row.arm == line.name]
        kinds = Counter(kind for row in of_line for kind in row.changed)
        near = Counter(place for row in of_line for place in row.near)
        drafts = {kind: sum(sum(row.drafts[kind]) for row in of_line) for kind in KINDS}
        counts = near.total(), near.total() - near[""], *_flips(line, seeds), *[near[place] for place in PLACES]
        rates = [f"{1000 * kinds[kind] / max(drafts[kind], 1):.1f}" for kind in KINDS]
        lines[words] = [*[f"{count:,}" for count in counts], *rates]
    return {
        **dict(zip(_COLUMNS, lines.get("tau = .95", [""] * len(_COLUMNS)), strict=True)),
        "table": table(["", *list(_COLUMNS.values())[1:]], [[words, *numbers[1:]] for words, numbers in lines.items()]),
    }


STUDY = Study(
    asks="which tokens does a threshold change?",
    order=4,
    on="table8",
    plan=PLAN,
    measure=_measured,
    kinds=(BreakRow,),
    in_world=True,
    slots=_slots,
)
