"""The policies that the serving page compares, their loads, and the effort for each."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

from marsbench.presets import Preset

QUEUE = 8192  # of the servers: more than a lap has requests, so that none is turned away
PER_TOKEN, FIRST_TOKEN = 5.0, 100.0  # targets, in times of what one token takes by `ar` alone


@dataclass(frozen=True)
class Policy:
    """How requests ask to be decoded, and whether their server is one with `--adapt`."""

    name: str
    asks: dict[str, Any]
    adapts: bool = False


AR = Policy("ar", {"method": "ar"})
FAST, EXACT = (
    Policy(f"mars, tau = {tau:g}", {"method": "mars", "threshold": tau, "block_size": 4}) for tau in (0.5, 0.95)
)
VERIFIED = Policy("mars-verified", {"method": "mars-verified", "block_size": 5, "threshold": 0.5})
BY_ROWS = Policy("mars-verified, window by rows", {"method": "mars-verified", "block_size": 8}, adapts=True)
POLICIES = (AR, EXACT, FAST, VERIFIED, BY_ROWS)
FEW = (1, 2, 4)  # requests at a time, of a server with room for more
AT_ONCE = 8  # requests at a time where the engine is also run without HTTP, by `ar`


class Cell(NamedTuple):
    policy: Policy
    shape: str
    load: float
    repeat: int


@dataclass(frozen=True)
class Effort:
    rows: int  # that the servers decode together
    requests: Mapping[int, int]  # so many in flight -> how many a lap has; by the largest number the server is full
    policies: tuple[Policy, ...]  # on a full server
    steady: tuple[Policy, ...]  # for requests that arrive by themselves
    loads: tuple[float, ...]
    repeats: int
    seconds: float  # of arrivals in a steady lap
    questions: int
    max_new_tokens: int
    lap_s: float  # about the time of a lap with that many requests
    scored: bool = True  # whether answers are marked

    @property
    def full(self) -> int:
        return max(self.requests)

    def cells(self) -> Iterator[Cell]:
        """All laps: those that others are reckoned by come first, and policies take turns."""
        for repeat, count in product(range(self.repeats), self.requests):
            few = (AR,) if count == AT_ONCE else (AR, BY_ROWS)
            asked = self.policies if count == self.full else few
            yield from _in_some_order(asked, "together", float(count), repeat)
            if count == AT_ONCE:
                yield Cell(AR, "engine", float(count), repeat)
        for repeat, load in product(range(self.repeats), self.loads):
            yield from _in_some_order(self.steady, "steady", load, repeat)

    def minutes(self) -> float:
        """About how long it takes, with what is left in the queue when no more requests come."""
        laps = [1.1 * self.seconds if cell.shape == "steady" else self.lap_s for cell in self.cells()]
        return (sum(laps) + 60) / 60


def _in_some_order(policies: Sequence[Policy], shape: str, load: float, repeat: int) -> list[Cell]:
    """A lap of each policy, in an order that changes, so that no policy always follows the same."""
    drawn = random.Random(str((shape, load, repeat))).sample(policies, len(policies))
    return [Cell(policy, shape, load, repeat) for policy in drawn]


def effort_at(scale: Preset) -> Effort:
    """As much as decides the page's numbers; little at the scale of the tests, and of a model that takes its time."""
    if scale.in_seconds:
        few = dict.fromkeys((*FEW, AT_ONCE, 32), 6)
        return Effort(16, few, POLICIES, POLICIES, (1.0,), 1, 0.3, 12, 16, 0.2)
    if scale.pretrained:
        both = (AR, BY_ROWS)
        return Effort(4, {1: 16, 2: 24, 4: 36}, both, both, (0.5, 0.75, 1.0), 4, 30.0, 24, 64, 17.0, scored=False)
    return Effort(
        16, {1: 408, 2: 612, 4: 816, AT_ONCE: 1224, 32: 1428}, POLICIES, (AR, EXACT, FAST, BY_ROWS),
        (0.5, 0.8, 1.1), 3, 10.0, 102, scale.max_new_tokens, 13.0,
    )  # fmt: skip
