"""Two lines compared: what one has over the other on the same questions, at all training seeds that have both."""

from __future__ import annotations

from collections.abc import Sequence

from marsbench.findings.between_lines import emits_more, more_accurate
from marsbench.findings.claims import Finding
from marsbench.findings.in_words import p_value
from marsbench.findings.seeds import BySeed
from marsbench.rendering.claims import questions
from marsbench.rendering.markdown import table
from marsbench.running.plans import Arm
from marsbench.studies.discrepancies.lines import PLAN

DIFFERS, SAME, NOT_RUN = "differs", "no difference seen", "not run"


def effect(seeds: BySeed, first: str, second: str) -> tuple[Finding, Finding] | None:
    """Line `first` minus line `second`: accuracy and tokens per forward pass, on the benchmarks that both answered.

    They are two claims that it has more, open to both sides; None if there are no such benchmarks.
    """
    accuracy, tokens = (kind(PLAN, first, second).over(seeds.values()) for kind in (more_accurate, emits_more))
    return None if accuracy.estimate is None or tokens.estimate is None else (accuracy, tokens)


def verdict(accuracy: Finding, tokens: Finding) -> str:
    """Which of the two differ."""
    names = [name for name, one in (("accuracy", accuracy), ("tokens/forward", tokens)) if one.decided]
    return f"{' and '.join(names)} {DIFFERS if len(names) == 1 else 'differ'}" if names else SAME


def effects_table(seeds: BySeed, pairs: Sequence[tuple[str, str]]) -> str:
    """A table of differences between pairs of lines."""
    head = ["", "accuracy", "p", "tokens/forward", "questions", "seeds", "verdict"]
    return table(head, [_effect_line(seeds, *pair) for pair in pairs], text=(0, 6))


def _effect_line(seeds: BySeed, first: str, second: str) -> list[str]:
    words = f"{arm(first).label} minus {arm(second).label}"
    found = effect(seeds, first, second)
    if found is None:
        return [words, "", "", "", "", "", NOT_RUN]
    accuracy, tokens = found
    numbers = [accuracy.found, p_value(accuracy.p), tokens.number, questions(accuracy), str(accuracy.seeds)]
    return [words, *numbers, verdict(accuracy, tokens)]


def arm(name: str) -> Arm:
    return next(arm for arm in PLAN.arms if arm.name == name)
