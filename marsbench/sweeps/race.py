"""The clock: contenders decode the same prompts in turn, batch by batch, and only their ratios are believed.

Absolute times depend on the machine and on the hour. So every batch of prompts is decoded by all contenders, one
after the other, the one that goes first changing with every batch and lap; a ratio compares times of one lap.

The first lap is watched and not timed: it yields the tokens, the work and the moments at which tokens came. The laps
after it are timed and not watched; they must yield the same tokens.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from math import gcd
from pathlib import Path
from typing import Any, ClassVar

import torch

from marsbench.decoding.decoder import Decoder
from marsbench.decoding.engine import Batch, Method, decode
from marsbench.decoding.generation import Generation, Meter, Request
from marsbench.decoding.outside import OutsideMethod
from marsbench.sweeps.rows import Status

# Called as a race goes on: (batches done, batches).
Progress = Callable[[int, int], None]
WATCHED = 0  # the number of the lap that is not timed


@dataclass(frozen=True)
class Contender:
    """One method on one model."""

    name: str
    model: Any
    method: Method | OutsideMethod
    threshold: float | None = None


@dataclass
class Stopwatch(Meter):
    """A meter that also notes when each forward's tokens were there, by `time.perf_counter`."""

    stamps: list[float] = field(default_factory=list)

    def tick(self) -> None:
        """Note the time."""
        self.stamps.append(time.perf_counter())


@dataclass(frozen=True)
class Watched:
    """What a contender did with one batch of prompts; lists have an entry per prompt."""

    generations: list[Generation]
    first_token: list[float]  # seconds from the start of the batch to the prompt's first token
    last_token: list[float]  # and to its last one
    meter: Meter
    peak_bytes: int | None  # the most that tensors held on the device, the model's included; None on a CPU


@dataclass(frozen=True)
class Turn:
    """One contender's turn at one batch of prompts."""

    seconds: float
    status: Status = "done"
    reason: str = ""
    watched: Watched | None = None  # in the lap that is watched


Round = Mapping[str, Turn]  # contender -> its turn at a batch; who has dropped out is missing


class RoundLog:
    """The rounds of a race as they end, so that an interrupted race loses one round at most."""

    def __init__(self, file: Path | None = None) -> None:
        """Take up the rounds of a file; without one, they are kept in memory."""
        self._file = file
        self.contenders: list[str] = []  # who started, as far as a file says
        self.rounds: dict[tuple[int, int], Round] = {}  # (lap, batch) -> round
        self.dropped_out: set[str] = set()  # who has failed or taken too long
        if file is not None and file.exists():
            whole = 0
            for line in file.read_bytes().splitlines(keepends=True):
                if line.endswith(b"\n"):
                    self._read(json.loads(line))
                    whole += len(line)
            os.truncate(file, whole)  # an interruption may have cut the last line short

    def begin(self, contenders: Sequence[str]) -> None:
        """Start a race anew with these contenders."""
        self.contenders, self.rounds, self.dropped_out = list(contenders), {}, set()
        if self._file is not None:
            self._file.unlink(missing_ok=True)
        self._write({"contenders": self.contenders})

    def add(self, lap: int, batch: int, turns: Round) -> None:
        """Keep a round; it is on disk when this returns."""
        self._take(lap, batch, turns)
        self._write({"lap": lap, "batch": batch, "turns": {name: asdict(turn) for name, turn in turns.items()}})

    def _write(self, record: Mapping[str, Any]) -> None:
        if self._file is None:
            return
        with self._file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(record) + "\n")
            stream.flush()
            os.fsync(stream.fileno())

    def _read(self, record: Mapping[str, Any]) -> None:
        """Take up what a line of the file holds."""
        if "contenders" in record:
            self.contenders = record["contenders"]
        else:
            turns = {name: _turn_of(turn) for name, turn in record["turns"].items()}
            self._take(record["lap"], record["batch"], turns)

    def turns(self, name: str) -> dict[tuple[int, int], Turn]:
        """One contender's turns, by lap and batch."""
        return {place: turns[name] for place, turns in self.rounds.items() if name in turns}

    def _take(self, lap: int, batch: int, turns: Round) -> None:
        self.rounds[lap, batch] = turns
        self.dropped_out |= {name for name, turn in turns.items() if turn.status != "done"}


def _turn_of(record: Mapping[str, Any]) -> Turn:
    """The turn that a log's line holds."""
    watched = record["watched"]
    if watched is not None:
        generations = [Generation(**generation) for generation in watched["generations"]]
        meter = {name: watched["meter"][name] for name in vars(Meter())}
        watched = Watched(**{**watched, "generations": generations, "meter": Meter(**meter)})
    return Turn(**{**record, "watched": watched})


@dataclass(frozen=True)
class Outcome:
    """What a race found of one contender; the lists but the first have an entry per prompt."""

    seconds: list[float]  # of each timed lap
    generations: list[Generation] = field(default_factory=list)
    first_token: list[float] = field(default_factory=list)
    last_token: list[float] = field(default_factory=list)
    meter: Meter = field(default_factory=Meter)
    peak_bytes: int | None = None
    status: Status = "done"
    reason: str = ""

    @property
    def emitted(self) -> int:
        """Tokens up to EOS in one lap."""
        return sum(generation.emitted for generation in self.generations)

    @property
    def row_forwards(self) -> int:
        """Forward passes of the model, summed over the prompts."""
        return sum(generation.forwards for generation in self.generations)


@dataclass(frozen=True)
class Race:
    """Contenders, the prompts that they decode, and how."""

    contenders: Sequence[Contender]
    prompts: Sequence[Sequence[int]]
    batch_size: int
    max_new_tokens: int
    eos_id: int
    pad_id: int
    laps: int  # timed ones
    limit_s: float = float("inf")  # who takes longer than this in the lap that is watched drops out

    @property
    def batches(self) -> list[range]:
        """The prompts of every batch, by index."""
        count, size = len(self.prompts), self.batch_size
        return [range(first, min(first + size, count)) for first in range(0, count, size)]

    def run(self, log: RoundLog, progress: Progress = lambda done, total: None) -> dict[str, Outcome]:
        """Run what the log lacks; contender -> outcome. A contender that raises an error drops out."""
        places = [(lap, batch) for lap in range(self.laps + 1) for batch in range(len(self.batches))]
        missing = [place for place in places if place not in log.rounds]
        if missing:
            self._warm_up()
        for done, (lap, batch) in enumerate(missing, len(places) - len(missing)):
            progress(done, len(places))
            log.add(lap, batch, self._round(lap, batch, log))
        return {one.name: self._outcome(log.turns(one.name)) for one in self.contenders}

    def _warm_up(self) -> None:
        """Every contender decodes a batch of each size that there is; who fails will fail again when it counts."""
        for batch in {len(batch): batch for batch in self.batches}.values():
            for contender in self.contenders:
                with suppress(Exception):
                    self._decode(contender, batch, None)

    def _round(self, lap: int, batch: int, log: RoundLog) -> Round:
        """All contenders that are still in the race, in an order that changes from round to round."""
        racing = [one for one in self.contenders if one.name not in log.dropped_out]
        order = [racing[place] for place in rotation(len(racing), lap * len(self.batches) + batch)]
        return {one.name: self._turn(one, lap, batch, log) for one in order}

    def _turn(self, contender: Contender, lap: int, batch: int, log: RoundLog) -> Turn:
        watch = Stopwatch() if lap == WATCHED else None
        try:
            seconds, generations, started = self._timed(contender, self.batches[batch], watch)
        except Exception as error:  # whatever it is, the others race on
            _free_memory()
            return Turn(0.0, "failed", f"{type(error).__name__}: {str(error).strip()}")
        if watch is not None:
            spent = seconds + sum(turn.seconds for turn in log.turns(contender.name).values())
            if spent > self.limit_s:
                return Turn(seconds, "timeout", f"more than {self.limit_s:g} s for {len(self.prompts)} prompts")
            return Turn(seconds, watched=_watched(generations, watch, started))
        known = log.rounds[WATCHED, batch][contender.name].watched
        if known is None or known.generations != generations:
            return Turn(seconds, "failed", "the same prompts did not give the same tokens twice")
        return Turn(seconds)

    def _timed(
        self, contender: Contender, batch: range, watch: Stopwatch | None
    ) -> tuple[float, list[Generation], float]:
        """Decode a batch: seconds, generations, and when it began."""
        if watch is not None and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        synchronize()
        started = time.perf_counter()
        generations = self._decode(contender, batch, watch)
        synchronize()
        return time.perf_counter() - started, generations, started

    def _decode(self, contender: Contender, batch: range, meter: Meter | None) -> list[Generation]:
        return decode(
            contender.model,
            contender.method,
            [Request(self.prompts[index], self.max_new_tokens, contender.threshold) for index in batch],
            eos_id=self.eos_id,
            pad_id=self.pad_id,
            batch_size=len(batch),
            meter=meter,
        )

    def _outcome(self, turns: Mapping[tuple[int, int], Turn]) -> Outcome:
        """Everything that a contender's turns say."""
        for turn in turns.values():
            if turn.status != "done":
                return Outcome([], status=turn.status, reason=turn.reason)
        batches = range(len(self.batches))
        watched = [found for batch in batches if (found := turns[WATCHED, batch].watched) is not None]
        peaks = [one.peak_bytes for one in watched if one.peak_bytes is not None]
        return Outcome(
            seconds=[sum(turns[lap, batch].seconds for batch in batches) for lap in range(1, self.laps + 1)],
            generations=[generation for one in watched for generation in one.generations],
            first_token=[seconds for one in watched for seconds in one.first_token],
            last_token=[seconds for one in watched for seconds in one.last_token],
            meter=_added(one.meter for one in watched),
            peak_bytes=max(peaks, default=None),
        )


def rotation(count: int, number: int) -> list[int]:
    """The order of `count` places in the round of that number.

    Each round starts elsewhere and goes around with another stride, so that nobody always follows the same one: what a
    contender leaves behind in caches and allocators must not always fall to the same other.
    """
    strides = [stride for stride in range(1, count + 1) if gcd(stride, count) == 1]
    stride = strides[number % len(strides)] if strides else 1
    return [(number + step * stride) % count for step in range(count)]


def _watched(generations: list[Generation], watch: Stopwatch, started: float) -> Watched:
    """A batch whose rows all joined at its first forward: when their tokens came, and the work."""
    after = [stamp - started for stamp in watch.stamps]
    return Watched(
        generations,
        [round(after[one.settled_by[0] - 1], 6) for one in generations],
        [round(after[one.settled_by[-1] - 1], 6) for one in generations],
        Meter(**{name: getattr(watch, name) for name in vars(Meter())}),
        torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
    )


def _added(meters: Iterator[Meter]) -> Meter:
    """The work of several batches together; the cache is the largest."""
    whole = Meter()
    for one in meters:
        for name, value in vars(one).items():
            known = getattr(whole, name)
            setattr(whole, name, max(known, value) if name == "cache_bytes" else known + value)
    return whole


def _free_memory() -> None:
    """Give back what a failed turn may still hold on the device."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def synchronize() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class _Timed:
    """A method whose two functions are timed."""

    name: ClassVar[str] = "timed"

    def __init__(self, method: Method, parts: _Parts) -> None:
        self._method, self._parts = method, parts

    def bar(self, threshold: float | None) -> float:
        return self._method.bar(threshold)

    def propose(self, rows: Any) -> Any:
        with self._parts.timed("proposing"):
            return self._method.propose(rows)

    def accept(self, rows: Any, window: Any, answer: Any) -> Any:
        with self._parts.timed("accepting"):
            return self._method.accept(rows, window, answer)


class _TimedDecoder:
    """A decoder that is timed."""

    def __init__(self, decoder: Decoder, parts: _Parts) -> None:
        self._decoder, self._parts = decoder, parts

    def __call__(self, cache: Any, window: Any, relative: Any) -> Any:
        with self._parts.timed("decoder"):
            return self._decoder(cache, window, relative)


class _Parts:
    """Seconds by part; what runs inside a part counts for the inner one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._since = 0.0

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Count the time of a `with` block for `part`."""
        self.start(part)
        try:
            yield
        finally:
            self.stop()

    def start(self, part: str) -> None:
        """Count for `part` from now on."""
        self._switch()
        self._open.append(part)

    def stop(self) -> None:
        """Count for the part around the present one again."""
        self._switch()
        self._open.pop()

    def _switch(self) -> None:
        synchronize()
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] = self.seconds.get(self._open[-1], 0.0) + now - self._since
        self._since = now


def profile(
    contender: Contender, prompts: Sequence[Sequence[int]], *, batch_size: int, max_new_tokens: int, eos_id: int,
    pad_id: int,
) -> dict[str, float]:  # fmt: skip
    """Where the time of decoding goes, in seconds by part, in a run of its own.

    `decoder` and `LM head` are the model's; `proposing` and `accepting` the method's (a draft model's forwards count
    for the method); `loop` is the rest: masks, cache places, committing, and what the host does.
    """
    assert not isinstance(contender.method, OutsideMethod), "its loop is not ours to look into"
    parts, lm_head = _Parts(), contender.model.get_output_embeddings()
    hooks = [
        lm_head.register_forward_pre_hook(lambda *_: parts.start("LM head")),
        lm_head.register_forward_hook(lambda *_: parts.stop()),
    ]
    requests = [Request(prompt, max_new_tokens, contender.threshold) for prompt in prompts]
    ids: dict[str, Any] = {"eos_id": eos_id, "pad_id": pad_id}
    try:
        with parts.timed("loop"):
            for first in range(0, len(requests), batch_size):
                batch = Batch(contender.model, _Timed(contender.method, parts), on_finished=lambda *_: None, **ids)
                batch.decoder = _TimedDecoder(batch.decoder, parts)
                batch.join(dict(enumerate(requests[first : first + batch_size])))
                while len(batch):
                    batch.step()
    finally:
        for hook in hooks:
            hook.remove()
    return parts.seconds
