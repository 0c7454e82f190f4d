"""The page of the regime: each criterion with what was measured, and the trials behind a scale's settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from statistics import fmean
from typing import Any

import yaml

from marsbench.findings.cells import BENCHMARKS, latest_cells
from marsbench.findings.claims import Claim
from marsbench.findings.in_words import one_line
from marsbench.findings.seeds import BySeed
from marsbench.rendering.claims import held_against
from marsbench.rendering.markdown import folded, paragraphs, table
from marsbench.rendering.measured import HOW_TO_READ_THE_CELLS, accuracy_table, measured_section
from marsbench.rendering.sections import about, behind, title
from marsbench.rows.kinds import Row, TextLossRow
from marsbench.statistics.decisions import Verdict
from marsbench.studies.regime.criteria import (
    CHANCE,
    CRITERIA,
    ENOUGH,
    OUTSIDE,
    PLAN,
    ROOM_ON_EACH,
    above_chance,
    on_each,
    published_in_words,
    room_on_enough,
)

OPENING = (
    "The paper fine-tunes a well-trained instruct model gently. Whether a scale of ours does, these criteria say: by "
    "AR training, and by masks that no training has shown, never by what MARS does."
)
HOW_CRITERIA_ARE_JUDGED = (
    "A criterion is *supported* if the whole 95 % interval lies inside the bounds, *not supported* if it lies outside, "
    "else *inconclusive*. Intervals cover questions and, with several training seeds, the luck of training, as on the "
    "page of claims; two one-sided tests at 2.5 % each decide an equivalence. One that fails is left standing."
)
_OUTCOME = {"supported": "holds", "not supported": "fails"}
TRIALS = (
    "Single trials that came before the settings of scale mini, by AR training alone, on seeds that no row has. They "
    "are the grounds of a choice, not measurements of the scale, and no rows of them are kept. Only the last four are "
    "of seed 0. They told that the base was not converged, so it was trained on; and then that it left no room, so "
    "tests ask GSM8K for six events and HumanEval for up to six operations, one more than any training shows."
)


def sections(rows: Sequence[Row], scale: str, seeds: BySeed) -> list[str]:
    cells = latest_cells(rows)
    return [
        title(PLAN, scale),
        "\n".join([f"- {tally(seeds)}.", *_left_standing(seeds)]),
        _criteria(seeds),
        f"{HOW_CRITERIA_ARE_JUDGED} {about(OPENING, scale, seeds)}",
        folded(
            paragraphs("## AR SFT on each benchmark", _room(seeds)),
            measured_section(cells, PLAN, seeds, HOW_TO_READ_THE_CELLS, accuracy_table(cells, PLAN)),
            _text_losses(seeds),
            _trials(scale),
        ),
        behind(rows, PLAN, scale),
    ]


def tally(seeds: BySeed) -> str:
    """How many of the criteria hold, and what of the others."""
    verdicts = _verdicts(seeds)
    rest = [
        f"{verdicts.count(verdict)} {word}"
        for verdict, word in (("not supported", "not"), ("inconclusive", "inconclusive"), ("not run", "not run"))
        if verdict in verdicts
    ]
    return ", ".join([f"{verdicts.count('supported')} of {len(verdicts)} criteria hold", *rest])


def beside(scales: Mapping[str, BySeed]) -> str:
    """Every criterion at several scales, for the pages on the whole paper; empty where none has rows of the regime."""
    measured = {scale: seeds for scale, seeds in scales.items() if seeds}
    if not measured:
        return ""
    lines = [
        [one.letter, one.text, held_against(one), *[_with_outcome(one, seeds) for seeds in measured.values()],
         published_in_words(one)]
        for one in CRITERIA
    ]  # fmt: skip
    head = ["", "criterion", "tested", *measured, "the paper"]
    return paragraphs("## The regime, scale beside scale", f"{OPENING} {HOW_CRITERIA_ARE_JUDGED}",
                        table(head, lines, text=range(len(head))))  # fmt: skip


def _with_outcome(one: Claim, seeds: BySeed) -> str:
    found = one.over(seeds.values())
    return f"{found.found}: {_OUTCOME.get(found.verdict, found.verdict)}"


def _verdicts(seeds: BySeed) -> list[Verdict]:
    return [*[one.over(seeds.values()).verdict for one in CRITERIA], room_on_enough(seeds)[1], above_chance(seeds)[1]]


def _criteria(seeds: BySeed) -> str:
    head = ["", "criterion", "tested", "result", "questions or texts", "seeds", "outcome", "the paper"]
    lines = []
    for one in CRITERIA:
        found = one.over(seeds.values())
        counts = ["n/a", "n/a"] if found.estimate is None else [f"{found.estimate.n:,}", str(found.seeds)]
        line = [one.letter, one.text, held_against(one), found.found, *counts]
        lines.append([*line, _OUTCOME.get(found.verdict, found.verdict), published_in_words(one)])
        if one.letter == "iii":
            lines += _room_lines(seeds)
    return paragraphs("## Criteria", table(head, lines, text=(0, 1, 2, 6, 7)))


def _left_standing(seeds: BySeed) -> Iterator[str]:
    for one in CRITERIA:
        found = one.over(seeds.values())
        if found.verdict in ("not supported", "inconclusive"):
            yield f"- {one.letter}, {_OUTCOME.get(found.verdict, found.verdict)}: {one.text} ({found.found})."
    outside = [one.letter for one in CRITERIA if OUTSIDE in published_in_words(one)]
    if outside:
        yield f"- The paper's own numbers would not meet {' and '.join(outside)}: the bounds are ours."


def _room_lines(seeds: BySeed) -> list[list[str]]:
    (enough, first), (near, second) = room_on_enough(seeds), above_chance(seeds)
    low, high = ROOM_ON_EACH.low, ROOM_ON_EACH.high
    return [
        ["", "... at least four benchmarks", f"{ENOUGH} or more between {low:g} and {high:g}", enough, "", "",
         _OUTCOME.get(first, first), ""],
        ["", "... none at chance", "benchmarks whose interval reaches down to chance", near, "", "",
         _OUTCOME.get(second, second), ""],
    ]  # fmt: skip


def _room(seeds: BySeed) -> str:
    found = on_each(seeds)
    lines = [
        [BENCHMARKS[name], one.found, f"{CHANCE.get(name, 0.0):.1f}", _OUTCOME.get(one.verdict, one.verdict)]
        for name, one in found.items()
    ]
    low, high = ROOM_ON_EACH.low, ROOM_ON_EACH.high
    lead = "AR SFT on each benchmark, in %, beside an answer of the right form drawn at random:"
    return f"{lead}\n\n{table(['', 'AR SFT', 'by chance', f'between {low:g} and {high:g}'], lines, text=(0, 3))}"


def _text_losses(seeds: BySeed) -> str:
    lines = []
    for seed, rows in sorted(seeds.items()):
        found = {row.stage: row for row in rows if isinstance(row, TextLossRow)}
        if found:
            words = [_nats(found.get(stage)) for stage in ("base", "ar_sft")]
            lines.append([str(seed), *words])
    if not lines:
        return ""
    head = ["seed", "base", "AR SFT"]
    return f"## Loss on held-out text of the world, nats per token\n\n{table(head, lines, text=())}"


def _nats(row: TextLossRow | None) -> str:
    if row is None:
        return "not run"
    return f"{sum(row.nats) / sum(row.tokens):.4f}" if row.status == "done" else one_line(row.reason)


def _trials(scale: str) -> str:
    file = resources.files(__package__) / f"{scale}_trials.yaml"
    trials: list[dict[str, Any]] = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else []
    if not trials:
        return ""
    lines = [
        [one["what"], *[f"{one[name]:.1f}" for name in BENCHMARKS], f"{fmean(one[name] for name in BENCHMARKS):.1f}"]
        for one in trials
    ]
    return f"## Trials\n\n{TRIALS}\n\n{table(['', *BENCHMARKS.values(), 'Average'], lines)}"
