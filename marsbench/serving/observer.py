"""A controller at work: it gathers what is seen, decides every few steps, and writes down on what."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from marsbench.racing.position_law import PositionLaw
from marsbench.serving.controller import FORMAT, Choice, Group, Memory, Seen, Targets, decide
from marsbench.serving.logs import Log

_EVERY, _TRIAL_STEPS = 8, 3  # forwards between decisions, and while something is tried
_LATELY_S = 0.5  # after so long a time per token counts by a third


class Controller:
    """Every file of its log begins with a memory that knows nothing."""

    def __init__(
        self, law: PositionLaw, targets: Targets, log: Path | None = None, say: Callable[[str], object] = print
    ) -> None:
        self.law, self.targets, self.memory = law, targets, Memory()
        self._started = time.perf_counter()
        self._ended: float | None = None  # when the last step did, if nothing else came after it
        self._row_s = self._row_tokens = 0.0  # lately
        self._begin(self._started)
        self._log = Log(log, say, self._first_line)

    @property
    def choice(self) -> Choice:
        """What counts now."""
        return self.memory.choice

    def wake(self) -> None:
        """Somebody comes after a time in which nobody was there."""
        self._ended = None
        self._begin(time.perf_counter())
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
        taken = now - (began if self._ended is None else self._ended)
        self._ended = now
        self._steps.setdefault(positions > rows, []).append((taken, positions))
        self._turns += 1
        self._row_steps += rows
        return self._turns >= (_TRIAL_STEPS if self.choice.trial else _EVERY)

    def decide(self, groups: Sequence[Group], waited_s: float) -> None:
        """Choose by what has been seen since this was last done, and lately."""
        now = time.perf_counter()
        busy_s = now - self._since
        fade = math.exp(-busy_s / _LATELY_S)
        self._row_s = fade * self._row_s + busy_s * self._row_steps / max(self._turns, 1)
        self._row_tokens = fade * self._row_tokens + self._tokens
        settled = {
            key: [(*outcome, times) for outcome, times in sorted(counts.items())]
            for key, counts in self._settled.items()
        }
        steps = [(has_window, *map(fmean, zip(*some, strict=True))) for has_window, some in sorted(self._steps.items())]
        per_token_s = self._row_s / self._row_tokens if self._row_tokens else 0.0
        seen = Seen(now - self._started, groups, settled, waited_s, per_token_s, busy_s, steps)  # type: ignore[arg-type]
        self._begin(now)
        self._decide(seen)

    def _begin(self, now: float) -> None:
        self._since = now
        self._settled: dict[str, Counter[tuple[int, int]]] = {}
        self._steps: dict[bool, list[tuple[float, int]]] = {}  # by whether they had windows
        self._tokens = self._row_steps = self._turns = 0

    def _decide(self, seen: Seen) -> None:
        self.memory = decide(self.law, self.targets, self.memory, seen)
        self._log.write({"seen": seen, "choice": self.choice})

    def _first_line(self) -> dict[str, Any]:
        self.memory = Memory()
        return {"format": FORMAT, "law": self.law, "targets": self.targets}
