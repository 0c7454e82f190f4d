"""The page of claims: every claim of the paper with its test and its verdict, at every scale that has rows."""

from __future__ import annotations

from collections.abc import Sequence

from marsbench.findings.collection import Collection
from marsbench.findings.paper_claims import ABSTRACT, Judged, tally
from marsbench.findings.published import PUBLISHED_SCALES
from marsbench.overview import claims_figure
from marsbench.overview.remarks import remarks
from marsbench.rendering.markdown import table

HOW_TO_READ_THE_CLAIMS = (
    "Every claim of the MARS paper (arXiv 2604.07023) that is tested here, in our words, in the order of the paper. A "
    "claim is *supported* if the whole 95 % interval of its effect lies beyond the tested bound, *not supported* if it "
    "lies on the other side, *inconclusive* if it holds the bound, and *not run* where nothing was measured; so a "
    "line that is surely worse, but not surely by the 2 points of non-inferiority, is inconclusive. Nothing is "
    "corrected for the number of claims, and what the paper claims in two places counts twice. Claims of our own, and "
    "what was reported elsewhere, stand last."
)
HOW_SEEDS_ARE_PUT_TOGETHER = (
    "Where a claim was measured with several training seeds, its effect is that of all of them pooled per question, "
    "and the interval covers the luck of training as well as the draw of questions: by squares, the interval of the "
    "pooled answers and Student's interval of the mean over seeds. With one seed it covers the draw of questions (or "
    "of timed laps) alone. A fastest setting is chosen on the laps that judge it, which flatters it a little."
)


def numbers(judged: Sequence[Judged]) -> list[tuple[int, Judged]]:
    """Claims with the numbers that the page and its figure give them: those of their order."""
    return list(enumerate(judged, 1))


def render(judged: Sequence[Judged], collections: Sequence[Collection]) -> str:
    """The page as Markdown: a pure function of rows."""
    numbered = numbers(judged)
    sections = [
        "# The paper's claims and what was measured",
        f"{HOW_TO_READ_THE_CLAIMS} {HOW_SEEDS_ARE_PUT_TOGETHER}",
        _summary(judged, collections),
        *[remark for one in collections for remark in remarks(one)],
        _verdicts(numbered, collections),
        *claims_figure.sections(numbered, collections),
    ]
    for section in dict.fromkeys(one.claim.section for one in judged):
        found = [(number, one) for number, one in numbered if one.claim.section == section]
        sections += [f"## {section}", _details(found, collections)]
    return "\n\n".join(sections) + "\n"


def _summary(judged: Sequence[Judged], collections: Sequence[Collection]) -> str:
    """A line per scale: how many of the paper's claims it supports, and from how many seeds."""
    papers = [one for one in judged if one.papers]
    return "\n".join(f"- Scale {one.scale}: {tally(papers, one.scale)}. {one.seeds_in_words}" for one in collections)


def _verdicts(numbered: Sequence[tuple[int, Judged]], collections: Sequence[Collection]) -> str:
    head = ["#", "where", "claim", *[one.scale for one in collections]]
    lines = []
    for number, one in numbered:
        also = "; abstract" if one.claim.in_abstract and one.claim.section != ABSTRACT else ""
        verdicts = [one.findings[collection.scale].verdict for collection in collections]
        lines.append([str(number), one.claim.section + also, one.claim.text, *verdicts])
    return table(head, lines, text=range(1, len(head)))


def _details(numbered: Sequence[tuple[int, Judged]], collections: Sequence[Collection]) -> str:
    """A line per claim and scale."""
    published = [f"published, {model}" for model in PUBLISHED_SCALES.values()]
    head = ["#", "scale", "tested", "effect [95 % interval]", "n", "seeds", "verdict", *published, "page"]
    lines = [
        [str(number), collection.scale, *_detail(one, collection)]
        for number, one in numbered
        for collection in collections
    ]
    return table(head, lines, text=(1, 2, 6, 9))


def _detail(judged: Judged, collection: Collection) -> list[str]:
    claim, finding = judged.claim, judged.findings[collection.scale]
    measured = finding.estimate is not None
    counted = "" if claim.counts == "questions" else f" {claim.counts}"
    link = collection.links.get(claim.page)
    return [
        claim.tested,
        finding.found,
        f"{finding.questions}{counted}" if measured else "",
        str(finding.seeds) if measured else "",
        finding.verdict,
        *[claim.published(scale) or "n/a" for scale in PUBLISHED_SCALES],
        f"[{claim.page}]({link})" if link else "",
    ]
