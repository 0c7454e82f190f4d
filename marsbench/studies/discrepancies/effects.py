"""Two lines compared: what one has over the other on the same questions, at all training seeds that have both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from marsbench.findings.claims import AccuracyClaim, Finding, SpeedClaim
from marsbench.findings.in_words import p_value
from marsbench.findings.seeds import BySeed, of_all_seeds
from marsbench.rendering.markdown import table
from marsbench.running.plans import Arm
from marsbench.studies.discrepancies.lines import PLAN

DIFFERS, SAME, NOT_RUN = "differs", "no difference seen", "not run"


@dataclass(frozen=True)
class Effect:
    """What a line has over another on the same questions: two claims that it has more, open to both sides."""

    accuracy: Finding
    tokens: Finding  # per forward pass

    @property
    def verdict(self) -> str:
        """Which of the two differ."""
        found = {"accuracy": self.accuracy, "tokens/forward": self.tokens}
        names = [name for name, finding in found.items() if finding.decided]
        return f"{' and '.join(names)} {DIFFERS if len(names) == 1 else 'differ'}" if names else SAME


def effect(seeds: BySeed, first: str, second: str) -> Effect | None:
    """Line `first` minus line `second`, on the benchmarks that both were measured on; None if there are none."""
    accuracy = of_all_seeds(AccuracyClaim("", "", first, second), PLAN, seeds)
    tokens = of_all_seeds(SpeedClaim("", "", first, second), PLAN, seeds)
    return None if accuracy.estimate is None or tokens.estimate is None else Effect(accuracy, tokens)


def effects_table(seeds: BySeed, pairs: Sequence[tuple[str, str]]) -> str:
    """A table of differences between pairs of lines."""
    head = ["", "accuracy", "p", "tokens/forward", "questions", "seeds", "verdict"]
    return table(head, [_effect_line(seeds, *pair) for pair in pairs], text=(0, 6))


def _effect_line(seeds: BySeed, first: str, second: str) -> list[str]:
    words = f"{arm(first).label} minus {arm(second).label}"
    found = effect(seeds, first, second)
    if found is None:
        return [words, "", "", "", "", "", NOT_RUN]
    return [
        words,
        found.accuracy.found,
        p_value(found.accuracy.p),
        found.tokens.found.removesuffix(f" {found.tokens.unit}"),
        found.accuracy.questions,
        str(found.accuracy.seeds),
        found.verdict,
    ]


def arm(name: str) -> Arm:
    """A line of the page."""
    return next(arm for arm in PLAN.arms if arm.name == name)
