"""The page of claims: every claim of the paper with its test and its verdict, at every scale that has rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from marsbench.findings.cells import PUBLISHED_SCALES
from marsbench.findings.claims import ABSTRACT, Claim, Finding, Judged
from marsbench.findings.collection import Collection
from marsbench.findings.in_words import p_value
from marsbench.overview import claims_figure
from marsbench.overview.index import remarks
from marsbench.presets import preset
from marsbench.rendering import claims as said
from marsbench.rendering.claims import heading, tally, worded
from marsbench.rendering.markdown import filled, folded, paragraphs, table
from marsbench.rendering.sections import reading
from marsbench.studies import regime


def render(judged: Sequence[Judged], collections: Sequence[Collection]) -> str:
    """The page as Markdown: a pure function of rows. Claims are numbered in their order, checks among them."""
    numbered, sentences = list(enumerate(judged, 1)), said.sentences([entry.claim for entry in judged])
    slots = {
        "summary": _summary(judged, collections),
        "checks": said.WHAT_CHECKS_ARE,
        "reading": reading(collections[0].scale),
        "figures": paragraphs(*claims_figure.sections(judged, collections)),
        "by_section": _by_section(judged, collections),
        "caveats": paragraphs(*dict.fromkeys(preset(each.scale).caveat for each in collections)),
        "remarks": paragraphs(*dict.fromkeys(remark for each in collections for remark in remarks(each))),
    }
    parts = [regime.beside({each.scale: each.rows.get("regime", {}) for each in collections})]
    for section in dict.fromkeys(entry.claim.section for entry in judged):
        found = [(number, entry) for number, entry in numbered if entry.claim.section == section]
        parts.append(paragraphs(f"## {heading(section)}", _details(found, sentences, collections)))
    return paragraphs(*filled(__package__, "claims.md", {**slots, "details": folded(*parts)})) + "\n"


def _by_section(judged: Sequence[Judged], collections: Sequence[Collection]) -> str:
    lines = []
    for section in dict.fromkeys(entry.claim.section for entry in judged):
        found = [entry.findings for entry in judged if entry.claim.section == section]
        lines.append([heading(section), *[tally([of[each.scale] for of in found]) for each in collections]])
    return table(["", *[each.scale for each in collections]], lines, text=range(1 + len(collections)))


def _summary(judged: Sequence[Judged], collections: Sequence[Collection]) -> str:
    """A line per scale: how many of the paper's claims it supports, how many were tested, and from how many seeds."""
    lines = []
    for each in collections:
        found = [entry.findings[each.scale] for entry in judged]
        papers = tally([finding for finding in found if finding.claim.papers])
        told = f"{papers} (the paper's alone).", said.corrected(found), each.seeds_in_words
        lines.append(f"- Scale {each.scale}: {' '.join(filter(None, told))}")
    return "\n".join(lines)


def _details(found: Sequence[tuple[int, Judged]], words: Mapping[Claim, str], collections: Sequence[Collection]) -> str:
    published = [f"published, {model}" for model in PUBLISHED_SCALES.values()]
    head = ["#", "claim", "scale", "tested", "effect [95 % interval]", "n", "seeds", "verdict", "p", "p after Holm"]
    head += ["would decide it", *published, "page"]
    lines = []
    for number, entry in found:
        too = " (in the abstract too)" if entry.claim.in_abstract and entry.claim.section != ABSTRACT else ""
        for place, collection in enumerate(collections):
            first = [str(number), f"{words[entry.claim]}{too}"] if place == 0 else ["", ""]
            lines.append([*first, collection.scale, *_detail(entry.findings[collection.scale], collection)])
    return table(head, lines, text=(1, 2, 3, 7, 10, 13))


def _detail(finding: Finding, collection: Collection) -> list[str]:
    claim = finding.claim
    measured, corrected_for = finding.estimate is not None, finding.after_holm is not None
    counted = "" if claim.counts == "questions" else f" {claim.counts}"
    link = collection.links.get(claim.page)
    return [
        said.held_against(claim),
        finding.found,
        f"{said.questions(finding)}{counted}" if measured else "",
        str(finding.seeds) if measured else "",
        f"{'check: ' if claim.check else ''}{worded(finding)}",
        p_value(finding.p) if corrected_for else "",
        p_value(finding.after_holm) if corrected_for else "",
        "" if claim.check else said.in_need(finding.needed, claim.counts),
        *[f"{text} {claim.unit}" if (text := said.published(claim, scale)) else "n/a" for scale in PUBLISHED_SCALES],
        f"[{claim.page}]({link})" if link else "",
    ]
