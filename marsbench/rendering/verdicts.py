"""The section of a page that judges the paper's claims: what this run says, and what the paper's own numbers say."""

from __future__ import annotations

from collections.abc import Sequence

from marsbench.findings.cells import Cells
from marsbench.findings.claims import POINTS, TOKENS, Claim
from marsbench.findings.in_words import p_value
from marsbench.findings.published import PUBLISHED_SCALES
from marsbench.rendering.markdown import table
from marsbench.running.plans import TablePlan

HOW_CLAIMS_ARE_JUDGED = (
    "All lines answer the same questions, so two of them are compared question by question: the difference "
    "in points, benchmarks weighing the same, with its 95 % interval (Bonett and Price's on each benchmark, put "
    "together by squares). A claim is *supported* if the whole interval lies above the tested bound, *not supported* "
    "if it lies below, else *inconclusive*. p is McNemar's, exact and two-sided, for a difference of 0, with "
    "questions weighing the same. Nothing is corrected for the number of claims. This page is of one training seed, "
    "so a verdict here is about these checkpoints; the page of claims puts all seeds together."
)


def claims_section(cells: Cells, plan: TablePlan, claims: Sequence[Claim]) -> str:
    """Every claim with its test and its verdict, and what the paper's own numbers say of it."""
    whose = "our own" if plan.own else f"the paper's {plan.name}"
    head = ["", "claim", "tested", "result", "questions", "p (McNemar)", "verdict"]
    lines = []
    for claim in claims:
        finding = claim.judge(cells, plan)
        p = "n/a" if finding.p is None else p_value(finding.p)
        row = [claim.letter, claim.text, claim.tested(plan)]
        lines.append([*row, finding.found, finding.questions, p, finding.verdict])
    parts = [
        f"## Claims of {whose} and what this run says",
        " ".join([HOW_CLAIMS_ARE_JUDGED, *dict.fromkeys(claim.how for claim in claims if claim.how)]),
        table(head, lines, text=(0, 1, 2, 6)),
        "" if plan.own else _published_claims(plan, claims),
    ]
    return "\n\n".join(part for part in parts if part)


def _published_claims(plan: TablePlan, claims: Sequence[Claim]) -> str:
    """The same comparisons between the paper's own averages, as far as its table allows them."""
    of_units: dict[str, dict[tuple[str, str], list[str]]] = {}
    for claim in claims:
        found = [claim.published(plan, scale) for scale in PUBLISHED_SCALES]
        if any(found):
            lines = of_units.setdefault(claim.unit, {})
            lines[claim.letter, claim.compared(plan)] = [text or "n/a" for text in found]
    if not of_units:
        return ""
    lead = "**Published:** what the paper's own averages say, from single runs and without intervals."
    heads = {POINTS: "difference of averages in points", TOKENS: "averages of tokens/forward"}
    parts = [lead]
    for unit, lines in of_units.items():
        head = ["", heads[unit], *PUBLISHED_SCALES.values()]
        parts.append(table(head, [[*key, *texts] for key, texts in lines.items()], text=(0, 1)))
    return "\n\n".join(parts)
