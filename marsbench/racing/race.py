"""The clock: contenders decode the same prompts in turn, batch by batch, and only their ratios are believed.

Absolute times depend on the machine and on the hour. So every batch of prompts is decoded by all contenders, one
after the other, the one that goes first changing with every batch and lap; a ratio compares times of one lap.

The first lap is watched and not timed: it yields the tokens, the work and the moments at which tokens came. The laps
after it are timed and not watched; they must yield the same tokens.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from math import gcd
from pathlib import Path

import torch

from marsbench.answering import Answering
from marsbench.decoding.generation import Generation, Meter, Request
from marsbench.json_lines import Log
from marsbench.progress import Counted
from marsbench.rows.kinds import Status
from marsbench.statistics.intervals import Estimate, median_ratio
from marsbench.training.checkpoints import synchronize

WATCHED = 0  # the number of the lap that is not timed


class Stopwatch(Meter):
    """A meter that also notes when each forward's tokens were there, by `time.perf_counter`."""

    def __init__(self) -> None:
        super().__init__()
        self.stamps: list[float] = []

    def tick(self) -> None:
        self.stamps.append(time.perf_counter())


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a contender, in a turn or in a whole race; only the watched lap has more than seconds."""

    seconds: list[float] = field(default_factory=list)  # of the turn, or of each timed lap
    status: Status = "done"
    reason: str = ""
    generations: list[Generation] = field(default_factory=list)
    first_token: list[float] = field(default_factory=list)  # seconds from the start of its batch to a prompt's first
    last_token: list[float] = field(default_factory=list)  # and to its last one
    meter: Meter = field(default_factory=Meter)

    @property
    def emitted(self) -> int:
        return sum(generation.emitted for generation in self.generations)

    @property
    def row_forwards(self) -> int:
        return sum(generation.forwards for generation in self.generations)

    def speed_over(self, ar: "Outcome") -> Estimate:
        """Its tokens per second over those of another contender of the same race, lap by lap."""
        theirs, mine = ([lap * self.emitted for lap in ar.seconds], [lap * ar.emitted for lap in self.seconds])
        return median_ratio(theirs, mine)


@dataclass(frozen=True)
class Round:
    lap: int
    batch: int
    turns: Mapping[str, Outcome]  # contender -> its turn at the batch; a contender that has dropped out is missing


class RoundLog:
    """The rounds of a race as they end, so that an interrupted race loses one round at most."""

    def __init__(self, file: Path | None = None) -> None:
        mend = "remove the file; the race is run anew"
        self._log = Log[Round](file, Round, what="a round of a race", mend=mend) if file else None
        known = self._log.records() if self._log else []
        self.rounds = {(round_.lap, round_.batch): round_.turns for round_ in known}

    @property
    def contenders(self) -> set[str]:
        return {*self.rounds.get((WATCHED, 0), ())}

    def restart(self) -> None:
        self.rounds.clear()
        if self._log is not None:
            self._log.file.unlink(missing_ok=True)

    def add(self, lap: int, batch: int, turns: Mapping[str, Outcome]) -> None:
        self.rounds[lap, batch] = turns
        if self._log is not None:
            self._log.append(asdict(Round(lap, batch, turns)))

    def turns(self, name: str) -> dict[tuple[int, int], Outcome]:
        return {place: turns[name] for place, turns in self.rounds.items() if name in turns}


@dataclass(frozen=True)
class Race:
    contenders: Mapping[str, Answering]
    prompts: Sequence[Sequence[int]]
    batch_size: int
    max_new_tokens: int
    eos_id: int | Sequence[int]
    pad_id: int
    laps: int  # timed ones
    limit_s: float = float("inf")  # who takes longer than this in the lap that is watched drops out

    @property
    def batches(self) -> list[range]:
        count, size = len(self.prompts), self.batch_size
        return [range(first, min(first + size, count)) for first in range(0, count, size)]

    def run(self, log: RoundLog, progress: Counted = lambda done, total: None) -> dict[str, Outcome]:
        """Run what the log lacks; contender -> outcome. A contender that raises an error drops out."""
        places = [(lap, batch) for lap in range(self.laps + 1) for batch in range(len(self.batches))]
        missing = [place for place in places if place not in log.rounds]
        if missing:
            self._warm_up()
        for done, (lap, batch) in enumerate(missing, len(places) - len(missing)):
            progress(done, len(places))
            ended = {name for turns in log.rounds.values() for name, turn in turns.items() if turn.status != "done"}
            racing = [name for name in self.contenders if name not in ended]
            order = [racing[place] for place in rotation(len(racing), lap * len(self.batches) + batch)]
            log.add(lap, batch, {name: self._turn(name, lap, batch, log) for name in order})
        return {name: self._outcome(log.turns(name)) for name in self.contenders}

    def _warm_up(self) -> None:
        """Every contender decodes a batch of each size, or, if it compiles, all batches, off the clock."""
        sizes = list({len(batch): batch for batch in self.batches}.values())
        for contender in self.contenders.values():
            started = time.perf_counter()
            for batch in self.batches if contender.compiled else sizes:
                with suppress(Exception):
                    self._decode(contender, batch, None)
                if contender.compiled and time.perf_counter() - started > self.limit_s:
                    break

    def _turn(self, name: str, lap: int, batch: int, log: RoundLog) -> Outcome:
        watch = Stopwatch() if lap == WATCHED else None
        try:
            if watch is not None and torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            synchronize()
            started = time.perf_counter()
            generations = self._decode(self.contenders[name], self.batches[batch], watch)
            synchronize()
            seconds = time.perf_counter() - started
            if watch is not None and torch.cuda.is_available():
                watch.peak_bytes = torch.cuda.max_memory_allocated()
        except Exception as error:  # whatever it is, the others race on
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # what a failed turn may still hold
            return Outcome(status="failed", reason=f"{type(error).__name__}: {str(error).strip()}")
        if watch is None:
            if log.rounds[WATCHED, batch][name].generations == generations:
                return Outcome(seconds=[seconds])
            return Outcome(status="failed", reason="the same prompts did not give the same tokens twice")
        spent = seconds + sum(sum(turn.seconds) for turn in log.turns(name).values())
        if spent > self.limit_s:
            return Outcome(status="timeout", reason=f"more than {self.limit_s:g} s for {len(self.prompts)} prompts")
        after = [stamp - started for stamp in watch.stamps]  # all rows have joined at the first of these forwards
        first, last = ([round(after[made.settled_by[end] - 1], 6) for made in generations] for end in (0, -1))
        return Outcome(seconds=[seconds], generations=generations, first_token=first, last_token=last, meter=watch)

    def _decode(self, contender: Answering, batch: range, meter: Meter | None) -> list[Generation]:
        requests = [Request(self.prompts[index], self.max_new_tokens, contender.threshold) for index in batch]
        together = replace(contender, batch_size=len(batch))
        return together.decode(requests, eos_id=self.eos_id, pad_id=self.pad_id, meter=meter)

    def _outcome(self, turns: Mapping[tuple[int, int], Outcome]) -> Outcome:
        for turn in turns.values():
            if turn.status != "done":
                return Outcome(status=turn.status, reason=turn.reason)
        batches = range(len(self.batches))
        watched = [turns[WATCHED, batch] for batch in batches]
        counted = {name: [getattr(turn.meter, name) for turn in watched] for name in vars(Meter())}
        return Outcome(
            seconds=[sum(turns[lap, batch].seconds[0] for batch in batches) for lap in range(1, self.laps + 1)],
            generations=[generation for turn in watched for generation in turn.generations],
            first_token=[seconds for turn in watched for seconds in turn.first_token],
            last_token=[seconds for turn in watched for seconds in turn.last_token],
            meter=Meter(**{name: max(of) if name.endswith("_bytes") else sum(of) for name, of in counted.items()}),
        )


def rotation(count: int, number: int) -> list[int]:
    """The order of `count` places in a round: starts and strides change, so that caches favour none of them."""
    strides = [stride for stride in range(1, count + 1) if gcd(stride, count) == 1]
    stride = strides[number % len(strides)] if strides else 1
    return [(number + step * stride) % count for step in range(count)]
