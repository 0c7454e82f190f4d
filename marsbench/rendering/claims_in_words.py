"""Claims in words: a table of what is claimed, published and measured, for pages, the index and the README."""

from collections import Counter
from collections.abc import Iterable, Sequence
from math import inf

from marsbench.findings.cells import PUBLISHED_SCALES
from marsbench.findings.claims import Claim, Finding, Section, finding
from marsbench.findings.seeds import BySeed
from marsbench.presets import preset
from marsbench.rendering.markdown import paragraphs, table

_UNTESTABLE, _CONSTRUCTED = "not testable here", "by construction"
_IN_TURN = ("holds", "does not hold", "open", _UNTESTABLE, _CONSTRUCTED)  # of a tally, without what was not run
_PLURAL = {"holds": "hold", "does not hold": "do not hold"}


def heading(section: Section) -> str:
    if section.number:
        return f"Section {'.'.join(map(str, section.number))}"
    return f"Appendix {section.appendix}" if section.appendix else section.title


def tested(claim: Claim) -> str:
    """What is measured, and its bound."""
    bound, what = claim.bound, claim.compared
    if bound.high == inf:
        return f"{what} > {bound.low:g}"
    if bound.low == -inf:
        return f"{what} < {bound.high:g}"
    return f"{bound.low:g} < {what} < {bound.high:g}"


def published(claim: Claim) -> str:
    """The effect in the paper's own numbers, model by model; empty without any."""
    said = {name.removeprefix("Qwen2.5 "): claim.published(scale) for scale, name in PUBLISHED_SCALES.items()}
    return ", ".join(f"{claim.number(of)} ({name})" for name, of in said.items() if of is not None)


def verdict(result: Finding, scale: str) -> str:
    claim = result.claim
    if result.estimate is None:
        return "not run"
    if claim.check:
        return _CONSTRUCTED if result.side == "holds" else f"broken: {result.side}"
    if claim.untestable:
        return _UNTESTABLE
    toy = preset(scale).world is not None and result.verdict != "open"
    return f"{result.verdict}{' in the toy' if toy else ''}"


def measured(result: Finding) -> str:
    """The effect with its interval and unit, and what is shown beside it."""
    beside = [f"{words}: {other.number}" for words, other in result.beside if other.estimate is not None]
    return "; ".join([result.found, *beside])


def counted(result: Finding) -> str:
    if result.estimate is None:
        return ""
    of = f" {result.measured.counts}" if result.measured.counts else ""
    return f"{result.estimate.n:,}{of}; {result.seeds} seed{'' if result.seeds == 1 else 's'}"


def claims_table(entries: Iterable[tuple[Sequence[str], str, Finding]], *heads: str, papers: bool = True) -> str:
    """A table of findings. Each entry has the first cells of its line (below `heads`), the scale and the finding."""
    lines = []
    for before, scale, result in entries:
        paper = [published(result.claim)] if papers else []
        lines.append([*before, *paper, measured(result), counted(result), verdict(result, scale)])
    head = [*heads, *(["the paper"] if papers else []), "measured [95 %]", "n", "verdict"]
    return table(head, lines, text=range(len(head)))


def numbers_of(findings: Iterable[Finding]) -> dict[str, str]:
    """For slots of a layout: `name` is a claim's number, `by_name` a difference in words; empty if it is not measured.

    `name1` is the first number that is shown beside the claim's, `name2` the second.
    """
    known = {
        f"{result.claim.name.replace('-', '_')}{place or ''}": each
        for result in findings
        for place, each in enumerate([result, *[beside for _, beside in result.beside]])
    }
    numbers = {name: result.number if result.estimate else "" for name, result in known.items()}
    return numbers | {f"by_{name}": result.by if result.estimate else "" for name, result in known.items()}


def page_claims(claims: Iterable[Claim], seeds: BySeed, scale: str) -> str:
    results = [result for claim in claims if (result := finding(claim, seeds)).estimate is not None]
    entries = [([f"{'' if result.claim.papers else 'Ours: '}{result.claim.text}"], scale, result) for result in results]
    return paragraphs(claims_table(entries, "claim"), untestable(result.claim for result in results))


def untestable(claims: Iterable[Claim]) -> str:
    reasons = dict.fromkeys(claim.untestable for claim in claims if claim.untestable)
    return f"Not testable here: {' '.join(reasons)}" if reasons else ""


def tally(results: Iterable[tuple[str, Finding]]) -> str:
    """How many claims have each verdict, as in "3 hold, 1 does not hold, 2 open"."""
    counts = Counter(verdict(result, scale).removesuffix(" in the toy") for scale, result in results)
    return ", ".join(f"{counts[word]} {_PLURAL.get(word, word)}" for word in _IN_TURN if counts[word])
