"""MARS itself on a real model: SmolLM2-135M fine-tuned on a GPU, asked 1,205 prompts at one token, tau and verified."""

from collections.abc import Mapping, Sequence
from functools import partial

from marsbench.findings.between_lines import more_accurate
from marsbench.findings.cells import BENCHMARKS, done_cells, latest_cells, same_answers
from marsbench.findings.claims import TOKENS, Claim, Measured
from marsbench.findings.in_words import p_value, plus_minus
from marsbench.findings.seeds import BySeed
from marsbench.line import Line
from marsbench.paper import published
from marsbench.rendering.markdown import paragraphs, table
from marsbench.rendering.sections import facts_section
from marsbench.rows.kinds import EvaluationRow, Row, TrainingRow
from marsbench.running.plans import TablePlan
from marsbench.statistics.decisions import Bound
from marsbench.statistics.intervals import Estimate, mcnemar, ratio_of_totals
from marsbench.studies.study import Study

BASE, ONE, SURE, UNSURE, VERIFIED = "gpu_base", "gpu_mars_one", "gpu_mars_0.95", "gpu_mars_0.8", "gpu_mars_verified"
ASKED = {name: BENCHMARKS[name] for name in ("ifeval", "gsm8k", "humaneval")}
_MARS = "base_mars"  # the stage
_LINES = (
    Line(BASE, "base, AR decoding", "base", "ar"),
    Line(ONE, "MARS, one token", _MARS, "ar"),
    Line(SURE, "MARS, tau = .95", _MARS, "mars", {"block_size": 4, "threshold": 0.95}),
    Line(UNSURE, "MARS, tau = .8", _MARS, "mars", {"block_size": 4, "threshold": 0.8}),
    Line(VERIFIED, "MARS, verified (groups, W = 4)", _MARS, "mars-verified", {"block_size": 4, "layout": "groups"}),
)
LINES = {line.name: line.label for line in _LINES}
PLAN = TablePlan("gpu", "MARS on a real model", _LINES, (*ASKED,), own="MARS on a real model")
Done = Mapping[str, EvaluationRow]  # benchmark -> the row of a line


def cells_of(rows: Sequence[Row]) -> dict[str, Done]:
    cells = latest_cells(rows)
    return {name: done for name in LINES if (done := done_cells(cells, name))}


def emitted(done: Done, *, ended: bool = False) -> Estimate:
    """Tokens per forward pass over all prompts together, or over those whose answer ends by EOS."""
    answers = [answer for row in done.values() for answer in zip(row.emitted, row.forwards, row.finished, strict=True)]
    pairs = [(tokens, forwards) for tokens, forwards, whole in answers if whole or not ended]
    return ratio_of_totals(*map(list, zip(*pairs, strict=True)))


def _emits(rows: Sequence[Row], name: str) -> Measured:
    cells = cells_of(rows)
    return Measured(emitted(cells[name]), tuple(cells[name]), len(ASKED)) if name in cells else Measured()


def _published(scale: str, metric: str, benchmark: str) -> float | None:
    """Of the paper's tau = .95 at B = 4: tokens per forward pass, or points of accuracy over one token."""
    sure = published("4", scale=scale, benchmark=benchmark, metric=metric, block_size=4)
    at_one = published("2", scale=scale, benchmark=benchmark, metric=metric, method="mars")
    return sure[0].value - sum(row.value for row in at_one) if sure else None


_tokens = partial(Claim, bound=Bound(), unit=TOKENS)
_gained = partial(more_accurate, PLAN, only=("ifeval",))  # the others are too hard for such a model
LOST = _gained(ONE, BASE, "", "lost")
CLAIMS = (
    _tokens(
        name="real-tokens", text="On a real model, MARS at tau = .95 emits at least 1.2 tokens per forward pass",
        measure=partial(_emits, name=SURE), bound=Bound(low=1.2),
        published=partial(_published, metric="tokens_per_forward", benchmark="average"),
        beside=(
            ("tau = .8", _tokens(measure=partial(_emits, name=UNSURE))),
            ("verified", _tokens(measure=partial(_emits, name=VERIFIED))),
        ),
    ),
    _gained(
        SURE, ONE, "On a real model, tau = .95 costs less than 2 points of IFEval against one token", "real-cost",
        bound=Bound(low=-2.0), published=partial(_published, metric="accuracy", benchmark="ifeval"),
        beside=(("tau = .8", _gained(UNSURE, ONE)),),
    ),
)  # fmt: skip


def _slots(rows: Sequence[Row], scale: str, seeds: BySeed) -> dict[str, str]:
    cells = cells_of(rows)
    pairs = {"base": (ONE, BASE), "sure": (SURE, ONE), "unsure": (UNSURE, ONE), "verified": (VERIFIED, ONE)}
    return {
        **{f"same_{slot}": _same(cells, *pair) for slot, pair in pairs.items()},
        **{f"flips_{slot}": _flips(cells, *pair) for slot, pair in pairs.items()},
        "table": _table(cells),
        "facts": facts_section(rows, "see the commands below"),
        "made": _made(rows),
    }


def _same(cells: Mapping[str, Done], name: str, other: str) -> str:
    return "{:,} of {:,}".format(*same_answers(cells[name], cells[other])) if {name, other} <= cells.keys() else ""


def _flips(cells: Mapping[str, Done], name: str, other: str) -> str:
    if not {name, other} <= cells.keys():
        return ""
    only, others, p = mcnemar(*(cells[line]["ifeval"].correct for line in (name, other)))
    return f"{only} questions right only here, {others} only there (McNemar's p {p_value(p)})"


def _table(cells: Mapping[str, Done]) -> str:
    counts = {name: len(row.correct) for name, row in next(iter(cells.values()), {}).items()}
    lines = [["prompts", str(sum(counts.values())), *[str(counts.get(name, "")) for name in ASKED], *[""] * 5]]
    for line, done in cells.items():
        each = [f"{done[name].tokens_per_forward.value:.2f}" for name in ASKED]
        right = [plus_minus(done[name].accuracy.times(100), 1) for name in ASKED]
        ending = f"{emitted(done, ended=True).value:.2f}"
        lines.append([LINES[line], f"{emitted(done).value:.2f}", *each, ending, *right, _same(cells, line, ONE)])
    head = ["", "tokens/forward", *ASKED.values(), "answers that end by EOS", *[f"{of}, %" for of in ASKED.values()]]
    return table([*head, "answers as MARS at one token"], lines)


def _made(rows: Sequence[Row]) -> str:
    if (trained := next((row for row in rows if isinstance(row, TrainingRow)), None)) is None:
        return ""
    steps = "\n".join(f"{place}. {step}" for place, step in enumerate(trained.provenance.get("made", ()), 1))
    typed = dict.fromkeys(str(row.provenance["command"]) for row in rows if isinstance(row, EvaluationRow))
    said = (
        f"MARS, B = {trained.block_size}: {trained.steps} steps, {trained.tokens:,} tokens, {trained.seconds:.0f} s, "
        f"{trained.parameters:,} parameters. The answers: {'; '.join(typed)}."
    )
    return paragraphs("## How the checkpoint was made", steps, said)


STUDY = Study(
    key="gpu",
    name="MARS on a real model",
    asks="what do a threshold and verified decoding give and cost on a real model?",
    order=6,
    on="real-model",
    leads=True,
    also=(PLAN,),
    layout="mars_on_gpu/page.md",
    slots=_slots,
    claims=CLAIMS,
    prose_claims=(LOST,),
)
