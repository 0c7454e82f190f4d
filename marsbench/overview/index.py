"""The index: every claim with the paper's number, what was measured and the verdict, then a line for every page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from marsbench.findings.claims import Finding, Judged
from marsbench.findings.collection import Collection
from marsbench.presets import preset
from marsbench.rendering import claims as said
from marsbench.rendering.markdown import filled, paragraphs, table
from marsbench.rendering.sections import reading
from marsbench.studies import items, studies, study_of
from marsbench.studies.study import Item

EXPLORE = "explore.html"


def render(judged: Sequence[Judged], collections: Sequence[Collection]) -> str:
    papers = [entry for entry in judged if entry.claim.papers]
    ours = [entry for entry in judged if not entry.claim.papers]
    reasons = dict.fromkeys(entry.claim.untestable for entry in papers if entry.claim.untestable and _known(entry))
    slots = {
        "tallies": "\n".join(_tallies(judged, collections)),
        "judged": said.HOW_CLAIMS_ARE_JUDGED,
        "reading": reading(collections[0].scale),
        "caveats": paragraphs(*dict.fromkeys(remark for each in collections for remark in remarks(each))),
        "papers": _table(papers, collections),
        "untestable": f"Not testable here: {' '.join(reasons)}" if reasons else "",
        "ours": _table(ours, collections),
        "pages": _pages(judged, collections),
    }
    return "".join(filled(__package__, "index.md", slots)) + "\n"


def _known(entry: Judged) -> bool:
    return any(found.estimate is not None for found in entry.findings.values())


def _tallies(judged: Sequence[Judged], collections: Sequence[Collection]) -> Iterator[str]:
    """A line per scale: what it is, and what the claims come to there."""
    for each in collections:
        found = [(each.scale, entry.findings[each.scale]) for entry in judged]
        papers = said.tally((scale, one) for scale, one in found if one.claim.papers)
        ours = said.tally((scale, one) for scale, one in found if not one.claim.papers)
        counts = [f"{whose} {what}" for whose, what in {"of the paper's claims": papers, "of ours": ours}.items() if what]
        if counts:
            yield f"- Scale {each.scale}, {preset(each.scale).summary}: {'; '.join(counts)}. {each.seeds_in_words}"


def _table(judged: Sequence[Judged], collections: Sequence[Collection]) -> str:
    """Claims as pages show them, each at every scale that measured it."""
    head = ["#", "claim", "the paper", "measured [95 %]", "n", "verdict", "p after Holm", "page"]
    lines = []
    for entry in judged:
        for each in collections:
            found = entry.findings[each.scale]
            if found.estimate is not None:
                lines.append([said.heading(entry.claim.section), *_line(found, each)])
    head[0] = "where"
    return table(head, lines, text=range(len(head)))


def _line(found: Finding, collection: Collection) -> list[str]:
    claim = found.claim
    *_, after_holm = said.details(claim, found)
    shown = [said.published(claim), said.measured(found), said.counted(found)]
    page = study_of(claim.page).page
    link = collection.links.get(page)
    return [claim.text, *shown, said.verdict(found, collection.scale), after_holm, f"[{page}]({link})" if link else ""]


def remarks(collection: Collection) -> list[str]:
    """What studies have to say of one scale's rows on the pages about the whole paper."""
    return [told for study in studies().values() if (told := study.remark(collection.of(study.key)))]


def _pages(judged: Sequence[Judged], collections: Sequence[Collection]) -> str:
    """A line for everything that can be reproduced, in the paper's order, our own pages last."""
    head = ["", "asks", *[each.scale for each in collections], "command"]
    lines = [
        [item.name, item.asks, *[_linked(item, judged, each) for each in collections], f"`nox -s {item.session}`"]
        for item in items()
    ]
    return table(head, lines, text=range(len(head)))


def _linked(item: Item, judged: Sequence[Judged], collection: Collection) -> str:
    """What came out, with the way to the page; empty where a scale has no rows of it."""
    study = study_of(item.key)
    if study.key not in collection.rows:
        return ""
    found = [(collection.scale, entry.findings[collection.scale]) for entry in judged if entry.claim.item == item.key]
    told = study.tally(collection.rows[study.key]) if study.tally else said.tally(found) or "measured"
    link = collection.links.get(study.page)
    return f"[{told}]({link}{item.anchor})" if link else told
