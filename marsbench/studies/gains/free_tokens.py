"""Which tokens come along for free: a section of the page on where the gain comes from."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from marsbench.findings.between_lines import label
from marsbench.findings.cells import BENCHMARKS, why_none
from marsbench.findings.in_words import plus_minus
from marsbench.rendering.markdown import filled, paragraphs, table
from marsbench.rows.kinds import Row, TokenClassRow
from marsbench.statistics.intervals import Estimate, share_of_tokens
from marsbench.studies.gains.lines import MEASURED
from marsbench.studies.gains.word_classes import CLASSES, END
from marsbench.world import modelled_on

HOW_THE_WORLD_SPEAKS = (
    " In the embedded world the wording of an answer is drawn at random among synonyms, while its numbers follow from "
    "the question: a word may be harder to foresee than a digit, which natural text need not share."
)


class Token(NamedTuple):
    """One token of an answer."""

    kind: str  # its class
    place: int  # among the tokens of its forward, from 0, which is the one that the forward was needed for


Answer = list[Token]


def section(rows: Sequence[Row]) -> str:
    """What came for free by class and benchmark, where in a forward pass, and after which class."""
    of_benchmark = {modelled_on(row.benchmark): row for row in rows if isinstance(row, TokenClassRow)}
    known = {name: of_benchmark[name] for name in BENCHMARKS if name in of_benchmark}
    answers = {name: answers_of(row) for name, row in known.items() if row.status == "done"}
    missing = paragraphs(*[
        f"- {BENCHMARKS[name]}: {why_none(row)}" for name, row in known.items() if row.reason
    ])  # fmt: skip
    if not answers:
        return paragraphs("## Which tokens come for free", "" if known else "not run", missing)
    row = next(row for row in known.values() if row.status == "done")
    size, everything = int(row.options["block_size"]), [answer for found in answers.values() for answer in found]
    words = {name: ", ".join(f"`{word}`" for word in row.template) for name, row in known.items() if row.template}
    slots = {
        "missing": missing,
        "line": label(MEASURED, row.arm),
        "counts": ", ".join(f"{BENCHMARKS[name]} {len(found):,}" for name, found in answers.items()),
        "block_size": str(size),
        "most": str(size - 1),
        "world": HOW_THE_WORLD_SPEAKS if modelled_on(row.benchmark) != row.benchmark else "",
        "by_benchmark": _by_benchmark(answers, everything),
        "templates": "; ".join(f"{BENCHMARKS[name]}: {found}" for name, found in words.items()),
        "by_place": _by_place(everything, size),
        "by_pair": _by_pair(everything),
    }
    return "".join(filled(__package__, "free_tokens.md", slots))


def answers_of(row: TokenClassRow) -> list[Answer]:
    """A row's answers, token by token."""
    return [
        [Token(row.classes[kind], place) for kind, place in zip(kinds, places, strict=True)]
        for kinds, places in zip(row.tokens, row.places, strict=True)
    ]


def share_free(answers: Sequence[Answer], kind: str) -> Estimate | None:
    """The share of a class's tokens that came for free; None where there are none."""
    return _share([[token.place for token in answer if token.kind == kind] for answer in answers])


def share_together(answers: Sequence[Answer], before: str, kind: str) -> Estimate | None:
    """The share of a class's tokens after one of another class that its forward settled too; None without any."""
    pairs = [pairwise(answer) for answer in answers]
    return _share([[token.place for last, token in of if (last.kind, token.kind) == (before, kind)] for of in pairs])


def _share(places: Sequence[Sequence[int]]) -> Estimate | None:
    """The share of tokens that were not the first of their forward, from the places of each answer's."""
    if not any(places):
        return None
    return share_of_tokens([sum(place > 0 for place in found) for found in places], [*map(len, places)])


# ---------------------------------------------------------------------- the section's parts


def _by_benchmark(answers: dict[str, list[Answer]], everything: list[Answer]) -> str:
    columns = *answers.values(), everything
    lines = [[kind, *[_percent(share_free(found, kind)) for found in columns]] for kind in CLASSES]
    return table(["", *[BENCHMARKS[name] for name in answers], "all questions"], lines)


def _by_place(answers: Sequence[Answer], block_size: int) -> str:
    tokens = [token for answer in answers for token in answer]
    free = sum(token.place > 0 for token in tokens)
    lines = []
    for kind in CLASSES:
        places = [token.place for token in tokens if token.kind == kind]
        if places:
            shares = [_ratio(places.count(place), len(places)) for place in range(block_size)]
            gain = _ratio(sum(place > 0 for place in places), free)
            lines.append([kind, f"{len(places):,}", _ratio(len(places), len(tokens)), *shares, gain])
    ordinals = ["1st", "2nd", "3rd", *[f"{n}th" for n in range(4, block_size + 1)]][:block_size]
    head = ["", "tokens", "% of tokens", *[f"{ordinal}, in %" for ordinal in ordinals], "% of free tokens"]
    return table(head, lines)


def _by_pair(answers: Sequence[Answer]) -> str:
    """How often a token is settled together with the one before it, by the classes of both."""
    pairs = {before: [share_together(answers, before, kind) for kind in CLASSES] for before in CLASSES if before != END}
    return table(["after", *CLASSES], [[before, *map(_percent, shares)] for before, shares in pairs.items()])


def _percent(share: Estimate | None) -> str:
    return "" if share is None else plus_minus(share, 1, factor=100)


def _ratio(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}" if whole else "n/a"
