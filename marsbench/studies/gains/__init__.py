"""Where the gain comes from: what the paper did not test.

MARS against other ways to several tokens per forward pass at equal accuracy, and which of its tokens come for free.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from marsbench.findings.between_lines import as_accurate, emits_more, more_accurate
from marsbench.findings.cells import Cells, columns, latest_cells
from marsbench.findings.claims import Claim
from marsbench.findings.in_words import plus_minus, with_interval
from marsbench.findings.sweep import ALLOWED_LOSS
from marsbench.rendering.figures import speed_figure
from marsbench.rendering.markdown import filled, table
from marsbench.rendering.measured import HOW_TO_READ_ACCURACY, accuracy_table, speed_table
from marsbench.rendering.page import TablePage
from marsbench.rows.kinds import EvaluationRow, Row
from marsbench.running.plans import TablePlan
from marsbench.statistics.intervals import paired_difference, speed_difference
from marsbench.studies.gains import free_tokens
from marsbench.studies.gains.lines import (
    ADAPTED,
    AR_OF_MARS,
    CHOSEN,
    HEADED,
    MEASURED,
    PLAN,
    cross_fitted,
    fastest_within,
    to_choose_from,
    with_choice,
)
from marsbench.studies.lines import AR_SFT, THRESHOLDS
from marsbench.studies.study import measured_by, table_study

VERIFIED = {"verified_groups": "groups", "verified_linear": "linear"}
RIVALS = {
    "medusa_hard_1": "Medusa with a chain",
    "medusa_hard_3": "Medusa with a tree",
    "ar_sft_by_draft_ar_sft": "speculative decoding",
    "lookup": "prompt lookup",
    "jacobi_of_mars": "Jacobi decoding",
}

HOW_LINES_COMPARE = (
    "Lines with tau accept tokens from the left while their confidence reaches tau, and may lose accuracy by it. All "
    "others are lossless: they emit the very tokens of AR decoding of their own checkpoint, as the page of the engine "
    "checks, so their accuracy is AR decoding's by construction. Lines called MARS share one checkpoint. Medusa's "
    "heads sit on the frozen AR SFT model, which also is the target of speculative decoding, and what an adapter "
    "drafts for. They are trained at the gentle rate of the tables and at the adapter's, at which they draft better: "
    "claims and figure take the better ones."
)


def _costs(cells: Cells, plan: TablePlan) -> str:
    lines = {line.name: line for line in PLAN.lines}
    groups, linear = (int(lines[name].options["block_size"]) for name in VERIFIED)
    drafted = lines["ar_sft_by_draft_ar_sft"].options["draft_length"]
    return (
        "**Tokens per forward pass is not speed.** It counts the forward passes of the model that answers, whatever "
        f"they cover. A round of speculative decoding also costs up to {drafted} forward passes of a second, smaller "
        "model (its size stands under Training), which the other lines do without. A forward pass of verified MARS "
        f"covers up to {groups**2} positions in `groups` and {2 * linear - 1} in `linear`, of AR decoding 1. What that "
        "comes to in tokens per second, the page of speed says."
    )


def _chosen(rows: Sequence[Row]) -> str:
    head = ["", "tau, by all", "tokens/forward", "tau, by even", "tau, by odd", "tokens/forward on other questions"]
    head += ["points lost there [95 %]", *[f"verified {layout} minus it [95 %]" for layout in VERIFIED.values()]]
    lines, cells = [], latest_cells(rows)
    for benchmark, column in columns(PLAN).items():
        lines.append([column, *(_chosen_line(cells, benchmark) or ["not run"] * (len(head) - 1))])
    how = {"loss": f"{ALLOWED_LOSS:g}", "thresholds": str(len(THRESHOLDS)), "line": CHOSEN.label}
    return "".join(filled(__package__, "chosen.md", {**how, "chosen": table(head, lines)}))


def _chosen_line(cells: Cells, benchmark: str) -> list[str]:
    if not (rows := to_choose_from(cells, benchmark)):
        return []
    held_out, settings = cells[CHOSEN.name, benchmark], [row.answers for row in rows]
    by_all = fastest_within(settings, ALLOWED_LOSS, range(len(held_out.correct)))
    chosen = by_all, *cross_fitted(settings, ALLOWED_LOSS)[1:]
    of_all, of_even, of_odd = (f"{THRESHOLDS[place - 1]:g}" if place else "one token" for place in chosen)
    lost = paired_difference({benchmark: rows[0].correct}, {benchmark: held_out.correct})
    return [
        of_all,
        plus_minus(rows[by_all].tokens_per_forward, 2),
        of_even,
        of_odd,
        plus_minus(held_out.tokens_per_forward, 2),
        with_interval(lost, 1, signed=True),
        *[_faster(cells.get((name, benchmark)), held_out) for name in VERIFIED],
    ]


def _faster(row: EvaluationRow | None, other: EvaluationRow) -> str:
    """How many more tokens per forward pass a line emits than another on one benchmark."""
    if row is None or row.status != "done":
        return "not run" if row is None else row.status
    if len(row.emitted) != len(other.emitted):
        return "not comparable"
    return with_interval(speed_difference(row.answers, other.answers), 2, signed=True)


_SHOWN = (CHOSEN.name, *VERIFIED, *RIVALS, ADAPTED.name, HEADED.name)
_LOSSLESS = {  # line -> AR decoding of its own checkpoint
    **dict.fromkeys(VERIFIED, AR_OF_MARS),
    **dict.fromkeys(("medusa_hard_3", "ar_sft_by_draft_ar_sft"), AR_SFT.name),
}


def _all_claims() -> Iterator[Claim]:
    for letter, (verified, layout) in zip("ab", VERIFIED.items(), strict=True):
        for rival, words in RIVALS.items():
            text = f"Verified MARS ({layout}) emits more tokens per forward pass than {words}"
            yield emits_more(PLAN, verified, rival, letter, text, f"{verified}-{rival}")
    for verified, layout in VERIFIED.items():
        text = f"Verified MARS ({layout}) emits more tokens per forward pass than MARS that may lose accuracy"
        yield emits_more(PLAN, verified, CHOSEN.name, "c", text, f"{verified}-chosen")
    text = f"A tau chosen on other questions loses at most {ALLOWED_LOSS:g} point"
    yield more_accurate(PLAN, CHOSEN.name, AR_OF_MARS, "d", text, "chosen-loses", margin=ALLOWED_LOSS)
    for name, reference in _LOSSLESS.items():
        words = f"verified MARS ({VERIFIED[name]})" if name in VERIFIED else RIVALS[name]
        text = f"{words[0].upper()}{words[1:]} is as accurate as AR decoding"
        yield more_accurate(PLAN, name, reference, "e", text, margin=ALLOWED_LOSS, check=True)
    for rival in ("medusa_hard_3", "ar_sft_by_draft_ar_sft", "lookup"):
        text = f"An adapter with a draft head emits more tokens per forward pass than {RIVALS[rival]}"
        yield emits_more(PLAN, HEADED.name, rival, "g", text, f"headed-{rival}")
    text = "The two checkpoints are about as accurate, so that their lossless lines compare"
    yield as_accurate(PLAN, AR_OF_MARS, AR_SFT.name, "f", text, "compare")


CLAIMS = tuple(replace(claim, prepared=with_choice) for claim in _all_claims())


def _draw(cells: Cells, plan: TablePlan, path_stem: Path) -> list[Path]:
    return speed_figure(
        cells, replace(plan, lines=tuple(line for line in plan.lines if line.name in _SHOWN)), path_stem
    )


PAGE = TablePage(
    plan=PLAN,
    opening=(
        "MARS, verified and with a threshold, against other ways to emit several tokens per forward pass, all of them "
        "decoded greedily and scored by one program; and which kinds of tokens MARS emits together."
    ),
    claims=CLAIMS,
    answers=(
        *("verified_groups-chosen", "verified_groups-medusa_hard_3", "headed-ar_sft_by_draft_ar_sft"),
        *("chosen-loses", "compare"),
    ),
    lines=(AR_SFT.name, AR_OF_MARS, *_SHOWN),
    figure="speed",
    caption="Tokens per forward pass per benchmark and line, with 95 % intervals",
    drawing=_draw,
    reading=f"{HOW_TO_READ_ACCURACY} {HOW_LINES_COMPARE}",
    tables=(accuracy_table, speed_table, _costs),
    prepared=with_choice,
    more=(_chosen, free_tokens.section),
)


STUDY = table_study(
    PAGE,
    name="Gains",
    asks="where does the gain come from, and what is left of it at equal accuracy?",
    place=2,
    plan=MEASURED,
    measure=measured_by("marsbench.studies.gains.measuring", "classed_tokens"),
)
