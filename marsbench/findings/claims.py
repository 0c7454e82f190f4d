"""A claim as data: what it measures, the bound for its effect, and what pages need to know about it.

Numbers travel as floats; `rendering/claims_in_words.py` puts them into words, which nothing reads back.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from marsbench.findings.collection import Collection
from marsbench.findings.in_words import number, with_interval
from marsbench.findings.seeds import BySeed, SeedRows, pooled
from marsbench.rows.kinds import EvaluationRow, Row
from marsbench.statistics.decisions import SIGNIFICANT, Bound, Verdict, holm, p_value
from marsbench.statistics.intervals import Estimate, Interval, over_seeds

POINTS, TOKENS, TIMES = "points", "tokens/forward", "times"  # the units of effects
DIGITS = {POINTS: 1, TOKENS: 2, TIMES: 2}
_WORDS = {POINTS: ("points higher", "points lower"), TOKENS: ("more tokens", "fewer tokens"), TIMES: ("more", "less")}
_BOUNDS = (0.0, 1.0, 2.0)  # bounds of claims, in points
_MOST_POINTS = 100.0


@dataclass(frozen=True)
class Section:
    title: str
    number: tuple[int, ...] = ()  # of a numbered section
    appendix: str = ""  # letter of an appendix

    @property
    def order(self) -> tuple[int, tuple[int, ...], str]:
        """Sorts by the paper's order: the abstract, sections, appendices."""
        return 1 if self.number else 2 if self.appendix else 0, self.number, self.appendix


ABSTRACT = Section("Abstract")


class Measured(NamedTuple):
    """The effect in rows, or why it is not known."""

    estimate: Estimate | None = None
    benchmarks: tuple[str, ...] = ()  # where it is measured
    asked: int = 0  # how many benchmarks it should be measured on
    reason: str = ""  # why there is no estimate, if that is not obvious
    counts: str = ""  # what n counts, if not questions


@dataclass(frozen=True)
class Finding:
    """What rows say about a claim: its effect, and on which side of the bound it lies."""

    claim: "Claim" = field(compare=False)  # equal findings may be of different claims
    measured: Measured = field(default_factory=Measured)
    side: Verdict = "not run"  # by its own interval
    seeds: int = 1  # training seeds behind it
    p: float | None = None  # of the side, see `decisions.p_value`
    after_holm: float | None = None  # p with Holm's correction over all tested claims; None for no test
    beside: "tuple[tuple[str, Finding], ...]" = ()  # what is shown beside it, with its words

    @property
    def estimate(self) -> Estimate | None:
        return self.measured.estimate

    @property
    def verdict(self) -> Verdict:
        """The side, or "open" if Holm's correction over all tested claims leaves too large a p."""
        return "open" if self.after_holm is not None and self.after_holm >= SIGNIFICANT else self.side

    @property
    def number(self) -> str:
        if self.estimate is None:
            return self.measured.reason or "n/a"
        # If a limit in points would print as a bound, one more digit shows on which side it lies.
        limits = self.estimate.interval.low, self.estimate.interval.high
        unit = self.claim.unit
        more = unit == POINTS and any(abs(round(limit, DIGITS[POINTS])) in _BOUNDS for limit in limits)
        return with_interval(self.estimate, DIGITS[unit] + more, signed=self.claim.signed)

    @property
    def by(self) -> str:
        """A difference in words: "2.5 points lower [-3.3, -1.7]"."""
        value, _, interval = self.number.partition(" ")
        higher, lower = _WORDS[self.claim.unit]
        return f"{value.lstrip('+-')} {lower if value.startswith('-') else higher} {interval}"

    @property
    def found(self) -> str:
        return self.number if self.estimate is None else f"{self.number} {self.claim.unit}"


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One claim. `name` and `text` are for claims that a page shows."""

    measure: Callable[[Sequence[Row]], Measured]  # from the rows of one seed, or of several seeds pooled
    bound: Bound
    unit: str = POINTS
    signed: bool = False  # whether the effect is a difference
    published: Callable[[str], float | None] = lambda scale: None  # the effect in the paper's numbers, by scale
    name: str = ""
    text: str = ""  # the claim in a sentence
    compared: str = ""  # what is measured, in words, for a page that shows the bound
    ours: bool = False  # though its page is one of the paper's tables
    lines: tuple[str, ...] = ()  # the lines of a table that it compares
    page: str = ""  # study whose rows decide it
    section: Section | None = None  # of the paper
    prepared: Callable[[Sequence[Row]], Sequence[Row]] = list  # what first derives rows from those of one seed
    check: bool = False  # whether it can only fail if something is broken
    untestable: str = ""  # why small models on a processor cannot test it; empty if they can
    beside: "tuple[tuple[str, Claim], ...]" = ()  # shown beside its number, not judged; with their words

    @property
    def papers(self) -> bool:
        return self.section is not None

    @property
    def tested(self) -> bool:
        return not self.check and not self.untestable

    def number(self, value: float) -> str:
        return number(value, DIGITS[self.unit], signed=self.signed)

    def of(self, rows: Sequence[Row]) -> Finding:
        measured = self.measure(rows)
        if measured.estimate is None:
            return Finding(self, measured)
        return Finding(self, measured, self.bound.verdict(measured.estimate.interval))

    def over(self, seeds: Iterable[Sequence[Row]]) -> Finding:
        """What all seeds say together. Only seeds count that have as many questions as any other seed."""
        every = [(rows, self.of(rows)) for rows in map(self.prepared, seeds)]
        if not (known := [finding.measured for _, finding in every if finding.estimate is not None]):
            return every[0][1] if every else Finding(self)
        most = max(map(_extent, known))
        alone = [(rows, finding) for rows, finding in every if _extent(finding.measured) == most]
        compared = [  # to pool all lines of a table is slow
            [row for row in rows if not self.lines or not isinstance(row, EvaluationRow) or row.arm in self.lines]
            for rows, _ in alone
        ]
        together = alone[0][1] if len(alone) == 1 else self.of(pooled(compared))
        if together.estimate is None:
            return together
        values = [finding.estimate.value for _, finding in alone if finding.estimate is not None]
        estimate = over_seeds(together.estimate, values)
        if self.unit == POINTS:  # accuracies cannot differ by more than 100 points
            low, high = max(estimate.interval.low, -_MOST_POINTS), min(estimate.interval.high, _MOST_POINTS)
            estimate = replace(estimate, interval=Interval(low, high))
        return replace(
            together,
            measured=together.measured._replace(estimate=estimate),
            side=self.bound.verdict(estimate.interval),
            seeds=len(values),
            p=p_value(together.estimate, values, self.bound),
        )

    def with_beside(self, seeds: BySeed) -> Finding:
        """What all seeds say together, with what is shown beside it."""
        others = [(words, replace(other, prepared=self.prepared)) for words, other in self.beside]
        beside = tuple((words, other.over(seeds.values())) for words, other in others)
        return replace(self.over(seeds.values()), beside=beside)


def _extent(measured: Measured) -> tuple[int, tuple[str, ...], int]:
    return len(measured.benchmarks), measured.benchmarks, measured.estimate.n if measured.estimate else 0


@dataclass(frozen=True)
class Judged:
    claim: Claim
    findings: Mapping[str, Finding]


def judge_all(claims: Iterable[Claim], collections: Sequence[Collection]) -> list[Judged]:
    """Every claim judged at every scale, in the order of the paper's sections, with Holm's correction at each scale."""
    in_order = sorted(claims, key=lambda claim: claim.section.order if claim.section else (3, (), ""))
    by_claim: list[dict[str, Finding]] = [{} for _ in in_order]
    for each in collections:
        findings = [claim.with_beside(each.rows.get(claim.page, {})) for claim in in_order]
        tested = {place: said.p for place, said in enumerate(findings) if said.claim.tested and said.p is not None}
        adjusted = dict(zip(tested, holm(list(tested.values())), strict=True))
        for place, said in enumerate(findings):
            by_claim[place][each.scale] = replace(said, after_holm=adjusted.get(place))
    return list(map(Judged, in_order, by_claim))


def finding(claim: Claim, seeds: BySeed) -> Finding:
    """What a page says about a claim: its verdict among all claims if known, else from its rows alone."""
    known: Finding | None = seeds.judged.get(claim.measure) if isinstance(seeds, SeedRows) else None
    return known or claim.with_beside(seeds)
