"""What pays now: how much is drafted for everybody, and, where waiting is too long, how far tau is lowered.

A decision is a function of what was seen since the last one and of a memory that such decisions alone have made: the
same log in, the same choices out.

First the lossless part. With a window of w, a row settles E(w) tokens of a forward over about E(w) + w - 1 positions:
what it has just settled or drafted, and w - 1 masks. How often a guess counts is seen in what was settled lately. What
positions cost is the machine's position law, measured on short contexts; what steps take beyond it, each by itself
(rows kept, text sent) and for every position (longer contexts), is fitted to those seen lately, of AR and of windows
apart. So the tokens per second of every window are known, window 1 (AR) among them, and the best is taken: where no
window pays, decoding is AR. What is not chosen is tried for some steps now and then. A draft of a verified row pays if
its confidence exceeds what one more position costs in tokens, and is pruned otherwise.

Only then tau: it may fall by one notch at a time, for requests that allow it, while the time per token or the wait for
the first one exceeds its target, and is raised again when both are well below. A verified row counts as one of tau 1:
where it may be lowered, it leaves checking out. That alone need not be faster: what passes a high tau is less than what
checking lets pass. So every notch is tried, and left again while no relief at all is known to be faster.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from marsbench.errors import UserError
from marsbench.json_lines import read_objects
from marsbench.racing.position_law import PositionLaw
from marsbench.serving.messages import WIDEST, Knob, MethodName, Wishes


@dataclass(frozen=True)
class Targets:
    """How long anybody should wait; None is as long as it takes."""

    per_token_s: float | None = None
    first_token_s: float | None = None


@dataclass(frozen=True)
class Tuning:
    """How the controller goes about it."""

    every: int = 8  # forwards between decisions, unless others are in flight than before
    gain: float = 1.03  # a window must be better by so much to take another's place
    memory: float = 0.95  # what counts of the guesses seen is kept at every decision
    prior: float = 4.0  # guesses that are taken for seen before any are
    prior_right: float = 0.6  # how many of them counted
    trial_steps: int = 3  # for which another window is tried: AR for its cost, a wide one for its tokens
    trial_share: float = 0.02  # of the time may go to trials
    trial_window: int = 4  # the wide one
    steps_memory_s: float = 3.0  # after which what a step took counts by a third: some trials' worth
    notch: float = 0.1  # of tau
    up_s: float = 0.2  # between two notches down in tau, at least
    down_s: float = 1.0  # between two notches back
    relaxed: float = 0.6  # of its target: below it tau goes back up


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
    waiting: int = 0
    waited_s: float = 0.0  # by the one that waits longest
    per_token_s: float = 0.0  # of rows in flight, lately
    busy_s: float = 0.0  # since the last decision, but for those in which nobody was in flight
    # Of the steps since the last decision, those of AR and those of windows apart: whether these had windows, and the
    # mean step's seconds, what is done before the next included, and positions.
    steps: Sequence[tuple[bool, float, float]] = ()


@dataclass(frozen=True)
class Choice:
    """What counts until the next decision."""

    window: int  # the widest
    draft_threshold: float  # confidence that drafts of `mars-verified` must have
    relief: float  # by how much tau is lowered where that is allowed

    def knob(self, wishes: Wishes, threshold: float | None, widest: int) -> Knob:
        """How a request decodes whose own threshold and window, or the server's default, these would be."""
        window = min(self.window, widest)
        if wishes.method != "mars-verified":
            return Knob(lowered(threshold, wishes.min_threshold, self.relief), window)
        tau = lowered(1.0, wishes.min_threshold, self.relief)
        if tau == 1.0:
            return Knob(threshold if wishes.threshold is not None else self.draft_threshold, window, verified=True)
        return Knob(tau, window)


def lowered(threshold: float | None, least: float | None, relief: float) -> float | None:
    """A threshold after relief: never below what the request allows, and untouched where it allows nothing."""
    if threshold is None or least is None or not relief:
        return threshold
    return max(min(least, threshold), min(threshold, round(threshold - relief, 6)))


@dataclass(frozen=True)
class Beyond:
    """What steps took beyond the law: sums over those seen, of which the older count by less and less."""

    steps: float = 0.0
    positions: float = 0.0
    squares: float = 0.0  # of positions
    seconds: float = 0.0  # beyond the law
    products: float = 0.0  # of seconds and positions

    def after(self, seconds: float, positions: float) -> Beyond:
        """The sums after a step more, which took so long beyond the law."""
        new = (1.0, positions, positions**2, seconds, seconds * positions)
        return Beyond(*(old + one for old, one in zip(astuple(self), new, strict=True)))

    def faded(self, kept: float) -> Beyond:
        """The sums, of which so much is kept."""
        return Beyond(*(kept * value for value in astuple(self)))

    def added_to(self, law: PositionLaw) -> PositionLaw:
        """The law with a line on top, by least squares, that falls nowhere: so much a step, so much a position.

        Steps that all had as many positions do not tell the two apart; then it is the step's.
        """
        if not self.steps:
            return law
        mean, seconds = self.positions / self.steps, self.seconds / self.steps
        variance = self.squares / self.steps - mean**2
        slope = max(0.0, (self.products / self.steps - mean * seconds) / (variance + 1.0))  # in doubt, a bit less
        each = max(0.0, seconds - slope * mean)
        return PositionLaw(
            law.positions, [there + each + slope * at for at, there in zip(law.positions, law.seconds, strict=True)]
        )


@dataclass(frozen=True)
class Costs:
    """What steps take beyond the law: those of AR, and those with windows, whose guesses want reading too."""

    ar: Beyond = Beyond()
    windows: Beyond = Beyond()

    def after(self, law: PositionLaw, tuning: Tuning, seen: Seen) -> Costs:
        """The sums after what has been seen."""
        kept = math.exp(-seen.busy_s / tuning.steps_memory_s)
        found = {False: self.ar.faded(kept), True: self.windows.faded(kept)}
        for has_window, taken, positions in seen.steps:
            found[has_window] = found[has_window].after(taken - law.seconds_at(positions), positions)
        return Costs(found[False], found[True])

    def laws(self, law: PositionLaw) -> Laws:
        """The laws of both kinds of steps; of one that has not been seen, the other's."""
        ar, windows = (own if own.steps else other for own, other in ((self.ar, self.windows), (self.windows, self.ar)))
        return Laws(ar.added_to(law), windows.added_to(law))


class Laws(NamedTuple):
    """What steps take by their positions."""

    ar: PositionLaw
    windows: PositionLaw

    def of(self, window: int) -> PositionLaw:
        """That of steps with a window."""
        return self.windows if window > 1 else self.ar


@dataclass(frozen=True)
class Memory:
    """What decisions remember."""

    choice: Choice = Choice(window=4, draft_threshold=0.5, relief=0.0)
    # Key of rows -> for each guess of a window, how often it stood behind none that failed, and how often it counted.
    guesses: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    window: int = 4  # the choice's, unless that is only a trial
    tried: int = 0  # the window of the last trial
    rest_s: float = 0.0  # in which requests are in flight, until the next one
    costs: Costs = Costs()
    allowed: float = 0.0  # relief that is chosen, unless none is faster
    turned_s: float = float("-inf")  # when that last changed

    @property
    def on_trial(self) -> bool:
        """Whether the choice is not what was found best."""
        return self.choice.window != self.window


def decide(law: PositionLaw, targets: Targets, tuning: Tuning, memory: Memory, seen: Seen) -> Memory:
    """The next memory, and in it the next choice."""
    guesses = _learned(tuning, memory.guesses, seen.settled)
    allowed, turned_s = _allowed(targets, tuning, memory, seen)
    costs = memory.costs.after(law, tuning, seen)
    laws = costs.laws(law)
    memory = replace(memory, guesses=guesses, costs=costs)
    found = replace(memory, allowed=allowed, turned_s=turned_s, rest_s=max(0.0, memory.rest_s - seen.busy_s))
    if not seen.groups:
        return replace(found, choice=replace(memory.choice, relief=min(memory.choice.relief, allowed)))
    relief = _relief(laws, tuning, found, seen)
    rates = _all_rates(tuning, guesses, seen.groups, relief)
    window = _window(laws, tuning, seen.groups, rates, relief, memory.window)
    speed, slope = _speed(laws, seen.groups, rates, relief, window)
    pruned = round(min(0.95, max(0.0, speed * slope)) * 20) / 20
    found = replace(found, choice=Choice(window, pruned, relief), window=window)
    if _is_trying(memory, seen):
        return replace(found, choice=Choice(memory.tried, pruned, relief))
    other = _to_try(tuning, memory, seen.groups, window)
    if other == window or found.rest_s:
        return found
    _, positions = _work(seen.groups, rates, relief, other)
    rest = tuning.trial_steps * laws.of(other).seconds_at(positions) / tuning.trial_share
    return replace(found, choice=Choice(other, pruned, relief), tried=other, rest_s=rest)


def _is_trying(memory: Memory, seen: Seen) -> bool:
    """Whether a window is tried of which no step has been seen yet: rows bring along what they had drafted before."""
    kinds = [has_window for has_window, *_ in seen.steps]
    return bool(kinds) and memory.on_trial and (memory.tried > 1) not in kinds


def _to_try(tuning: Tuning, memory: Memory, groups: Sequence[Group], window: int) -> int:
    """Another window than the one found best: in turn AR, whose steps have few positions, and a wide one, whose guesses
    say how often they count; the same where there is no other.
    """
    widest = min(max(group.widest for group in groups), tuning.trial_window)
    others = [other for other in (1, widest) if other != window]
    untried = [other for other in others if other != memory.tried]
    return next(iter(untried or others), window)


Rates = Mapping[str, Sequence[float]]  # key of rows -> how often each guess of a window counts


def expected(rates: Sequence[float], window: int) -> float:
    """Tokens that a forward settles, given how often each guess of a window counts if all before it did."""
    total = run = 1.0
    for rate in rates[: window - 1]:
        run *= rate
        total += run
    return total


def key_of(method: MethodName, threshold: float | None, verified: bool) -> str:
    """Under which the guesses of rows are remembered: where they are not checked, apart for every twentieth of tau."""
    return method if verified or method == "ar" else f"mars {round((threshold or 0.0) * 20) / 20:.2f}"


def _learned(
    tuning: Tuning, known: Mapping[str, Sequence[tuple[float, float]]],
    settled: Mapping[str, Sequence[tuple[int, int, int]]],
) -> dict[str, Sequence[tuple[float, float]]]:  # fmt: skip
    """What is known of guesses after some more."""
    found = dict(known)
    for key, outcomes in settled.items():
        counts = [(made * tuning.memory, right * tuning.memory) for made, right in found.get(key, _nothing())]
        for window, tokens, times in outcomes:
            for place in range(min(tokens, window - 1)):
                made, right = counts[place]
                counts[place] = made + times, right + times * (tokens > place + 1)
        found[key] = counts
    return found


def _nothing() -> list[tuple[float, float]]:
    return [(0.0, 0.0)] * (WIDEST - 1)


def _rates(tuning: Tuning, guesses: Mapping[str, Sequence[tuple[float, float]]], key: str) -> list[float]:
    """How often each guess counts; one never made is taken to count as often as the guess before it.

    A tau that has not been tried is taken for the nearest that has.
    """
    rate, rates = tuning.prior_right, []
    for made, right in guesses.get(key) or guesses.get(_nearest(guesses, key), _nothing()):
        rate = (right + tuning.prior * rate) / (made + tuning.prior)
        rates.append(rate)
    return rates


def _nearest(guesses: Mapping[str, Any], key: str) -> str:
    """The key of the tau that is nearest to a key's."""
    if not key.startswith("mars "):
        return key
    known = sorted(one for one in guesses if one.startswith("mars "))
    return min(known, key=lambda one: abs(float(one[5:]) - float(key[5:])), default=key)


def _work(groups: Iterable[Group], rates: Rates, relief: float, window: int) -> tuple[float, float]:
    """Tokens that a forward settles and positions that it has, all rows together."""
    tokens = positions = 0.0
    for group in groups:
        own = min(window, group.widest)
        each = expected(rates[group.key(relief)], own)
        tokens += group.rows * each
        positions += group.rows * (each + own - 1 if own > 1 else 1)
    return tokens, positions


def _speed(laws: Laws, groups: Sequence[Group], rates: Rates, relief: float, window: int) -> tuple[float, float]:
    """Tokens per second with a window, and the seconds that one more position takes."""
    tokens, positions = _work(groups, rates, relief, window)
    if not positions:
        return 0.0, 0.0
    seconds = laws.of(window).seconds_at(positions)
    rows = sum(group.rows for group in groups)
    slope = (laws.of(window).seconds_at(positions + rows) - seconds) / rows
    return tokens / seconds, slope


def _window(
    laws: Laws,
    tuning: Tuning,
    groups: Sequence[Group],
    rates: Rates,
    relief: float,
    now: int,
) -> int:
    """The window of most tokens per second; today's unless another is better by enough."""
    widest = max(group.widest for group in groups)
    speeds = {window: _speed(laws, groups, rates, relief, window)[0] for window in range(1, widest + 1)}
    best = max(speeds, key=lambda window: (speeds[window], -window))
    now = min(now, widest)
    stays = speeds[best] <= tuning.gain * speeds[now] and speeds[now] >= speeds[1]
    return now if stays else best


def _relief(laws: Laws, tuning: Tuning, memory: Memory, seen: Seen) -> float:
    """By how much tau is lowered: by all that is allowed, or not at all where that is known to be faster.

    Nothing between the two is faster than both: the lower tau, the more passes. What has just been allowed is tried, as
    is what nothing is known of; else the other takes its place where it is better by enough.
    """
    allowed, now = memory.allowed, memory.choice.relief
    if memory.turned_s == seen.at_s or not all(_known(memory, seen.groups, relief) for relief in (0.0, allowed)):
        return allowed
    if not allowed:
        return 0.0
    none, all_of_it = (_best_speed(laws, tuning, memory, seen.groups, relief) for relief in (0.0, allowed))
    if now == allowed:
        return 0.0 if none > tuning.gain * all_of_it else allowed
    return allowed if all_of_it > tuning.gain * none else 0.0


def _known(memory: Memory, groups: Iterable[Group], relief: float) -> bool:
    """Whether guesses of all these rows have been seen after such a relief: decoding by AR shows none."""
    seen = {key for key, counts in memory.guesses.items() if counts[0][0] >= 1}
    return all(group.threshold is None or group.key(relief) in seen for group in groups)


def _best_speed(laws: Laws, tuning: Tuning, memory: Memory, groups: Sequence[Group], relief: float) -> float:
    """Tokens per second after a relief, with the window that suits it best."""
    rates = _all_rates(tuning, memory.guesses, groups, relief)
    widest = max(group.widest for group in groups)
    return max(_speed(laws, groups, rates, relief, window)[0] for window in range(1, widest + 1))


def _all_rates(
    tuning: Tuning, guesses: Mapping[str, Sequence[tuple[float, float]]], groups: Iterable[Group], relief: float
) -> Rates:
    """How often guesses count, of all these rows."""
    return {key: _rates(tuning, guesses, key) for key in sorted({group.key(relief) for group in groups})}


def _allowed(targets: Targets, tuning: Tuning, memory: Memory, seen: Seen) -> tuple[float, float]:
    """By how much tau may be lowered now, and since when."""
    relief, since = memory.allowed, seen.at_s - memory.turned_s
    most = max((group.room for group in seen.groups), default=0.0)
    pressure = _pressure(targets, seen)
    if pressure > 1 and relief < most and since >= tuning.up_s:
        return round(min(relief + tuning.notch, most), 6), seen.at_s
    if pressure < tuning.relaxed and relief > 0 and since >= tuning.down_s:
        return round(max(relief - tuning.notch, 0.0), 6), seen.at_s
    return relief, memory.turned_s


def _pressure(targets: Targets, seen: Seen) -> float:
    """How long anybody waits, over what the targets allow."""
    found = [0.0]
    if targets.per_token_s:
        found.append(seen.per_token_s / targets.per_token_s)
    if targets.first_token_s:
        found.append(seen.waited_s / targets.first_token_s)
    return max(found)


# ---- a controller at work, and its log ----


class Controller:
    """Decides, and writes down on what."""

    def __init__(self, law: PositionLaw, targets: Targets, log: Path | None = None) -> None:
        self.law, self.targets, self.tuning = law, targets, Tuning()
        self._memory = Memory()
        self._log = log.open("a", encoding="utf-8") if log else None
        self._write({"law": law, "targets": targets, "tuning": self.tuning})

    @property
    def choice(self) -> Choice:
        """What counts now."""
        return self._memory.choice

    @property
    def patience(self) -> int:
        """Steps until the next decision, unless rows come or go before."""
        return self.tuning.trial_steps if self._memory.on_trial else self.tuning.every

    def decide(self, seen: Seen) -> Choice:
        """The next choice."""
        self._memory = decide(self.law, self.targets, self.tuning, self._memory, seen)
        if self._log is not None:
            self._write({"seen": seen, "choice": self.choice})
        return self.choice

    def _write(self, line: Any) -> None:
        if self._log is not None:
            self._log.write(json.dumps(line, default=vars) + "\n")
            self._log.flush()


def replayed(log: Path) -> Iterator[tuple[Seen, Choice, Choice]]:
    """What was seen at every decision of a log, what was chosen then, and what is chosen on it now.

    Raises:
        UserError: a line that is none of a log of decisions.
    """
    law, targets, tuning, memory = PositionLaw([1], [1.0]), Targets(), Tuning(), Memory()
    for number, line in enumerate(read_objects(log, []), 1):
        try:
            if "law" in line:  # an engine has started
                law, targets, tuning = PositionLaw(**line["law"]), Targets(**line["targets"]), Tuning(**line["tuning"])
                memory = Memory()
                continue
            groups = [Group(**group) for group in line["seen"].pop("groups")]
            seen, chosen = Seen(groups=groups, **line["seen"]), Choice(**line["choice"])
        except (KeyError, TypeError) as error:
            raise UserError(
                "this is no line of a log of decisions", where=f"{log}, line {number}",
                fix="give the file of marsbench serve --decision-log",
            ) from error  # fmt: skip
        memory = decide(law, targets, tuning, memory, seen)
        yield seen, chosen, memory.choice


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
