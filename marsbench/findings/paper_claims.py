"""A claim in its place in the paper, judged on the rows of one page at every scale and over all training seeds."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from marsbench.findings.claims import TIMES, Claim, Finding, counted, number
from marsbench.findings.collection import Collection
from marsbench.findings.seeds import Judge, judged, on_rows
from marsbench.findings.sweep import SweepCells
from marsbench.rows.kinds import Row
from marsbench.running.plans import TablePlan
from marsbench.statistics.decisions import Decide, holm
from marsbench.statistics.intervals import Estimate

ABSTRACT, NOT_THE_PAPERS = "Abstract", "Not the paper's: ours, and reported elsewhere"
_OTHERS = ("Ours:", "Reported elsewhere:")  # how the words of claims begin that are not the paper's


@dataclass(frozen=True)
class PaperClaim:
    """A claim with its test, which reads the rows of one page."""

    item: str  # key of the table, figure or appendix that it belongs to
    page: str  # whose rows decide it
    text: str
    tested: str  # the comparison and its bound in words
    unit: str
    judge: Judge
    decide: Decide
    published: Callable[[str], str | None] = lambda scale: None  # what the paper's own numbers say at a scale
    counts: str = "questions"  # what its interval is drawn from
    section: str = NOT_THE_PAPERS  # of the paper, as in "Section 4.2: Table 2"
    in_abstract: bool = False
    check: bool = False  # whether it cannot come out otherwise unless something is broken

    def finding(self, collection: Collection) -> Finding:
        """What one scale's rows say, all training seeds together."""
        return judged(self.judge, self.decide, collection.of(self.page))

    @property
    def place(self) -> tuple[int, list[int], str]:
        """Sorts claims by the paper's sections: the abstract first, then sections, appendices, and what is not its."""
        head = self.section.partition(":")[0]
        ranks = {ABSTRACT: 0, "Section": 1, "Appendix": 2}
        numbers = [int(part) for part in re.findall(r"\d+", head)]
        return ranks.get(head.split()[0], 3), numbers, head


@dataclass(frozen=True)
class Judged:
    """A claim with what each scale says of it."""

    claim: PaperClaim
    findings: Mapping[str, Finding]

    @property
    def papers(self) -> bool:
        """Whether it is the paper's own."""
        return self.claim.section != NOT_THE_PAPERS


def judge_all(claims: Iterable[PaperClaim], collections: Sequence[Collection]) -> list[Judged]:
    """Every claim judged at every scale, in the order of the paper's sections, and corrected for their number."""
    in_order = sorted(claims, key=lambda claim: claim.place)
    by_scale = {one.scale: _corrected([(claim, claim.finding(one)) for claim in in_order]) for one in collections}
    return [
        Judged(claim, {scale: found[place] for scale, found in by_scale.items()})
        for place, claim in enumerate(in_order)
    ]


def _corrected(found: Sequence[tuple[PaperClaim, Finding]]) -> list[Finding]:
    """Findings with their p after Holm's correction over all claims tested at a scale.

    Checks are no tests: they cannot come out otherwise, so that no chance has to be shared out to them.
    """
    tested = {place: one.p for place, (claim, one) in enumerate(found) if not claim.check and one.p is not None}
    adjusted = dict(zip(tested, holm(list(tested.values())), strict=True))
    return [replace(one, after_holm=adjusted.get(place)) for place, (_, one) in enumerate(found)]


def tally(judged: Sequence[Judged], scale: str) -> str:
    """How many claims one scale supports, what of the others, and how many checks hold."""
    claims, checks = (
        [one.findings[scale].verdict for one in judged if one.claim.check == kind] for kind in (False, True)
    )
    return counted(claims, checks)


def corrected(judged: Sequence[Judged], scale: str) -> str:
    """How many claims were tested, and how many of the verdicts on them survive the correction; empty without any."""
    tested = [finding for one in judged if (finding := one.findings[scale]).after_holm is not None]
    if not tested:
        return ""
    decided, standing = sum(one.decided for one in tested), sum(one.stands for one in tested)
    return (
        f"{len(tested)} claims were tested, the paper's and ours, checks not counted. {decided} were decided, and "
        f"{standing} of these verdicts stand after Holm's correction over all {len(tested)}."
    )


def on_cells(claims: Sequence[Claim], plan: TablePlan, section: str, *, item: str = "") -> list[PaperClaim]:
    """Claims on a table's cells, in the paper; of several with the same words, each says what it compares.

    Args:
        claims: what is claimed of the table's lines.
        plan: of the table.
        section: of the paper, empty for a page that the paper has not.
        item: the figure that they belong to, where that is not the table.
    """
    count = Counter(claim.text for claim in claims)
    return [_on_cells(claim, plan, section, item, several=count[claim.text] > 1) for claim in claims]


def _on_cells(claim: Claim, plan: TablePlan, section: str, item: str, *, several: bool) -> PaperClaim:
    others = not section or claim.text.startswith(_OTHERS)

    def paper(scale: str) -> str | None:
        value = claim.published(plan, scale)
        return None if value is None else f"{value} {claim.unit}"

    return PaperClaim(
        item=item or plan.key,
        page=plan.key,
        text=f"{claim.text}: {claim.compared(plan)}" if several else claim.text,
        tested=claim.tested(plan),
        unit=claim.unit,
        judge=on_rows(claim, plan),
        decide=claim.decide,
        published=paper,
        section=NOT_THE_PAPERS if others else section,
        in_abstract=claim.in_abstract,
        check=claim.check,
    )


def on_sweep(
    text: str,
    tested: str,
    measure: Callable[[SweepCells], Estimate | None],
    decide: Decide,
    paper: Callable[[str], float | None] = lambda scale: None,
    *,
    item: str,
    page: str,
    unit: str = TIMES,
    signed: bool = False,
    counts: str = "laps",
    section: str = NOT_THE_PAPERS,
    in_abstract: bool = False,
    check: bool = False,
) -> PaperClaim:
    """A claim on a sweep: `measure` is what it measures there, `paper` the same from the paper's own numbers.

    Claims are about eager contenders, whatever else was raced: like is held against like.
    """

    def judge(rows: Sequence[Row]) -> Finding:
        return found(measure(SweepCells.of(rows).eager), unit, decide, signed=signed)

    def said(scale: str) -> str | None:
        value = paper(scale)
        return None if value is None else f"{number(value, unit, signed=signed)} {unit}"

    return PaperClaim(item, page, text, tested, unit, judge, decide, said, counts, section, in_abstract, check)


def found(estimate: Estimate | None, unit: str, decide: Decide, *, signed: bool = False) -> Finding:
    """What an estimate says of a claim, and nothing where there is none."""
    if estimate is None:
        return Finding()
    return Finding(estimate, unit, signed, verdict=decide(estimate.interval))
