"""The index: what was found, claim by claim and scale by scale, then a line for everything that can be reproduced."""

from __future__ import annotations

from collections.abc import Sequence

from marsbench.findings.cells import PUBLISHED_SCALES
from marsbench.findings.claims import Judged, number
from marsbench.findings.collection import Collection
from marsbench.presets import preset
from marsbench.rendering.claims import bullet, corrected, published, tally, worded
from marsbench.rendering.markdown import folded, paragraphs, table
from marsbench.rendering.sections import reading
from marsbench.studies import items, studies, study_of
from marsbench.studies.study import Item

CLAIMS = "claims"  # the page of claims, which has no rows of its own
EXPLORE = "explore.html"
OPENING = (
    "MARS (arXiv 2604.07023) fine-tunes an ordinary language model so that one forward pass can yield several tokens. "
    "Mask tokens are put behind the text; the model predicts the next token and, at the masks, those after it, and "
    "predictions are accepted from the left as long as the model's confidence reaches a threshold."
)
# Page and name of the claims that the index begins with.
_FIRST = (
    ("table2", "matches-ar-sft"), ("table2", "paper-matches-ar-sft"), ("table2", "beats-more-ar"),
    ("table2", "sft-loss"), ("table4", "several-tokens-b4"), ("table4", "level-b4"), ("table4", "more-tokens-b8"),
    ("table9", "beats-jacobi"), ("speedup", "cache-faster"), ("speedup", "load"), ("serving", "lower-tau"),
    ("serving", "over-ar"), ("serving", "one-at-a-time"), ("speedup", "best-verified"),
    ("real-model", "adapter-drafts"),
)  # fmt: skip
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
    "it holds the bound; *significantly worse*: surely a loss, not surely more than is allowed; *moot*: about a gain "
    "that is not there",
    "check": "what cannot come out otherwise unless something is broken; counted apart from the claims",
    "non-inferiority": 'the test behind "matches" and "level": worse by less than 2 points',
}


def render(judged: Sequence[Judged], collections: Sequence[Collection]) -> str:
    sections = [
        "# The MARS paper, claim by claim",
        _findings(judged, collections),
        f"{OPENING} {reading(collections[0].scale)} [The page of claims]({CLAIMS}.md) has every claim with its test.",
        paragraphs(*dict.fromkeys(preset(one.scale).caveat for one in collections)),
        "## Every page",
        _table(judged, collections),
        f"`-- --scale NAME` behind a command makes the same at another scale. [A page to explore]({EXPLORE}), for a "
        "browser, has every contender over any baseline, and answers side by side.",
        folded(*[_scale(judged, collection) for collection in collections]),
        "## Words",
        table(["word", "meaning"], [[*entry] for entry in WORDS.items()], text=(0, 1)),
    ]
    return paragraphs(*sections) + "\n"


def _findings(judged: Sequence[Judged], collections: Sequence[Collection]) -> str:
    """The claims that matter most: what the paper has, what every scale measured, and the verdict."""
    lines = []
    for key in _FIRST:
        alike = [one for one in judged if (one.claim.page, one.claim.name) == key]
        if any(one.findings[each.scale].estimate for one in alike for each in collections):
            sizes = " / ".join(str(one.claim.batch_size) for one in alike if one.claim.batch_size is not None)
            paper = []
            for scale, model in PUBLISHED_SCALES.items():
                if said := [text for one in alike if (text := published(one.claim, scale))]:
                    paper.append(f"{' / '.join(said)} ({model.removeprefix('Qwen2.5 ')})")
            measured = [_measured(alike, each.scale) for each in collections]
            text = alike[0].claim.text + (f", batch {sizes}" if sizes else "")
            lines.append([text, " / ".join(paper), *measured, _worded(alike, collections)])
    head = ["claim", "the paper", *[each.scale for each in collections], "verdict"]
    return table(head, lines, text=(0, len(head) - 1)) if lines else ""


def _measured(alike: Sequence[Judged], scale: str) -> str:
    found = [one.findings[scale] for one in alike]
    if len(found) == 1:
        return found[0].found if found[0].estimate else ""
    known = [number(one.estimate.value, one.unit, signed=one.signed) for one in found if one.estimate]
    return f"{' / '.join(known)} {found[0].unit}" if known else ""


def _worded(alike: Sequence[Judged], collections: Sequence[Collection]) -> str:
    """The verdicts of the scales that measured a claim, once where they agree."""
    said = {
        each.scale: " / ".join(dict.fromkeys(worded(one.claim, one.findings[each.scale]) for one in alike))
        for each in collections
        if any(one.findings[each.scale].estimate for one in alike)
    }
    if len({*said.values()}) == 1:
        return next(iter(said.values()))
    return "; ".join(f"{scale}: {verdict}" for scale, verdict in said.items())


def _scale(judged: Sequence[Judged], collection: Collection) -> str:
    """What the scale is, how many models and verdicts there are, and what did not hold."""
    scale = collection.scale
    said = [f"Scale {scale} is {preset(scale).summary}.", collection.seeds_in_words, corrected(judged, scale)]
    failed = "\n".join(
        bullet(one.claim, one.findings[scale])
        for one in judged
        if one.claim.papers and one.findings[scale].verdict in ("not supported", "significantly worse")
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
        [item.name, item.asks, *[_linked(item, judged, one) for one in collections], f"`nox -s {item.session}`"]
        for item in items()
    ]
    every = [f"[{_verdict(judged, one)}]({CLAIMS}.md)" for one in collections]
    claims = ["Claims", "every claim of the paper with its test and verdict", *every, "`nox -s reproduce-all`"]
    shown.insert(next((place for place, item in enumerate(items()) if not item.section), len(shown)), claims)
    return table(head, shown, text=range(len(head)))


def _linked(item: Item, judged: Sequence[Judged], collection: Collection) -> str:
    """What came out, with the way to the page; empty where a scale has no rows of it."""
    page = study_of(item.key)
    if page.key not in collection.rows:
        return ""
    of_item = [one for one in judged if one.claim.item == item.key]
    verdict = page.tally(collection.rows[page.key]) if page.tally else _verdict(of_item, collection)
    return f"[{verdict}]({collection.links[page.key]}{item.anchor})" if page.key in collection.links else verdict


def _verdict(judged: Sequence[Judged], collection: Collection) -> str:
    """How many of some claims are supported; the paper's own, where there are any."""
    counted = [one for one in judged if one.claim.papers] or judged
    return tally(counted, collection.scale) if counted else "measured"
