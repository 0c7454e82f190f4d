"""What pays now: a table of windows by rows, and, where waiting is too long, by how much tau is lowered.

With a window of w, a row settles E(w) tokens of a forward over about E(w) + w - 1 positions. E follows from how often
guesses counted lately, seconds from the machine's position law and from what steps, of AR and with windows apart, took
beyond it lately. The fastest window is in the table; where none pays, that is AR (window 1). What the table lacks is
tried now and then. One rule with a timer moves tau of those who allow it: down by a notch while a target is missed, and
every notch ends by itself. A verified row counts as tau 1: lowered, it leaves checking out, unless that is seen to be
slower. A decision needs only what was seen since the last one and the memory of earlier ones, so a log can be replayed.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from marsbench.errors import UserError
from marsbench.json_lines import read_lines
from marsbench.racing.position_law import PositionLaw
from marsbench.serving.logs import Log
from marsbench.serving.messages import WIDEST, Knob, MethodName, Wishes

FORMAT = 3  # of the log
_EVERY, _EVERY_S = 8, 0.05  # steps and seconds between decisions; one takes about as long as a small model's step
_TRIAL_STEPS, _TRIAL_SHARE, _TRIAL_WINDOW = 3, 0.04, 4  # trials' part of the time
_GUESSES, _STEPS, _RATE = 50, 10, 0.6  # that count as much as all before; how often a guess counts, at first
_NOTCH, _RELAXED, _DOWN_S, _SOON_S, _AWHILE_S = 0.1, 0.6, 0.2, 1.0, 10.0  # of tau; of a target; a notch's times
_LATELY_S, _FORGET_S = 0.5, 60.0  # for the time per token; without anybody, after which nothing is known of guesses


class Targets(NamedTuple):
    """How long anybody should wait, in seconds; None is as long as it takes."""

    per_token: float | None = None
    first_token: float | None = None


class Group(NamedTuple):
    """Rows in flight that are alike."""

    method: MethodName
    threshold: float | None  # tau without any relief: None for `ar`, 1 for `mars-verified`
    least: float | None  # how far it may be lowered
    widest: int  # the widest window that they may have
    rows: int

    def key(self, relief: float) -> str:
        """Under which its guesses are remembered."""
        tau = lowered(self.threshold, self.least, relief)
        return key_of(self.method, tau, self.method == "mars-verified" and tau == self.threshold)


class Seen(NamedTuple):
    """What there is to decide on."""

    at_s: float  # since the engine started
    groups: Sequence[Group]
    settled: Mapping[str, Sequence[Sequence[int]]]  # key of rows -> (window, tokens settled, how often)
    waited_s: float = 0.0  # by the one that waits longest
    per_token_s: float = 0.0  # of rows in flight, lately
    busy_s: float = 0.0  # since the last decision, but for those in which nobody was in flight
    steps: Sequence[Sequence[float]] = ()  # of AR, with windows: whether these, the mean step's seconds and positions


class Choice(NamedTuple):
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
        window, checked = min(self.trial or window, widest), wishes.method == "mars-verified"
        tau = lowered(1.0 if checked else threshold, wishes.min_threshold, self.relief)
        if checked and tau == 1.0:
            return Knob(prune if wishes.threshold is None else threshold, window, verified=True)
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
    """Tokens that a forward settles, given how often each guess counts if all before did; the last goes for others."""
    return sum(accumulate([1.0, *rates, *[rates[-1]] * WIDEST][:window], lambda alive, rate: alive * rate))


class Memory(NamedTuple):
    """What decisions remember."""

    choice: Choice = Choice()
    at_s: float = 0.0  # of the last one
    rates: Mapping[str, Sequence[float]] = {}  # key of rows -> how often each guess counts
    beyond: Sequence[tuple[float, float]] = ((0.0, 0.0),) * 2  # of AR, with windows: steps, seconds beyond the law
    tried: int = 0  # the window of the last trial
    rest_s: float = 0.0  # in which requests are in flight, until the next one
    allowed: float = 0.0  # relief that is chosen, unless checking is faster
    turned_s: float = 0.0  # when that last changed


def decide(law: PositionLaw, targets: Targets, memory: Memory, seen: Seen) -> Memory:
    """The next memory, and in it the next choice."""
    before, (allowed, turned_s) = memory.choice, _allowed(targets, memory, seen)
    beyond = list(memory.beyond)
    for kind, taken, positions in seen.steps:
        steps, seconds = min(beyond[int(kind)][0] + 1, _STEPS), beyond[int(kind)][1]
        beyond[int(kind)] = steps, seconds + (max(0.0, taken - law.seconds_at(positions)) - seconds) / steps
    rest_s = memory.rest_s + seen.busy_s / _TRIAL_SHARE if before.trial else max(0.0, memory.rest_s - seen.busy_s)
    found = Memory(before, seen.at_s, _learned(memory, seen), beyond, memory.tried, rest_s, allowed, turned_s)
    if not seen.groups:
        return found._replace(choice=before._replace(relief=min(before.relief, allowed), trial=0))
    tables = {relief: _table(law, found, seen.groups, relief) for relief in (allowed, 0.0)}
    keys = {group.key(relief) for group in seen.groups for relief in tables if group.threshold is not None}
    relief = 0.0 if keys <= found.rates.keys() and tables[0.0][1] > tables[allowed][1] else allowed
    choice, kinds = Choice(tables[relief][0], relief), [kind for kind, *_ in seen.steps]
    if before.trial and kinds and (before.trial > 1) not in kinds:  # rows bring along what they had drafted before
        return found._replace(choice=choice._replace(trial=before.trial))
    window, widest = choice.at(sum(group.rows for group in seen.groups))[0], max(group.widest for group in seen.groups)
    others = [width for width in (1, min(widest, _TRIAL_WINDOW)) if width != window]
    other = next((width for width in others if width != memory.tried), *others[:1]) if others and not rest_s else 0
    return found._replace(choice=choice._replace(trial=other), tried=other or memory.tried)


def _allowed(targets: Targets, memory: Memory, seen: Seen) -> tuple[float, float]:
    """By how much tau may be lowered now, and since when: the one rule, with its timer."""
    waits = zip((seen.per_token_s, seen.waited_s), targets, strict=True)
    pressure = max((seconds / most for seconds, most in waits if most), default=0.0)
    relief, since = memory.allowed, seen.at_s - memory.turned_s
    room = max(
        ((group.threshold or 0.0) - group.least for group in seen.groups if group.least is not None), default=0.0
    )
    if pressure > 1:
        if relief < room and (since >= _DOWN_S or not relief):
            return round(min(relief + _NOTCH, room), 6), seen.at_s
        return relief, memory.turned_s if relief < room else seen.at_s  # what is needed does not end
    ended = int(since / (_SOON_S if pressure < _RELAXED else _AWHILE_S))
    return (round(max(relief - ended * _NOTCH, 0.0), 6), seen.at_s) if relief and ended else (relief, memory.turned_s)


def _learned(memory: Memory, seen: Seen) -> dict[str, Sequence[float]]:
    """How often guesses count, the latest of each place the most; one never made is taken for the one before it."""
    found = dict(memory.rates) if seen.at_s - memory.at_s - seen.busy_s < _FORGET_S else {}
    for key, outcomes in seen.settled.items():
        rates = [*found.get(key, ())]
        for place in range(WIDEST - 1):
            right = [(tokens > place + 1, times) for wide, tokens, times in outcomes if place < min(tokens, wide - 1)]
            if not right:
                break
            made, old = sum(times for _, times in right), [_RATE, *rates[: place + 1]][-1]
            new = sum(times for counts, times in right if counts) / made
            rates[place : place + 1] = [old + made / (made + _GUESSES) * (new - old)]
        found |= {key: rates} if rates else {}  # AR shows no guesses
    return found


def _table(
    law: PositionLaw, found: Memory, groups: Sequence[Group], relief: float
) -> tuple[list[tuple[int, int, float]], float]:
    """What pays for these rows, and for powers of two, and how many tokens per second that gives these."""
    rows, table, best = sum(group.rows for group in groups), [], 0.0
    (of_ar, ar_s), (of_windows, windows_s) = found.beyond
    beyond = ar_s if of_ar else windows_s, windows_s if of_windows else ar_s
    work = []  # by window: what a row settles and forwards on average
    for window in range(1, max(group.widest for group in groups) + 1):
        tokens = positions = 0.0
        for group in groups:
            width, part = min(window, group.widest), group.rows / rows
            each = expected(found.rates.get(group.key(relief), [_RATE]), width)
            tokens, positions = tokens + part * each, positions + part * (each + width - 1 if width > 1 else 1)
        work.append((tokens, positions))
    for count in sorted({rows, *(2**power for power in range(WIDEST) if 2**power <= law.positions[-1])}):
        seconds = [law.seconds_at(count * positions) + beyond[place > 0] for place, (_, positions) in enumerate(work)]
        speed, place = max((count * work[place][0] / seconds[place], -place) for place in range(len(work)))
        each, at = work[-place][0], count * work[-place][1]
        price = speed * (law.seconds_at(at + count) - law.seconds_at(at)) / count  # of a position, in tokens
        # A draft that is wrong also takes the next forward's drafts with it: masks behind it have seen it.
        table.append((count, 1 - place, round(min(0.95, (price + each - 1) / each) * 20) / 20))
        best = speed if count == rows else best
    return table, best


class Controller:
    """At work in an engine: it gathers what is seen, decides every few steps, and writes down on what."""

    def __init__(
        self, law: PositionLaw, targets: Targets, log: Path | None = None, say: Callable[[str], object] = print
    ) -> None:
        self.law, self.targets, self.memory = law, targets, Memory()
        self._started = time.perf_counter()
        self._ended: float | None = None  # when the last step did, if nothing else came after it
        self._row_s = self._row_tokens = 0.0  # lately
        self._begin(self._started)
        self._log = Log(log, say, self._first_line)

    def wake(self) -> None:
        """Somebody comes after a time in which nobody was there."""
        self.joined(alone=True)
        self._decide(Seen(self._since - self._started, (), {}))

    def joined(self, *, alone: bool) -> None:
        """Newcomers' prompts were forwarded; nobody has waited for that if they are alone."""
        self._ended = None
        if alone:
            self._begin(time.perf_counter())

    def note(self, key: str, window: int, tokens: int) -> None:
        """What a row's forward has settled."""
        self._settled.setdefault(key, Counter())[window, tokens] += 1
        self._tokens += tokens

    def stepped(self, began: float, positions: int, rows: int) -> bool:
        """A step has ended, and what lies between two is part of the later; whether to decide before the next."""
        now = time.perf_counter()
        self._steps.setdefault(positions > rows, []).append((now - (self._ended or began), positions))
        self._ended = now
        self._turns += 1
        self._row_steps += rows
        if self.memory.choice.trial:
            return self._turns >= _TRIAL_STEPS
        return self._turns >= _EVERY and now - self._since >= _EVERY_S

    def decide(self, groups: Sequence[Group], waited_s: float) -> None:
        """Choose by what has been seen since this was last done, and lately."""
        now = time.perf_counter()
        busy_s = now - self._since
        fade = math.exp(-busy_s / _LATELY_S)
        self._row_s = fade * self._row_s + busy_s * self._row_steps / max(self._turns, 1)
        self._row_tokens = fade * self._row_tokens + self._tokens
        per_token_s = self._row_s / self._row_tokens if self._row_tokens else 0.0
        settled = {key: [(*what, count) for what, count in sorted(seen.items())] for key, seen in self._settled.items()}
        steps = [(kind, *map(fmean, zip(*some, strict=True))) for kind, some in sorted(self._steps.items())]
        self._begin(now)
        self._decide(Seen(now - self._started, groups, settled, waited_s, per_token_s, busy_s, steps))

    def _begin(self, now: float) -> None:
        self._since = now
        self._settled: dict[str, Counter[tuple[int, int]]] = {}
        self._steps: dict[bool, list[tuple[float, int]]] = {}  # by whether they had windows
        self._tokens = self._row_steps = self._turns = 0

    def _decide(self, seen: Seen) -> None:
        self.memory = decide(self.law, self.targets, self.memory, seen)
        self._log.write({"seen": seen._asdict(), "choice": self.memory.choice})

    def _first_line(self) -> dict[str, Any]:
        self.memory = Memory()  # every file begins with one that knows nothing
        return {"format": FORMAT, "law": vars(self.law), "targets": self.targets}


def replayed(log: Path) -> Iterator[tuple[Seen, Any, Any]]:
    """What was seen at every decision of a log, what was chosen then, and what is chosen on it now.

    Raises:
        UserError: a line that is none of a log of decisions, or one of an earlier controller.
    """
    law, targets, memory = PositionLaw([1], [1.0]), Targets(), Memory()
    for number, line in enumerate(read_lines(log, dict[str, Any], what="a decision", mend="remove the line"), 1):
        try:
            if line.get("format") == FORMAT:  # an engine has started
                law, targets, memory = PositionLaw(**line["law"]), Targets(*line["targets"]), Memory()
                continue
            seen = Seen(**line["seen"] | {"groups": [Group(*group) for group in line["seen"]["groups"]]})
            then = line["choice"]
        except (KeyError, TypeError) as error:
            raise UserError("this is no decision of today's controller", where=f"{log}, line {number}",
                            fix="give a log of marsbench serve --decision-log, by this version") from error  # fmt: skip
        memory = decide(law, targets, memory, seen)
        yield seen, then, json.loads(json.dumps(memory.choice))


def main() -> None:
    """Decide again on a log (`python -m marsbench.serving.controller FILE`); status 1 where a choice differs."""
    found = list(replayed(Path(sys.argv[1])))
    differing = [seen.at_s for seen, then, now in found if then != now]
    print(f"{len(found)} decisions, {len(differing)} of them come out otherwise")
    print("".join(f"  {at_s:.3f} s after the start\n" for at_s in differing[:5]), end="")
    sys.exit(1 if differing else 0)


if __name__ == "__main__":
    main()
