"""The section of a page that judges the paper's claims: what was measured, and what the paper's own numbers say."""

from __future__ import annotations

from collections.abc import Sequence

from marsbench.findings.claims import POINTS, TOKENS, Claim, Finding
from marsbench.findings.in_words import p_value
from marsbench.findings.published import PUBLISHED_SCALES
from marsbench.findings.seeds import BySeed
from marsbench.presets import preset
from marsbench.rendering.claims import held_against, in_need, outcome, published, questions, sentence, worded
from marsbench.rendering.markdown import paragraphs, table
from marsbench.rendering.sections import reading
from marsbench.running.plans import TablePlan

WHAT_CHECKS_ARE = (
    "Checks: these cannot come out otherwise, by the way that the methods are made, unless something is broken. They "
    "are no evidence for MARS, and are counted apart."
)


def claims_section(seeds: BySeed, plan: TablePlan, claims: Sequence[Claim], scale: str) -> str:
    """Every claim with its test and its verdict over all seeds, and what the paper's own numbers say of it."""
    whose = "our own" if plan.own else f"the paper's {plan.name}"
    found = [(claim, claim.over(seeds.values())) for claim in claims]
    how = dict.fromkeys(claim.how for claim in claims if claim.how)
    return paragraphs(
        f"## Claims of {whose} and what was measured",
        preset(scale).caveat,
        " ".join([reading(scale), *how]),
        _judged([(claim, finding) for claim, finding in found if not claim.check]),
        _checks([(claim, finding) for claim, finding in found if claim.check]),
        "" if plan.own else _published_claims(claims),
    )


def _judged(found: Sequence[tuple[Claim, Finding]]) -> str:
    head = ["", "claim", "tested", "result", "questions", "seeds", "p", "verdict", "would decide it"]
    lines = [
        [*_line(claim, finding), p_value(finding.p), worded(claim, finding), in_need(finding.needed)]
        for claim, finding in found
    ]
    return table(head, lines, text=(0, 1, 2, 7, 8))


def _checks(found: Sequence[tuple[Claim, Finding]]) -> str:
    head = ["", "check", "checked", "result", "questions", "seeds", "outcome"]
    lines = [[*_line(claim, finding), outcome(finding.verdict)] for claim, finding in found]
    return f"{WHAT_CHECKS_ARE}\n\n{table(head, lines, text=(0, 1, 2, 6))}" if lines else ""


def _line(claim: Claim, finding: Finding) -> list[str]:
    seeds = "n/a" if finding.estimate is None else str(finding.seeds)
    return [claim.letter, sentence(claim), held_against(claim), finding.found, questions(finding), seeds]


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
    lead = "**Published:** what the paper's own averages say, from single runs and without intervals."
    heads = {POINTS: "difference of averages in points", TOKENS: "averages of tokens/forward"}
    parts = [lead]
    for unit, lines in of_units.items():
        head = ["", heads[unit], *PUBLISHED_SCALES.values()]
        parts.append(table(head, list(lines.values()), text=(0, 1)))
    return paragraphs(*parts)
