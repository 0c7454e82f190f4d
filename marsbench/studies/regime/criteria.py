"""The criteria of the regime, each with its test: about AR training, and about masks before any training with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from marsbench.findings.cells import BENCHMARKS, Cells, done_cells, latest_cells
from marsbench.findings.claims import POINTS, TIMES, AccuracyClaim, Finding, TokensClaim
from marsbench.findings.published import PUBLISHED_SCALES, published_average
from marsbench.findings.seeds import BySeed, Judge, judged
from marsbench.rows.kinds import Row, TextLossRow
from marsbench.statistics.decisions import Decide
from marsbench.statistics.intervals import (
    Estimate,
    Interval,
    Verdict,
    below,
    paired_difference,
    ratio_of_totals,
    within,
)
from marsbench.studies.lines import AR_SFT
from marsbench.studies.regime.lines import OF_SHORT_BASE, PLAN, TWICE, UNTRAINED_MASKS
from marsbench.studies.table2 import PLAN as TABLE2

CONVERGED, SATURATED, ROOM, GENTLE, ABOUT_ONE = 1.5, 1.0, (60.0, 95.0), 1.05, 1.05
ROOM_ON_EACH, ENOUGH = (40.0, 97.0), 4
# Accuracy in % of an answer of the right form, drawn at random. BBH: two puzzles of yes or no, one of seven days.
CHANCE = {"bbh": 100 * (1 / 2 + 1 / 2 + 1 / 7) / 3, "mmlu_pro": 10.0, "gpqa": 25.0}


@dataclass(frozen=True)
class Criterion:
    """One criterion: what it says, how it is tested, and what the paper's numbers say of it."""

    number: str
    says: str
    tested: str
    judge: Judge
    decide: Decide
    paper: Callable[[str], str | None] = lambda scale: None

    def finding(self, seeds: BySeed) -> Finding:
        """What all training seeds say of it."""
        return judged(self.judge, self.decide, list(seeds.values()))


def _difference(number: str, says: str, first: str, second: str, margin: float) -> Criterion:
    """Two lines that are equally accurate within a margin: two one-sided tests, by one interval."""
    claim = AccuracyClaim(number, says, first, second)

    def decide(interval: Interval) -> Verdict:
        return within(interval, -margin, margin)

    def judge(rows: Sequence[Row]) -> Finding:
        return claim.judge(latest_cells(rows), PLAN)

    def published(scale: str) -> str | None:
        known = {arm.name for arm in TABLE2.arms}
        return claim.published(TABLE2, scale) if {first, second} <= known else None

    tested = f"-{margin:g} < {claim.compared(PLAN)} < {margin:g}"
    return Criterion(number, says, tested, judge, decide, published)


def _average(rows: Sequence[Row]) -> Finding:
    """AR SFT's average accuracy, in points."""
    return _accuracy(latest_cells(rows), list(BENCHMARKS))


def _accuracy(cells: Cells, benchmarks: Sequence[str]) -> Finding:
    """AR SFT's accuracy in points on some benchmarks, against none right, so that shares of several seeds count too."""
    done = done_cells(cells, AR_SFT.name)
    asked = {name: done[name].correct for name in benchmarks if name in done}
    if len(asked) < len(benchmarks):
        return Finding()
    found = paired_difference(asked, {name: [0.0] * len(correct) for name, correct in asked.items()})
    return Finding(Estimate(found.points, found.interval, found.n), POINTS, False, tuple(asked), len(benchmarks))


def on_each(seeds: BySeed) -> dict[str, Finding]:
    """AR SFT's accuracy on every benchmark, over all training seeds."""

    def judge_of(name: str) -> Judge:
        return lambda rows: _accuracy(latest_cells(rows), [name])

    rows = list(seeds.values())
    return {name: judged(judge_of(name), lambda interval: within(interval, *ROOM_ON_EACH), rows) for name in BENCHMARKS}


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


def _text_loss(rows: Sequence[Row]) -> Finding:
    """The loss on held-out text after AR SFT, over that of the base."""
    nats = {row.stage: row.nats for row in rows if isinstance(row, TextLossRow) and row.status == "done"}
    if not nats.keys() >= {"base", "ar_sft"}:
        return Finding()
    return Finding(ratio_of_totals(nats["ar_sft"], nats["base"]), TIMES, False)


def _published_average(scale: str) -> str | None:
    """AR SFT's average accuracy in the paper."""
    value = published_average(TABLE2, AR_SFT.name, scale, "accuracy")
    return None if value is None else f"{value:.1f}"


_MASKS = TokensClaim("v", "", UNTRAINED_MASKS.name, ABOUT_ONE, fewer=True)
CRITERIA = (
    _difference(
        "i", "Converged: a third less pretraining hardly changes AR SFT", AR_SFT.name, OF_SHORT_BASE.name, CONVERGED
    ),
    _difference("ii", "Saturated: AR SFT twice as long is equivalent to AR SFT", TWICE.name, AR_SFT.name, SATURATED),
    Criterion(
        "iii", "Room both ways: AR SFT's average accuracy",
        f"{ROOM[0]:g} < average of AR SFT < {ROOM[1]:g}", _average, lambda interval: within(interval, *ROOM),
        _published_average,
    ),
    Criterion(
        "iv", "Gentle: AR SFT hardly unlearns the base's text",
        f"loss on held-out text, AR SFT over base < {GENTLE:g}", _text_loss, lambda interval: below(interval, GENTLE),
    ),
    Criterion(
        "v", "Masks are new: before MARS training they settle next to nothing",
        _MASKS.tested(PLAN), lambda rows: _MASKS.judge(latest_cells(rows), PLAN), _MASKS.decide,
    ),
)  # fmt: skip


def published_in_words(criterion: Criterion) -> str:
    """What the paper's own averages say of a criterion, at its scales; empty where they say nothing."""
    said = [(name, criterion.paper(scale)) for scale, name in PUBLISHED_SCALES.items()]
    return ", ".join(f"{value} ({name})" for name, value in said if value is not None)
