"""What pays now: which window at how many rows, and, where waiting is too long, how far tau is lowered.

A decision is a function of what was seen since the last one and of a memory that such decisions alone have made: the
same log in, the same choices out.

First the lossless part, a table. With a window of w, a row settles E(w) tokens of a forward over about E(w) + w - 1
positions: what it has just settled or drafted, and w - 1 masks. How often a guess counts is seen in what was settled
lately. What positions cost is the machine's position law, and on top of it a line that is fitted to the latest steps,
of AR (window 1) and of windows apart: what a step takes by itself, and longer contexts. So the tokens per second of
every window are known for every number of rows, and the best is in the table: where no window pays, AR. What is not in
it is tried for some steps now and then. A draft of a verified row pays if its confidence exceeds what one more position
costs in tokens, and is pruned otherwise.

Then tau, of requests that allow it. It may fall by a notch while the time per token or the wait for the first one
exceeds its target, and every notch ends by itself: soon where both are well met, else after a while, whether anybody is
there or not. A verified row counts as one of tau 1: where it may be lowered, it leaves checking out. That need not be
faster, since what passes a high tau is less than what checking lets pass; where it is seen not to be, checking stays.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from marsbench.errors import UserError
from marsbench.json_lines import read_objects
from marsbench.racing.position_law import PositionLaw
from marsbench.serving.messages import WIDEST, Knob, MethodName, Wishes

FORMAT = 2  # of the log
_GAIN = 1.03  # a window must be better by so much to take another's place
_SEEN = 200  # guesses after which older ones are forgotten, at every place of a window
_PRIOR, _PRIOR_RIGHT = 4.0, 0.6  # guesses that are taken for seen before any are, and how many of them counted
_KEPT = 0.9  # of what earlier steps took counts at the next ones
_FORGET_S = 60.0  # without anybody, after which a third of what was seen counts
_TRIAL_WINDOW, _TRIAL_SHARE = 4, 0.04  # what is tried beside AR, and of the time may go to trials
_NOTCH, _RELAXED = 0.1, 0.6  # of tau; of its target, below which waiting is short
_DOWN_S, _SOON_S, _AWHILE_S = 0.2, 1.0, 10.0  # between notches of tau: down, and up where waiting is short, or is not


class Targets(NamedTuple):
    """How long anybody should wait, in seconds; None is as long as it takes."""

    per_token: float | None = None
    first_token: float | None = None


@dataclass(frozen=True)
class Group:
    """Rows in flight that are alike."""

    method: MethodName
    threshold: float | None  # tau without any relief: None for `ar`, 1 for `mars-verified`
    least: float | None  # how far it may be lowered
    widest: int  # the widest window that they may have
    rows: int

    @property
    def room(self) -> float:
        """By how much tau may be lowered at most."""
        return 0.0 if self.threshold is None or self.least is None else self.threshold - self.least

    def key(self, relief: float) -> str:
        """Under which its guesses are remembered."""
        tau = lowered(self.threshold, self.least, relief)
        return key_of(self.method, tau, self.method == "mars-verified" and tau == self.threshold)


@dataclass(frozen=True)
class Seen:
    """What there is to decide on."""

    at_s: float  # since the engine started
    groups: Sequence[Group]
    settled: Mapping[str, Sequence[tuple[int, int, int]]]  # key of rows -> (window, tokens settled, how often)
    waited_s: float = 0.0  # by the one that waits longest
    per_token_s: float = 0.0  # of rows in flight, lately
    busy_s: float = 0.0  # since the last decision, but for those in which nobody was in flight
    # Of the steps since the last decision, those of AR and those of windows apart: whether these had windows, and the
    # mean step's seconds, what is done before the next included, and positions.
    steps: Sequence[tuple[bool, float, float]] = ()


@dataclass(frozen=True)
class Choice:
    """What counts until the next decision."""

    # Up to so many rows: the widest window, and the confidence that drafts of `mars-verified` must have.
    table: Sequence[tuple[int, int, float]] = ((1, 4, 0.5),)
    relief: float = 0.0  # by how much tau is lowered where that is allowed
    trial: int = 0  # the window that is tried in place of the table's, if any

    def at(self, rows: int) -> tuple[int, float]:
        """The best window and the pruning for so many rows."""
        return next(((window, prune) for most, window, prune in self.table if rows <= most), self.table[-1][1:])

    def knob(self, wishes: Wishes, threshold: float | None, widest: int, rows: int) -> Knob:
        """How a request among so many decodes whose own threshold and window, or the server's, these would be."""
        window, prune = self.at(rows)
        window = min(self.trial or window, widest)
        if wishes.method != "mars-verified":
            return Knob(lowered(threshold, wishes.min_threshold, self.relief), window)
        tau = lowered(1.0, wishes.min_threshold, self.relief)
        if tau == 1.0:
            return Knob(threshold if wishes.threshold is not None else prune, window, verified=True)
        return Knob(tau, window)


def lowered(threshold: float | None, least: float | None, relief: float) -> float | None:
    """A threshold after relief: never below what the request allows, and untouched where it allows nothing."""
    if threshold is None or least is None or not relief:
        return threshold
    return max(min(least, threshold), min(threshold, round(threshold - relief, 6)))


def key_of(method: MethodName, threshold: float | None, verified: bool) -> str:
    """Under which the guesses of rows are remembered: where they are not checked, apart for every twentieth of tau."""
    return method if verified or method == "ar" else f"mars {round((threshold or 0.0) * 20) / 20:.2f}"


def expected(rates: Sequence[float], window: int) -> float:
    """Tokens that a forward settles, given how often each guess of a window counts if all before it did."""
    return 1.0 + sum(math.prod(rates[:place]) for place in range(1, window))


Guesses = Mapping[str, Sequence[tuple[float, float]]]  # key of rows -> at each place of a window, made and right
Beyond = tuple[float, float, float, float, float]  # sums over steps: of 1, x, x * x, y, x * y; x positions, y seconds


@dataclass(frozen=True)
class Memory:
    """What decisions remember."""

    choice: Choice = Choice()
    at_s: float = 0.0  # of the last one
    guesses: Guesses = field(default_factory=dict)
    beyond: tuple[Beyond, Beyond] = ((0.0,) * 5, (0.0,) * 5)  # what steps took beyond the law: of AR, with windows
    tried: int = 0  # the window of the last trial
    rest_s: float = 0.0  # in which requests are in flight, until the next one
    allowed: float = 0.0  # relief that is chosen, unless none is faster
    turned_s: float = 0.0  # when that last changed


def decide(law: PositionLaw, targets: Targets, memory: Memory, seen: Seen) -> Memory:
    """The next memory, and in it the next choice."""
    before, rest_s = memory.choice, memory.rest_s - seen.busy_s
    allowed, turned_s = _allowed(targets, memory, seen)
    found = replace(
        memory, at_s=seen.at_s, guesses=_learned(memory, seen), beyond=_fitted(law, memory.beyond, seen),
        allowed=allowed, turned_s=turned_s,
        rest_s=memory.rest_s + seen.busy_s / _TRIAL_SHARE if before.trial else max(0.0, rest_s),
    )  # fmt: skip
    if not seen.groups:
        return replace(found, choice=replace(before, relief=min(before.relief, allowed), trial=0))
    speeds = Speeds(law, found, seen.groups)
    relief = _relief(speeds, found, fresh=allowed != memory.allowed)
    choice = Choice(speeds.table(relief, before), relief)
    kinds = [has_window for has_window, *_ in seen.steps]
    if before.trial and kinds and (before.trial > 1) not in kinds:  # rows bring along what they had drafted before
        return replace(found, choice=replace(choice, trial=before.trial))
    window = choice.at(speeds.rows)[0]
    others = [other for other in (1, min(speeds.widest, _TRIAL_WINDOW)) if other != window]
    other = next((one for one in others if one != memory.tried), *others[:1]) if others else window
    if other == window or found.rest_s:
        return replace(found, choice=choice)
    return replace(found, choice=replace(choice, trial=other), tried=other)


def _learned(memory: Memory, seen: Seen) -> Guesses:
    """What is known of guesses: the latest of each place, of which some are forgotten while nobody is there."""
    kept = math.exp(-max(0.0, seen.at_s - memory.at_s - seen.busy_s) / _FORGET_S)
    found = {key: [(kept * made, kept * right) for made, right in counts] for key, counts in memory.guesses.items()}
    for key, outcomes in seen.settled.items():
        counts = found.get(key, [(0.0, 0.0)] * (WIDEST - 1))
        for window, tokens, times in outcomes:
            for place in range(min(tokens, window - 1)):
                old, right = max(0.0, 1 - times / _SEEN), times * (tokens > place + 1)
                counts[place] = old * counts[place][0] + times, old * counts[place][1] + right
        found[key] = counts
    return found


def _fitted(law: PositionLaw, beyond: tuple[Beyond, Beyond], seen: Seen) -> tuple[Beyond, Beyond]:
    """The sums after the latest steps."""
    found = list(beyond)
    for has_window, taken, at in seen.steps:
        over = taken - law.seconds_at(at)
        new = (1.0, at, at * at, over, at * over)
        found[has_window] = tuple(_KEPT * old + one for old, one in zip(found[has_window], new, strict=True))  # type: ignore[assignment]
    return found[0], found[1]


def _allowed(targets: Targets, memory: Memory, seen: Seen) -> tuple[float, float]:
    """By how much tau may be lowered now, and since when: the one rule, with its timer."""
    pressure = max(
        seen.per_token_s / targets.per_token if targets.per_token else 0.0,
        seen.waited_s / targets.first_token if targets.first_token else 0.0,
    )
    relief, since = memory.allowed, seen.at_s - memory.turned_s
    most = max((group.room for group in seen.groups), default=0.0)
    if pressure > 1:
        if relief < most and (since >= _DOWN_S or not relief):
            return round(min(relief + _NOTCH, most), 6), seen.at_s
        return relief, memory.turned_s if relief < most else seen.at_s  # what is needed does not end
    ended = int(since / (_SOON_S if pressure < _RELAXED else _AWHILE_S))
    return (round(max(relief - ended * _NOTCH, 0.0), 6), seen.at_s) if relief and ended else (relief, memory.turned_s)


class Speeds:
    """Tokens per second of all windows, by what is known."""

    def __init__(self, law: PositionLaw, memory: Memory, groups: Sequence[Group]) -> None:
        self._law, self._memory, self._groups = law, memory, groups
        self.rows, self.widest = sum(group.rows for group in groups), max(group.widest for group in groups)
        ar, windows = memory.beyond
        self._lines = _line(ar if ar[0] else windows), _line(windows if windows[0] else ar)

    def known(self, relief: float) -> bool:
        """Whether guesses of all rows have been seen after such a relief: decoding by AR shows none."""
        seen = {key for key, counts in self._memory.guesses.items() if counts[0][0] >= 1}
        return all(group.threshold is None or group.key(relief) in seen for group in self._groups)

    def best(self, relief: float) -> float:
        """Those of the best window."""
        return max(self._speed(self.rows, *one) for one in self._work(relief))

    def table(self, relief: float, before: Choice) -> list[tuple[int, int, float]]:
        """The best window for this many rows, and for powers of two; today's unless another is better by enough."""
        work, found = self._work(relief), []
        for rows in sorted({self.rows, *(2**power for power in range(WIDEST) if 2**power <= self._law.positions[-1])}):
            speeds = [self._speed(rows, *one) for one in work]
            now, best = min(before.at(rows)[0], self.widest), speeds.index(max(speeds)) + 1
            window = now if speeds[best - 1] <= _GAIN * speeds[now - 1] and speeds[now - 1] >= speeds[0] else best
            _, positions, kind = work[window - 1]
            slope = (self._seconds(rows * (positions + 1), kind) - self._seconds(rows * positions, kind)) / rows
            prune = round(min(0.95, max(0.0, speeds[window - 1] * slope)) * 20) / 20
            found.append((rows, window, prune))
        return found

    def _work(self, relief: float) -> list[tuple[float, float, int]]:
        """For each window, what a row settles and forwards on average, and which line its steps have."""
        rates = [_rates(self._memory.guesses, group.key(relief)) for group in self._groups]
        found = []
        for window in range(1, self.widest + 1):
            tokens = positions = 0.0
            for group, own in zip(self._groups, rates, strict=True):
                width, share = min(window, group.widest), group.rows / self.rows
                each = expected(own, width)
                tokens += share * each
                positions += share * (each + width - 1 if width > 1 else 1)
            found.append((tokens, positions, int(window > 1)))
        return found

    def _speed(self, rows: int, tokens: float, positions: float, kind: int) -> float:
        return rows * tokens / self._seconds(rows * positions, kind)

    def _seconds(self, positions: float, kind: int) -> float:
        each, slope = self._lines[kind]
        return self._law.seconds_at(positions) + each + slope * positions


def _line(beyond: Beyond) -> tuple[float, float]:
    """Seconds of every step, and of every position: by least squares, and none of them below 0.

    Steps that all had as many positions do not tell the two apart; then it is the step's.
    """
    steps, positions, squares, seconds, products = beyond
    if not steps:
        return 0.0, 0.0
    mean, taken = positions / steps, seconds / steps
    slope = max(0.0, (products / steps - mean * taken) / (squares / steps - mean**2 + 1.0))  # in doubt, a bit less
    return max(0.0, taken - slope * mean), slope


def _rates(guesses: Guesses, key: str) -> list[float]:
    """How often each guess counts; one never made is taken to count as often as the guess before it."""
    rate, rates = _PRIOR_RIGHT, []
    for made, right in guesses.get(key, [(0.0, 0.0)] * (WIDEST - 1)):
        rate = (right + _PRIOR * rate) / (made + _PRIOR)
        rates.append(rate)
    return rates


def _relief(speeds: Speeds, memory: Memory, *, fresh: bool) -> float:
    """By how much tau is lowered: by all that is allowed, or not at all where that is known to be faster.

    Nothing between the two is faster than both: the lower tau, the more passes. What has just been allowed is tried, as
    is what nothing is known of; else the other takes its place where it is better by enough.
    """
    allowed = memory.allowed
    if not allowed or fresh or not (speeds.known(0.0) and speeds.known(allowed)):
        return allowed
    none, full = speeds.best(0.0), speeds.best(allowed)
    stays = memory.choice.relief == allowed
    return allowed if (none <= _GAIN * full if stays else full > _GAIN * none) else 0.0


def replayed(log: Path) -> Iterator[tuple[Seen, Choice, Choice]]:
    """What was seen at every decision of a log, what was chosen then, and what is chosen on it now.

    Raises:
        UserError: a line that is none of a log of decisions, or a log of an earlier controller.
    """
    law, targets, memory = PositionLaw([1], [1.0]), Targets(), Memory()
    for number, line in enumerate(read_objects(log, []), 1):
        try:
            if "law" in line:  # an engine has started
                if line.get("format") != FORMAT:
                    raise UserError("an earlier controller wrote this, which decided otherwise", where=str(log),
                                    fix="replay it with the version that wrote it")  # fmt: skip
                law, targets, memory = PositionLaw(**line["law"]), Targets(*line["targets"]), Memory()
                continue
            groups = [Group(**group) for group in line["seen"].pop("groups")]
            seen, chosen = Seen(groups=groups, **line["seen"]), line["choice"]
            then = Choice([tuple(one) for one in chosen.pop("table")], **chosen)
        except (KeyError, TypeError) as error:
            raise UserError(
                "this is no line of a log of decisions", where=f"{log}, line {number}",
                fix="give the file of marsbench serve --decision-log",
            ) from error  # fmt: skip
        memory = decide(law, targets, memory, seen)
        yield seen, then, replace(memory.choice, table=list(memory.choice.table))


def main() -> None:
    """Decide again on a log (`python -m marsbench.serving.controller FILE`); status 1 where a choice differs."""
    found = list(replayed(Path(sys.argv[1])))
    differing = [seen for seen, then, now in found if then != now]
    print(f"{len(found)} decisions, {len(differing)} of them come out otherwise")
    for seen in differing[:5]:
        print(f"  {seen.at_s:.3f} s after the start")
    sys.exit(1 if differing else 0)


if __name__ == "__main__":
    main()
