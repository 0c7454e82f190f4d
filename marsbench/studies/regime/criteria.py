"""The criteria of the regime, each with its test: about AR training, and about masks before any training with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from marsbench.findings.between_lines import emits, more_accurate
from marsbench.findings.cells import BENCHMARKS, done_cells, latest_cells
from marsbench.findings.claims import TIMES, Claim, Finding, Measured
from marsbench.findings.published import PUBLISHED_SCALES, published_average
from marsbench.findings.seeds import BySeed
from marsbench.rendering.claims import published
from marsbench.rows.kinds import Row, TextLossRow
from marsbench.running.plans import Arm, TablePlan
from marsbench.statistics.decisions import Bound, Verdict
from marsbench.statistics.intervals import paired_difference, ratio_of_totals
from marsbench.studies.lines import AR_SFT
from marsbench.studies.table2 import PLAN as TABLE2

_OF_TABLE2 = {arm.name: arm for arm in TABLE2.arms}
OF_SHORT_BASE = Arm("ar_sft_of_short_base", "AR SFT of a base trained 2/3 as long", "ar_sft_of_short_base", "ar")
TWICE, UNTRAINED_MASKS, MARS = (_OF_TABLE2[name] for name in ("ar_sft_2x", "untrained_masks", "mars_95"))
PLAN = TablePlan(
    "regime",
    "Is fine-tuning where the paper's is?",
    (_OF_TABLE2["base"], AR_SFT, TWICE, OF_SHORT_BASE, UNTRAINED_MASKS, MARS),
    own="Regime",
)

CONVERGED, SATURATED, ROOM, GENTLE, ABOUT_ONE = 1.5, 1.0, Bound(60.0, 95.0), 1.05, 1.05
OUTSIDE = "outside the bound"  # of what the paper itself has
ROOM_ON_EACH, ENOUGH = Bound(40.0, 97.0), 4
# Accuracy in % of an answer of the right form, drawn at random. BBH: two puzzles of yes or no, one of seven days.
CHANCE = {"bbh": 100 * (1 / 2 + 1 / 2 + 1 / 7) / 3, "mmlu_pro": 10.0, "gpqa": 25.0}


def _equivalent(first: str, second: str, margin: float, *said: str) -> Claim:
    """Two lines that are equally accurate within a margin: two one-sided tests, by one interval."""
    return more_accurate(PLAN, first, second, *said, bound=Bound(-margin, margin))


def _accuracy(rows: Sequence[Row], benchmarks: Sequence[str]) -> Measured:
    """AR SFT's accuracy in points on some benchmarks, against none right, so that shares of several seeds count too."""
    done = done_cells(latest_cells(rows), AR_SFT.name)
    asked = {name: done[name].correct for name in benchmarks if name in done}
    if len(asked) < len(benchmarks):
        return Measured()
    found = paired_difference(asked, {name: [0.0] * len(correct) for name, correct in asked.items()})
    return Measured(found.estimate, tuple(asked), len(benchmarks))


def on_each(seeds: BySeed) -> dict[str, Finding]:
    """AR SFT's accuracy on every benchmark, over all training seeds."""
    claims = {name: Claim(measure=partial(_accuracy, benchmarks=[name]), bound=ROOM_ON_EACH) for name in BENCHMARKS}
    return {name: claim.over(seeds.values()) for name, claim in claims.items()}


def room_on_enough(seeds: BySeed) -> tuple[str, Verdict]:
    """How many benchmarks leave room both ways, in words, and whether those are enough."""
    verdicts = [finding.verdict for finding in on_each(seeds).values()]
    if "not run" in verdicts:
        return "n/a", "not run"
    sure, possible = verdicts.count("supported"), len(verdicts) - verdicts.count("not supported")
    verdict: Verdict = "supported" if sure >= ENOUGH else "inconclusive" if possible >= ENOUGH else "not supported"
    return f"{sure} surely, {possible} possibly", verdict


def above_chance(seeds: BySeed) -> tuple[str, Verdict]:
    """Which benchmarks may be answered by chance, in words, and whether there is none."""
    found = {name: finding.estimate for name, finding in on_each(seeds).items()}
    known = {name: estimate for name, estimate in found.items() if estimate is not None}
    if len(known) < len(found):
        return "n/a", "not run"
    near = [BENCHMARKS[name] for name, one in known.items() if one.interval.low <= CHANCE.get(name, 0.0)]
    below_chance = [name for name, one in known.items() if one.interval.high <= CHANCE.get(name, 0.0)]
    verdict: Verdict = "not supported" if below_chance else "inconclusive" if near else "supported"
    return ", ".join(near) or "none", verdict


def _text_loss(rows: Sequence[Row]) -> Measured:
    """The loss on held-out text after AR SFT, over that of the base."""
    nats = {row.stage: row.nats for row in rows if isinstance(row, TextLossRow) and row.status == "done"}
    if not nats.keys() >= {"base", "ar_sft"}:
        return Measured()
    return Measured(ratio_of_totals(nats["ar_sft"], nats["base"]))


CRITERIA = (
    _equivalent(
        AR_SFT.name, OF_SHORT_BASE.name, CONVERGED, "i", "Converged: a third less pretraining hardly changes AR SFT"
    ),
    replace(
        _equivalent(
            TWICE.name, AR_SFT.name, SATURATED, "ii", "Saturated: AR SFT twice as long is equivalent to AR SFT"
        ),
        published=more_accurate(TABLE2, TWICE.name, AR_SFT.name).published,
    ),
    Claim(
        letter="iii",
        text="Room both ways: AR SFT's average accuracy",
        compared="average of AR SFT",
        measure=partial(_accuracy, benchmarks=list(BENCHMARKS)),
        bound=ROOM,
        published=lambda scale: published_average(TABLE2, AR_SFT.name, scale, "accuracy"),
    ),
    Claim(
        letter="iv",
        text="Gentle: AR SFT hardly unlearns the base's text",
        compared="loss on held-out text, AR SFT over base",
        measure=_text_loss,
        bound=Bound(high=GENTLE),
        unit=TIMES,
    ),
    emits(
        PLAN,
        UNTRAINED_MASKS.name,
        Bound(high=ABOUT_ONE),
        "v",
        "Masks are new: before MARS training they settle next to nothing",
    ),
)


def published_in_words(criterion: Claim) -> str:
    """What the paper's own averages say of a criterion, at its scales; empty where they say nothing."""
    said = []
    for scale, name in PUBLISHED_SCALES.items():
        value, bound = criterion.published(scale), criterion.bound
        if value is not None:
            where = "" if bound.low <= value <= bound.high else f", {OUTSIDE}"
            said.append(f"{published(criterion, scale)} ({name}{where})")
    return ", ".join(said)
