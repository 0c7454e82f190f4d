"""The index: one line for every table, figure and page, and the main answers before them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

from marsbench.findings.claims import ABSTRACT, Claim, Judged
from marsbench.findings.collection import Collection
from marsbench.presets import preset
from marsbench.rendering.claims import corrected, fallen, held_against, outcome, sentences, tally
from marsbench.rendering.markdown import paragraphs, table
from marsbench.rendering.sections import command
from marsbench.studies import items, studies, study_of

CLAIMS = "claims"  # the page of claims, which has no rows of its own
OPENING = (
    "MARS (arXiv 2604.07023) fine-tunes an ordinary language model so that one forward pass can yield several tokens. "
    "Mask tokens are put behind the text; the model predicts the next token and, at the masks, those after it. "
    "Predictions are accepted from the left as long as the model's confidence reaches a threshold. The model keeps its "
    "architecture, and when it accepts one token per forward pass it decodes like any other. This page leads to every "
    "table and figure of the paper that reports measurements, as it was measured here; every verdict rests on a test "
    f"that [the page of claims]({CLAIMS}.md) shows with its numbers."
)
WORDS = {
    "AR": "autoregressive decoding, the ordinary way: one token per forward pass",
    "AR SFT": "the model before MARS, fine-tuned on the same conversations in the ordinary way",
    "SFT loss": "the loss of that ordinary fine-tuning; MARS adds a loss on masked tokens to it",
    "B, tau": "the block size, which is how many tokens a forward pass predicts; the threshold of confidence",
    "tokens/forward": "tokens of an answer over the forward passes that they took; AR has 1",
    "KV cache": "what a model keeps of earlier tokens; the *block-level cache* is the paper's, for batches: it takes "
    "in B_cache tokens at a time",
    "verified MARS": "ours: masks draft, and the same model checks the drafts, so the tokens are those of AR",
    "speculative decoding": "a small draft model proposes tokens and the target, a large one, checks them",
    "Jacobi decoding": "guesses at the next tokens, corrected by one forward pass after another; needs no training",
    "points": "percentage points of accuracy, averaged over the benchmarks",
    "[a, b]": "a 95 % interval",
    "supported": "the whole interval lies beyond the tested bound; *not supported*: on the other side; *inconclusive*: "
    "it holds the bound, even if it excludes 0",
    "check": "what cannot come out otherwise unless something is broken; counted apart from the claims",
    "non-inferiority": 'the test behind "matches" and "level": worse by less than 2 points',
    "rows of": "the days on which the numbers were measured",
}


class Line(NamedTuple):
    """A line of the index."""

    key: str  # as claims name what they belong to
    name: str
    asks: str
    page: str
    anchor: str
    session: str  # that makes the page


def lines() -> list[Line]:
    """A line for everything that can be reproduced, in the paper's order; the page of claims stands before our own."""
    found = [
        Line(item.key, item.name, item.asks, study_of(item.key).key, item.anchor, item.session) for item in items()
    ]
    ours = next((place for place, item in enumerate(items()) if not item.section), len(found))
    claims = Line(CLAIMS, "Claims", "every claim of the paper with its test and verdict", CLAIMS, "", "reproduce-all")
    return [*found[:ours], claims, *found[ours:]]


def render(judged: Sequence[Judged], collections: Sequence[Collection]) -> str:
    """The page as Markdown: a pure function of rows."""
    words = table(["word", "meaning"], [[*entry] for entry in WORDS.items()], text=(0, 1))
    sections = ["# The MARS paper, table by table", OPENING, words]
    for collection in collections:
        sections += [f"## Scale {collection.scale}", _scale(judged, collection), *_answers(judged, collection)]
        sections.append(_table(judged, collection))
    return paragraphs(*sections) + "\n"


def _scale(judged: Sequence[Judged], collection: Collection) -> str:
    """What the scale is, how many models and verdicts there are, and what these are not."""
    said = [f"Scale {collection.scale} is {preset(collection.scale).summary}."]
    said.append(collection.seeds_in_words)
    if len(collection.seeds) > 1:
        said.append("Every verdict, here and on the pages, is of all of them; tables on the pages show seed 0.")
    said.append(corrected(judged, collection.scale))
    return paragraphs(" ".join(filter(None, said)), preset(collection.scale).caveat)


def _answers(judged: Sequence[Judged], collection: Collection) -> Iterator[str]:
    """What the abstract claims, what else did not hold, and the best settings: verdicts with their numbers."""
    of_abstract = [one for one in judged if one.claim.in_abstract]
    of_abstract.sort(key=lambda one: one.claim.section == ABSTRACT)  # what no section takes up comes last
    failed = [one for one in judged if one.claim.papers and one.findings[collection.scale].verdict == "not supported"]
    ours = [one for one in judged if one.claim.item == "speedup" and not one.claim.papers]
    parts = {
        "What the paper's abstract claims, and what was measured here:": of_abstract,
        "Other claims of the paper that did not hold here:": [one for one in failed if one not in of_abstract],
        "And how much faster than AR decoding MARS and verified MARS are at their best settings:": ours,
    }
    said = sentences([one.claim for one in judged])
    for lead, found in parts.items():
        if found:
            yield "\n".join([lead, "", *_bullets(found, said, collection.scale)])
    yield from remarks(collection)


def remarks(collection: Collection) -> list[str]:
    """What studies have to say of one scale's rows on the pages about the whole paper."""
    found = [study.remark(collection.of(study.key)) for study in studies().values()]
    return [remark for remark in found if remark]


def _bullets(judged: Sequence[Judged], said: Mapping[Claim, str], scale: str) -> list[str]:
    """A line per claim; claims that differ in their batch size alone share one."""
    alike: dict[Hashable, list[Judged]] = {}
    for one in judged:
        claim = one.claim
        alike.setdefault(claim if claim.batch_size is None else (claim.page, claim.name), []).append(one)
    return [
        _bullet(found[0], said, scale) if len(found) == 1 else _bullet_by_batch(found, scale)
        for found in alike.values()
    ]


def _bullet(judged: Judged, said: Mapping[Claim, str], scale: str) -> str:
    finding = judged.findings[scale]
    measured = f" {finding.found} ({held_against(judged.claim)})." if finding.estimate else ""
    verdict = f"{outcome(finding.verdict)} (a check)" if judged.claim.check else finding.verdict
    return f"- {said[judged.claim]}: **{verdict}**{fallen(finding)}.{measured}"


def _bullet_by_batch(judged: Sequence[Judged], scale: str) -> str:
    parts = []
    for one in judged:
        finding, size = one.findings[scale], one.claim.batch_size
        measured = f" {finding.found}" if finding.estimate else ""
        parts.append(f"at batch {size} **{finding.verdict}**{fallen(finding)}{measured}")
    return f"- {judged[0].claim.text}: {', '.join(parts)}."


def _table(judged: Sequence[Judged], collection: Collection) -> str:
    head = ["", "asks", "verdict", "rows of", "command", "page"]
    cells = []
    for line in lines():
        verdict, days = _verdict(line, judged, collection), _dates(line, collection)
        how, link = command(line.session, collection.scale), _link(line, collection)
        cells.append([line.name, line.asks, verdict, days, how, f"[{line.page}.md]({link})" if link else ""])
    return table(head, cells, text=range(len(head)))


def _link(line: Line, collection: Collection) -> str:
    if line.page == CLAIMS:
        return f"{CLAIMS}.md"
    return collection.links[line.page] + line.anchor if line.page in collection.links else ""


def _verdict(line: Line, judged: Sequence[Judged], collection: Collection) -> str:
    """How many of a line's claims are supported; the paper's own, where it has any."""
    if line.page != CLAIMS and line.page not in collection.rows:
        return "not run"
    if line.page != CLAIMS and (own := study_of(line.page).tally):
        return own(collection.rows[line.page])
    of_line = [one for one in judged if line.page == CLAIMS or one.claim.item == line.key]
    counted = [one for one in of_line if one.claim.papers] or of_line
    return tally(counted, collection.scale) if counted else "measured"


def _dates(line: Line, collection: Collection) -> str:
    """The days on which a line's rows were measured, from the first to the last."""
    rows = [row for of_seed in collection.of(line.page) for row in of_seed]
    days = sorted(str(row.provenance["started"])[:10] for row in rows if row.provenance.get("started"))
    return " to ".join(dict.fromkeys([days[0], days[-1]])) if days else ""
