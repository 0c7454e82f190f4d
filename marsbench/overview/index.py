"""The index: every claim with the paper's number, what was measured and the verdict, then a line for every page."""

from collections.abc import Sequence
from itertools import product
from pathlib import PurePosixPath

from marsbench.findings.claims import Judged
from marsbench.findings.collection import Collection
from marsbench.presets import preset
from marsbench.rendering import claims_in_words as said
from marsbench.rendering.markdown import filled, table
from marsbench.rendering.sections import reading
from marsbench.statistics.decisions import SIGNIFICANT
from marsbench.studies import items, study_of
from marsbench.studies.study import Study

EXPLORE = "explore"  # what stands on that page has none in Markdown


def render(judged: Sequence[Judged], collections: Sequence[Collection]) -> str:
    papers = [entry for entry in judged if entry.claim.papers]
    ours = [entry for entry in judged if not entry.claim.papers]
    known = [entry for entry in papers if any(result.estimate is not None for result in entry.findings.values())]
    pages = []
    for item in items():
        study = study_of(item.key)
        links = [(study.page, link + item.anchor) for each in collections if (link := link_of(study, each))]
        pages.append([item.name, item.asks, ", ".join(f"[{page}]({link})" for page, link in links)])
    tallies = []
    for each in collections:
        whose = {"of the paper's claims": papers, "of ours": ours}
        results = {words: [(each.scale, entry.findings[each.scale]) for entry in some] for words, some in whose.items()}
        counts = [f"{words} {tally}" for words, some in results.items() if (tally := said.tally(some))]
        if counts:
            summary = f"Scale {each.scale}, {preset(each.scale).summary}"
            tallies.append(f"- {summary}: {'; '.join(counts)}. {each.seeds_in_words}")
    slots = {
        "tallies": "\n".join(tallies),
        "significant": f"{SIGNIFICANT:.2f}",
        "reading": reading(collections[0].scale),
        "papers": _table(papers, collections),
        "untestable": said.untestable(entry.claim for entry in known),
        "ours": _table(ours, collections),
        "pages": table(["", "asks", "page"], pages, text=range(3)),
    }
    return "".join(filled(__package__, "index.md", slots)) + "\n"


def _table(judged: Sequence[Judged], collections: Sequence[Collection]) -> str:
    """Claims as pages show them, each at every scale that measured it; the paper's with the number there."""
    papers, entries = any(entry.claim.papers for entry in judged), []
    for entry, each in product(judged, collections):
        if (one := entry.findings[each.scale]).estimate is not None:
            study, section = study_of(entry.claim.page), entry.claim.section
            where, link = said.heading(section) if section else study.page, link_of(study, each)
            entries.append(([f"[{where}]({link})" if link else where, entry.claim.text], each.scale, one))
    return said.claims_table(entries, "", "claim", papers=papers)


def link_of(study: Study, collection: Collection) -> str:
    """The way to the page that a study stands on; empty where a scale has no rows of it."""
    link = collection.links.get(study.key, "")
    ending = ".html" if study.page == EXPLORE else ".md"
    return str(PurePosixPath(link).with_name(study.page + ending)) if link else ""
