"""What is held against what on the page of serving, under which loads, with how much effort."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from marsbench.presets import Preset

STAGE = "mars"
ROWS, QUEUE = 16, 64  # of the servers
HIGHEST, LOWEST = 0.95, 0.5  # tau, of the policies that may lower it
PER_TOKEN, FIRST_TOKEN = 5.0, 100.0  # targets, in times of what one token takes by `ar` alone


@dataclass(frozen=True)
class Policy:
    """How requests ask to be decoded, and whether their server adapts."""

    name: str
    asks: dict[str, Any]
    adapts: bool = False

    @property
    def lossless(self) -> bool:
        """Whether its answers are always those of `ar`."""
        return self.asks["method"] != "mars" and "min_threshold" not in self.asks


def fixed_tau(threshold: float) -> Policy:
    return Policy(f"mars, tau = {threshold:g}", {"method": "mars", "threshold": threshold, "block_size": 4})


AR = Policy("ar", {"method": "ar"})
FAST, EXACT = fixed_tau(LOWEST), fixed_tau(HIGHEST)
VERIFIED = Policy("mars-verified", {"method": "mars-verified", "block_size": 5, "threshold": 0.5})
LOSSLESS = Policy("adaptive, lossless", {"method": "mars-verified", "block_size": 8}, adapts=True)
LOSSY = Policy("adaptive, tau may fall", {**LOSSLESS.asks, "min_threshold": LOWEST}, adapts=True)
POLICIES = (AR, EXACT, fixed_tau(0.7), FAST, VERIFIED, LOSSLESS, LOSSY)
FIXED = tuple(policy for policy in POLICIES if not policy.adapts)
STEPPED = (AR, EXACT, VERIFIED, LOSSLESS, LOSSY)  # whose runs go up and down in load
LOW, HIGH = 0.5, 1.5  # loads of a step
BARE, AT_ONCE = (AR, EXACT, FAST), 8  # policies that the engine is also run with alone, and requests in flight then


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    loads: tuple[float, ...]
    repeats: int
    seconds: float  # of arrivals in a steady cell, and in each third of a step
    questions: int
    burst: int  # requests that come all at once
    alone: int  # requests that come one after the other
    max_new_tokens: int
    bare: int = 64  # requests of each run with and without HTTP

    def minutes(self) -> float:
        """About how long it takes: arrivals, what is left in the queue then, and bursts."""
        cells = len(POLICIES) * self.repeats
        steady = cells * len(self.loads) * (self.seconds + 1.5)
        return (steady + cells * 4 + len(STEPPED) * (3 * self.seconds + 2) + 120) / 60


def effort_at(scale: Preset) -> Effort:
    """As much as decides the page's numbers; little at the scale of the tests."""
    if scale.in_seconds:
        return Effort((1.0,), repeats=1, seconds=0.3, questions=12, burst=20, alone=3, max_new_tokens=16, bare=4)
    return Effort((0.25, 0.5, 0.75, 1.0, 1.25, 1.5), 4, 5.0, 102, 160, 12, scale.max_new_tokens)
