"""The rounds of a race on disk: what every contender did with every batch of prompts, lap by lap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from marsbench.decoding.generation import Generation, Meter
from marsbench.json_lines import Log
from marsbench.neighbours import Used, cores
from marsbench.rows.kinds import Status


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
        mend = "remove the file; the race is run anew"
        self._log = Log(file, self._read, what="a round of a race", mend=mend) if file is not None else None
        self.contenders: list[str] = []  # who started, as far as a file says
        self.rounds: dict[tuple[int, int], Round] = {}  # (lap, batch) -> round
        self.others: dict[tuple[int, int], Used | None] = {}  # (lap, batch) -> what other processes used meanwhile
        self.dropped_out: set[str] = set()  # who has failed or taken too long
        if self._log is not None:
            self._log.records()

    def begin(self, contenders: Sequence[str]) -> None:
        """Start a race anew with these contenders."""
        self.contenders, self.rounds, self.others, self.dropped_out = list(contenders), {}, {}, set()
        if self._log is not None:
            self._log.file.unlink(missing_ok=True)
        self._write({"contenders": self.contenders})

    def add(self, lap: int, batch: int, turns: Round, others: Used | None = None) -> None:
        """Keep a round and what other processes used meanwhile; it is on disk when this returns."""
        self._take(lap, batch, turns, others)
        found = {name: asdict(turn) for name, turn in turns.items()}
        self._write({"lap": lap, "batch": batch, "turns": found, "others": others})

    def _write(self, record: Mapping[str, Any]) -> None:
        if self._log is not None:
            self._log.append(record)

    def _read(self, record: Mapping[str, Any]) -> None:
        if "contenders" in record:
            self.contenders = record["contenders"]
        else:
            turns = {name: _turn_of(turn) for name, turn in record["turns"].items()}
            others = record.get("others")  # a log of an earlier version has none
            self._take(record["lap"], record["batch"], turns, Used(*others) if others else None)

    def turns(self, name: str) -> dict[tuple[int, int], Turn]:
        """One contender's turns, by lap and batch."""
        return {place: turns[name] for place, turns in self.rounds.items() if name in turns}

    def others_in(self, lap: int) -> float | None:
        """What other processes used in a lap, in cores; None where it is not known of all its rounds."""
        return cores(used for (of, _), used in self.others.items() if of == lap)

    def _take(self, lap: int, batch: int, turns: Round, others: Used | None) -> None:
        self.rounds[lap, batch], self.others[lap, batch] = turns, others
        self.dropped_out |= {name for name, turn in turns.items() if turn.status != "done"}


def _turn_of(record: Mapping[str, Any]) -> Turn:
    """The turn that a log's line holds."""
    watched = record["watched"]
    if watched is not None:
        generations = [Generation(**generation) for generation in watched["generations"]]
        meter = {name: watched["meter"][name] for name in vars(Meter())}
        watched = Watched(**{**watched, "generations": generations, "meter": Meter(**meter)})
    return Turn(**{**record, "watched": watched})
