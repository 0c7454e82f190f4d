"""The index: what was found, claim by claim and scale by scale, then a line for everything that can be reproduced."""

from __future__ import annotations

from collections.abc import Sequence

from marsbench.findings.cells import PUBLISHED_SCALES
from marsbench.findings.claims import Judged, number
from marsbench.findings.collection import Collection
from marsbench.presets import preset
from marsbench.rendering.claims import bullet, corrected, published, tally, worded
from marsbench.rendering.markdown import filled, folded, paragraphs, table
from marsbench.rendering.sections import reading
from marsbench.studies import items, studies, study_of
from marsbench.studies.study import Item

CLAIMS = "claims"  # the page of claims, which has no rows of its own
EXPLORE = "explore.html"
# Page and name of the claims that the index begins with.
_FIRST = (
    ("table2", "matches-ar-sft"), ("table2", "paper-matches-ar-sft"), ("table2", "beats-more-ar"),
    ("table2", "sft-loss"), ("table4", "several-tokens-b4"), ("table4", "level-b4"), ("table4", "more-tokens-b8"),
    ("table9", "beats-jacobi"), ("speedup", "cache-faster"), ("speedup", "load"), ("serving", "lower-tau"),
    ("serving", "over-ar"), ("serving", "one-at-a-time"), ("speedup", "best-verified"),
    ("adapter", "adapter-drafts"), ("real-model", "adapter-drafts"),
)  # fmt: skip


def render(judged: Sequence[Judged], collections: Sequence[Collection]) -> str:
    slots = {
        "findings": _findings(judged, collections),
        "reading": reading(collections[0].scale),
        "caveats": paragraphs(*dict.fromkeys(preset(each.scale).caveat for each in collections)),
        "pages": _table(judged, collections),
        "scales": folded(*[_scale(judged, collection) for collection in collections]),
    }
    return "".join(filled(__package__, "index.md", slots)) + "\n"


def _findings(judged: Sequence[Judged], collections: Sequence[Collection]) -> str:
    """The claims that matter most: what the paper has, what every scale measured, and the verdict."""
    lines = []
    for key in _FIRST:
        alike = [entry for entry in judged if (entry.claim.page, entry.claim.name) == key]
        if any(entry.findings[each.scale].estimate for entry in alike for each in collections):
            sizes = " / ".join(str(entry.claim.batch_size) for entry in alike if entry.claim.batch_size is not None)
            paper = []
            for scale, model in PUBLISHED_SCALES.items():
                if said := [text for entry in alike if (text := published(entry.claim, scale))]:
                    paper.append(f"{' / '.join(said)} ({model.removeprefix('Qwen2.5 ')})")
            measured = [_measured(alike, each.scale) for each in collections]
            text = alike[0].claim.text + (f", batch {sizes}" if sizes else "")
            lines.append([text, " / ".join(paper), *measured, _worded(alike, collections)])
    head = ["claim", "the paper", *[each.scale for each in collections], "verdict"]
    return table(head, lines, text=(0, len(head) - 1))


def _measured(alike: Sequence[Judged], scale: str) -> str:
    found = [entry.findings[scale] for entry in alike]
    if len(found) == 1:
        return found[0].found if found[0].estimate else ""
    unit = found[0].claim.unit
    known = [number(said.estimate.value, unit, signed=said.claim.signed) for said in found if said.estimate]
    return f"{' / '.join(known)} {unit}" if known else ""


def _worded(alike: Sequence[Judged], collections: Sequence[Collection]) -> str:
    """The verdicts of the scales that measured a claim, once where they agree."""
    said = {
        each.scale: " / ".join(dict.fromkeys(worded(entry.findings[each.scale]) for entry in alike))
        for each in collections
        if any(entry.findings[each.scale].estimate for entry in alike)
    }
    if len({*said.values()}) == 1:
        return next(iter(said.values()))
    return "; ".join(f"{scale}: {verdict}" for scale, verdict in said.items())


def _scale(judged: Sequence[Judged], collection: Collection) -> str:
    """What the scale is, how many models and verdicts there are, and what did not hold."""
    scale, found = collection.scale, [entry.findings[collection.scale] for entry in judged]
    said = [f"Scale {scale} is {preset(scale).summary}.", collection.seeds_in_words, corrected(found)]
    failed = "\n".join(
        bullet(finding)
        for finding in found
        if finding.claim.papers and finding.verdict in ("not supported", "significantly worse")
    )
    lead = "Claims of the paper that did not hold here:" if failed else ""
    return paragraphs(f"## Scale {scale}", " ".join(filter(None, said)), lead, failed, *remarks(collection))


def remarks(collection: Collection) -> list[str]:
    """What studies have to say of one scale's rows on the pages about the whole paper."""
    return [said for study in studies().values() if (said := study.remark(collection.of(study.key)))]


def _table(judged: Sequence[Judged], collections: Sequence[Collection]) -> str:
    """A line for everything that can be reproduced, in the paper's order; the page of claims stands before our own."""
    head = ["", "asks", *[each.scale for each in collections], "command"]
    shown = [
        [item.name, item.asks, *[_linked(item, judged, each) for each in collections], f"`nox -s {item.session}`"]
        for item in items()
    ]
    every = [
        f"[{_verdict(judged, each)}]({CLAIMS}.md)"
        if not each.rows or any(entry.claim.papers and entry.findings[each.scale].estimate for entry in judged)
        else ""
        for each in collections
    ]
    claims = ["Claims", "every claim of the paper with its test and verdict", *every, "`nox -s reproduce-all`"]
    shown.insert(next((place for place, item in enumerate(items()) if not item.section), len(shown)), claims)
    return table(head, shown, text=range(len(head)))


def _linked(item: Item, judged: Sequence[Judged], collection: Collection) -> str:
    """What came out, with the way to the page; empty where a scale has no rows of it."""
    page = study_of(item.key)
    if page.key not in collection.rows:
        return ""
    of_item = [entry for entry in judged if entry.claim.item == item.key]
    verdict = page.tally(collection.rows[page.key]) if page.tally else _verdict(of_item, collection)
    return f"[{verdict}]({collection.links[page.key]}{item.anchor})" if page.key in collection.links else verdict


def _verdict(judged: Sequence[Judged], collection: Collection) -> str:
    """How many of some claims are supported; the paper's own, where there are any."""
    counted = [entry for entry in judged if entry.claim.papers] or judged
    return tally([entry.findings[collection.scale] for entry in counted]) or "measured"
