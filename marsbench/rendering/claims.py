"""Claims in words: what each says and tests, what was found, what many come to; and the section of a page on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import inf

from marsbench.findings.cells import PUBLISHED_SCALES
from marsbench.findings.claims import ELSEWHERE, OURS, POINTS, TOKENS, Claim, Finding, Measured, Section, number
from marsbench.findings.in_words import p_value
from marsbench.findings.seeds import BySeed
from marsbench.presets import preset
from marsbench.rendering.markdown import paragraphs, table
from marsbench.rendering.sections import reading
from marsbench.running.plans import TablePlan
from marsbench.statistics.decisions import MOST_SEEDS, MOST_TIMES, Needed, Verdict
from marsbench.statistics.intervals import Interval

_OTHERS: tuple[Verdict, ...] = "not supported", "significantly worse", "inconclusive", "moot", "not run"
_BEGINS = {OURS: "Ours: ", ELSEWHERE: "Reported elsewhere: "}  # who says it, where that is not the paper


def heading(section: Section | None) -> str:
    """A section of the paper, or what stands behind all of them."""
    if section is None:
        return "Not the paper's: ours, and reported elsewhere"
    if section.number:
        return f"Section {'.'.join(map(str, section.number))}: {section.title}"
    return f"Appendix {section.appendix}: {section.title}" if section.appendix else section.title


def sentence(claim: Claim) -> str:
    """What is claimed, by whom, and at which batch size."""
    at = "" if claim.batch_size is None else f" at batch {claim.batch_size}"
    return f"{_BEGINS.get(claim.whose, '')}{claim.text}{at}"


def sentences(claims: Sequence[Claim]) -> dict[Claim, str]:
    """The same of many claims; those that say the same of several lines also say what they compare."""
    alike = Counter((claim.page, claim.name, claim.batch_size) for claim in claims if claim.name)
    several = {claim for claim in claims if alike[claim.page, claim.name, claim.batch_size] > 1}
    return {claim: sentence(claim) + (f": {claim.compared}" if claim in several else "") for claim in claims}


def held_against(claim: Claim) -> str:
    """What is measured, and the bound that it is held against."""
    bound, at = claim.bound, "" if claim.batch_size is None else f", batch {claim.batch_size}"
    what = f"{claim.compared}{at}"
    if bound.low == bound.high:
        return f"{what} = {bound.low:g}"
    if bound.high == inf:
        return f"{what} > {bound.low:g}{' (non-inferiority)' if bound.is_non_inferiority else ''}"
    if bound.low == -inf:
        return f"{what} < {bound.high:g}"
    inside = f"{bound.low:g} < {what} < {bound.high:g}"
    return inside if claim.unit == POINTS else f"{what}, from {bound.low:g} to {bound.high:g}"


def published(claim: Claim, scale: str) -> str | None:
    """The effect in the paper's own numbers, without its unit."""
    value = claim.published(scale)
    return None if value is None else number(value, claim.unit, signed=claim.signed)


def plainly(finding: Finding) -> str:
    """A finding in words that need no statistics: who is how much more accurate than whom, or emits how many tokens."""
    claim = finding.claim
    if finding.estimate is None or len(claim.who) not in (1, 2):
        return f"{sentence(claim)}: {finding.found}"
    if len(claim.who) == 1:
        return f"{claim.who[0]} emits {finding.number} tokens per forward pass"
    (one, other), interval, value = claim.who, finding.estimate.interval, finding.estimate.value
    if interval.low <= 0 <= interval.high:
        what = "accuracy" if claim.unit == POINTS else "tokens per forward pass"
        return f"{one} is not told from {other} in {what}: {finding.found}"
    limits = sorted((abs(interval.low), abs(interval.high)))
    found = Measured(replace(finding.estimate, value=abs(value), interval=Interval(*limits)))
    size = Finding(replace(claim, signed=False), found).number
    if claim.unit == POINTS:
        return f"{one} is {size} points {'more' if value > 0 else 'less'} accurate than {other}"
    return f"{one} emits {size} {'more' if value > 0 else 'fewer'} tokens per forward pass than {other}"


def answers(claims: Sequence[Claim], seeds: BySeed) -> str:
    """What a page begins with: each claim's finding in a sentence, with its verdict."""
    return "\n".join(bullet(claim.over(seeds.values())) for claim in claims)


def bullet(finding: Finding) -> str:
    """A finding in a sentence, with the verdict on what was claimed."""
    said, verdict = sentence(finding.claim), f"**{worded(finding)}**"
    if finding.estimate is None:
        return f"- {said}: {verdict}."
    if not finding.claim.who:
        return f"- {said}: {verdict}, {finding.found}."
    return f"- {plainly(finding)} (*{said}*: {verdict})."


def bullet_by_size(claims: Sequence[Claim], seeds: BySeed) -> str:
    """The findings on one claim at several batch sizes in a sentence, each with its verdict."""
    said = [
        f"at batch {found.claim.batch_size} **{worded(found)}**{f', {found.found}' if found.estimate else ''}"
        for found in [claim.over(seeds.values()) for claim in claims]
    ]
    return f"- {sentence(replace(claims[0], batch_size=None))}: {'; '.join(said)}."


def worded(finding: Finding) -> str:
    """The verdict on a claim, of a loss that is allowed, whether there surely is one; on a check in its own words."""
    claim = finding.claim
    if claim.check:  # so that nobody takes it for a finding
        words = {"supported": "holds", "not supported": "fails", "inconclusive": "unclear"}
        return words.get(finding.verdict, finding.verdict)
    if finding.verdict == "supported" and claim.bound.is_non_inferiority and finding.estimate is not None:
        if finding.estimate.interval.low > 0:
            return "supported, significantly better"
        if finding.estimate.interval.high < 0:
            return "supported, yet significantly worse"
    return finding.verdict


def questions(finding: Finding) -> str:
    """How many observations the effect rests on; where not on all benchmarks, it says so."""
    if finding.estimate is None:
        return "n/a"
    judged, asked = len(finding.measured.benchmarks), finding.measured.asked
    return f"{finding.estimate.n:,}" + ("" if judged == asked else f" ({judged} of {asked} benchmarks)")


def in_need(needed: Needed | None, counts: str = "questions") -> str:
    """What would decide an open claim, as in "9 seeds or 31,000 questions"; empty where it is decided."""
    if needed is None:
        return ""
    if needed.at_bound:
        return "no n would"
    if all(needed.both):
        return f"{needed.both[0]} seeds and {_rounded_up(needed.both[1])} {counts}"
    ways = [f"{needed.seeds} seeds"] if needed.seeds else []
    ways += [f"{_rounded_up(needed.questions)} {counts}"] if needed.questions else []
    return " or ".join(ways) or (f"> {MOST_SEEDS} seeds" if needed.scatter else f"> {MOST_TIMES:g} times the {counts}")


def _rounded_up(count: int) -> str:
    """A number with two digits that mean something: it is an extrapolation."""
    step = 10 ** max(0, len(str(count)) - 2)
    return f"{-(-count // step) * step:,}"


# ---- what many claims come to ---------------------------------------------------------------------------------------


def tally(findings: Sequence[Finding]) -> str:
    """What claims come to, as in "5 of 7 claims supported, 2 inconclusive; 3 of 3 checks hold"."""
    claims, checks = (Counter(said.verdict for said in findings if said.claim.check == kind) for kind in (False, True))
    rest = [f"{claims[verdict]} {verdict}" for verdict in _OTHERS if claims[verdict]]
    parts = [", ".join([f"{claims['supported']} of {claims.total()} claims supported", *rest])] if claims else []
    if checks:
        parts.append(f"{checks['supported']} of {checks.total()} checks hold")
    return "; ".join(parts)


def corrected(findings: Sequence[Finding]) -> str:
    """How many claims were tested, and how many of the verdicts on them survive the correction; empty without any."""
    tested = [finding for finding in findings if finding.after_holm is not None]
    if not tested:
        return ""
    decided, standing = sum(finding.decided for finding in tested), sum(finding.stands for finding in tested)
    return (
        f"{len(tested)} claims were tested, the paper's and ours, checks not counted. {decided} were decided, and "
        f"{standing} of these verdicts stand after Holm's correction over all {len(tested)}."
    )


# ---- the section of a page ------------------------------------------------------------------------------------------

WHAT_CHECKS_ARE = (
    "Checks: these cannot come out otherwise, by the way that the methods are made, unless something is broken. They "
    "are no evidence for MARS, and are counted apart."
)


def claims_section(seeds: BySeed, plan: TablePlan, claims: Sequence[Claim], scale: str) -> str:
    """Every claim with its test and its verdict over all seeds, and what the paper's own numbers say of it."""
    whose = "our own" if plan.own else f"the paper's {plan.name}"
    judged, checks = [], []
    for claim in claims:
        found = claim.over(seeds.values())
        of_seeds = "n/a" if found.estimate is None else str(found.seeds)
        line = [claim.letter, sentence(claim), held_against(claim), found.found, questions(found), of_seeds]
        if claim.check:
            checks.append([*line, worded(found)])
        else:
            judged.append([*line, p_value(found.p), worded(found), in_need(found.needed)])
    counted = ["result", "questions", "seeds"]
    return paragraphs(
        f"## Claims of {whose} and what was measured",
        preset(scale).caveat,
        " ".join([reading(scale), *dict.fromkeys(claim.how for claim in claims if claim.how)]),
        table(["", "claim", "tested", *counted, "p", "verdict", "would decide it"], judged, text=(0, 1, 2, 7, 8)),
        WHAT_CHECKS_ARE if checks else "",
        table(["", "check", "checked", *counted, "outcome"], checks, text=(0, 1, 2, 6)) if checks else "",
        "" if plan.own else _published_claims(claims),
    )


def _published_claims(claims: Sequence[Claim]) -> str:
    """The same comparisons between the paper's own averages, as far as its table allows them."""
    of_units: dict[str, dict[tuple[str, tuple[str, ...]], list[str]]] = {}  # unit -> letter and lines -> what is shown
    for claim in claims:
        found = [published(claim, scale) for scale in PUBLISHED_SCALES]
        if any(found):
            shown = [claim.letter, claim.compared, *[text or "n/a" for text in found]]
            of_units.setdefault(claim.unit, {})[claim.letter, claim.lines] = shown
    if not of_units:
        return ""
    heads = {POINTS: "difference of averages in points", TOKENS: "averages of tokens/forward"}
    head = [*PUBLISHED_SCALES.values()]
    tables = [table(["", heads[unit], *head], [*lines.values()], text=(0, 1)) for unit, lines in of_units.items()]
    lead = "**Published:** what the paper's own averages say, from single runs and without intervals."
    return paragraphs(lead, *tables)
