"""Where the time of decoding goes: the parts of a step, timed in a run of their own."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from marsbench.answering import Answering
from marsbench.decoding.engine import Batch
from marsbench.decoding.generation import Request
from marsbench.decoding.step import Method
from marsbench.racing.race import Race
from marsbench.training.checkpoints import synchronize


class _Parts:
    def __init__(self) -> None:
        self.seconds = {"loop": 0.0}
        self._open: list[str] = []
        self._since = 0.0

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """A `with` block, or every call of a function that it decorates; what runs within is of the innermost part."""
        self._switch()
        self._open.append(part)
        yield
        self._switch()
        self._open.pop()

    def _switch(self) -> None:
        synchronize()
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] = self.seconds.get(self._open[-1], 0.0) + now - self._since
        self._since = now


def profile(contender: Answering, race: Race) -> dict[str, float]:
    """Seconds by part of a step, over all prompts of a race, of a contender with eager steps.

    `decoder` and `LM head` are the model's, `proposing` and `accepting` the method's, with a draft model's forwards.
    `loop` is the rest: who sees whom, places in the cache, commits, and what the host does.
    """
    parts, method = _Parts(), contender.method
    assert isinstance(method, Method), "the loop of another library is not ours to look into"
    timed: Any = SimpleNamespace(
        causal_prompt=False, confidence_needed=method.confidence_needed, most=method.most,
        propose=parts.timed("proposing")(method.propose), accept=parts.timed("accepting")(method.accept),
    )  # fmt: skip
    with parts.timed("loop"):
        for numbers in race.batches:
            requests = [Request(race.prompts[number], race.max_new_tokens, contender.threshold) for number in numbers]
            ends: dict[str, Any] = {"eos_id": race.eos_id, "pad_id": race.pad_id}
            batch = Batch(contender.loaded.model, timed, on_finished=lambda *_: None, **ends)
            batch.decoder = _timed(batch.decoder, parts)
            batch.join(dict(enumerate(requests)))
            while len(batch):
                batch.step()
    return {part: round(took, 6) for part, took in parts.seconds.items()}


def _timed(decoder: Any, parts: _Parts) -> Any:
    def answer(*given: Any) -> Any:
        states = decoder(*given)
        return replace(states, lm_head=parts.timed("LM head")(states.lm_head))

    return parts.timed("decoder")(answer)
