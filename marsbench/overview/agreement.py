"""What was measured beside what was published, claim by claim: where sign and size agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

from marsbench.findings.claims import DIGITS, Claim, Judged
from marsbench.findings.published import PUBLISHED_SCALES
from marsbench.statistics.intervals import Estimate


@dataclass(frozen=True)
class Comparison:
    """A claim that the paper has a number for: what one scale measured of it, and what was published."""

    number: int  # of the claim on its page
    claim: Claim
    scale: str  # that measured
    measured: Estimate | None
    published: Mapping[str, float]  # scale of the paper -> its value, the smallest model first; never empty

    @property
    def no_effect(self) -> float:
        """What an effect is that is none: no difference, a ratio of one, one token per forward pass."""
        return 0.0 if self.claim.signed else 1.0

    @property
    def nearest(self) -> float:
        """The published value of the same model, or of the smallest that has one."""
        return self.published.get(self.scale, next(iter(self.published.values())))

    @property
    def same_sign(self) -> bool:
        """Whether the measured effect lies on the published one's side of no effect."""
        return self.measured is not None and self._side(self.measured.value) == self._side(self.nearest)

    @property
    def surely_opposed(self) -> bool:
        """Whether the whole measured interval lies on the other side."""
        if self.measured is None:
            return False
        limits = self.measured.interval
        return self._side(limits.low) == self._side(limits.high) == -self._side(self.nearest) != 0

    @property
    def holds_published(self) -> bool:
        """Whether the measured interval holds the published value; one without limits says nothing."""
        if self.measured is None or not isfinite(self.measured.interval.half_width):
            return False
        return self.measured.interval.low <= self.nearest <= self.measured.interval.high

    def _side(self, value: float) -> int:
        return (value > self.no_effect) - (value < self.no_effect)


def comparisons(judged: Sequence[Judged], scale: str) -> list[Comparison]:
    """Every claim with a published number, once, in the order of the page; `scale` is the one that measured."""
    found = []
    for number, one in enumerate(judged, 1):
        said = {name: value for name in PUBLISHED_SCALES if (value := one.claim.published(name)) is not None}
        if said:
            digits = DIGITS[one.claim.unit]  # that readers see
            values = {name: round(value, digits) + 0.0 for name, value in said.items()}
            found.append(Comparison(number, one.claim, scale, one.findings[scale].estimate, values))
    return found


def agreement(compared: Sequence[Comparison], scale: str) -> str:
    """In how many claims sign and size agree at a scale, in a sentence."""
    measured = [one for one in compared if one.measured is not None]
    same, opposed = sum(one.same_sign for one in measured), sum(one.surely_opposed for one in measured)
    held = sum(one.holds_published for one in measured)
    count = "all" if len(measured) == len(compared) else str(len(measured))
    return (
        f"Scale {scale}: of {len(compared)} claims with a published number, {count} were measured; in {same} of "
        f"them the sign agrees, in {opposed} the whole interval has the other sign, and in {held} the interval "
        "holds the published value."
    )
