"""The clock: contenders decode the same prompts in turn, batch by batch, and only their ratios are believed.

Absolute times depend on the machine and on the hour. So every batch of prompts is decoded by all contenders, one
after the other, the one that goes first changing with every batch and repeat; a ratio compares times of one repeat.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from marsbench.decoding.decoder import Decoder
from marsbench.decoding.engine import Batch, Method, decode
from marsbench.decoding.generation import Generation, Meter, Request
from marsbench.decoding.outside import OutsideMethod

# Called as a race goes on: (batches done, batches).
Progress = Callable[[int, int], None]


@dataclass
class Contender:
    """One method on one model, and what the race found of it."""

    name: str
    model: Any
    method: Method | OutsideMethod
    threshold: float | None = None
    seconds: list[float] = field(default_factory=list)  # of each repeat, all prompts
    generations: dict[int, Generation] = field(default_factory=dict)
    meter: Meter = field(default_factory=Meter)  # of one pass over the prompts

    @property
    def one_row(self) -> bool:
        """Whether the method decodes one sequence at a time, whatever the batch size."""
        return isinstance(self.method, OutsideMethod) and self.method.one_row

    @property
    def emitted(self) -> int:
        """Tokens up to EOS in one pass over the prompts."""
        return sum(generation.emitted for generation in self.generations.values())

    @property
    def row_forwards(self) -> int:
        """Forward passes of the model, summed over the prompts."""
        return sum(generation.forwards for generation in self.generations.values())


def race(
    contenders: Sequence[Contender],
    prompts: Sequence[Sequence[int]],
    *,
    batch_size: int,
    max_new_tokens: int,
    eos_id: int,
    pad_id: int,
    repeats: int,
    progress: Progress = lambda done, total: None,
) -> None:
    """Time the contenders, `repeats` times over all prompts after one untimed pass; the results are in `contenders`.

    A contender that decodes one sequence at a time does so whatever the batch size.
    """
    batches = [range(first, min(first + batch_size, len(prompts))) for first in range(0, len(prompts), batch_size)]
    done = 0
    for repeat in range(repeats + 1):
        spent = [0.0] * len(contenders)
        for number, batch in enumerate(batches):
            for place in range(len(contenders)):
                which = (place + repeat + number) % len(contenders)
                contender = contenders[which]
                requests = [Request(prompts[index], max_new_tokens, contender.threshold) for index in batch]
                synchronize()
                started = time.perf_counter()
                generations = decode(
                    contender.model,
                    contender.method,
                    requests,
                    eos_id=eos_id,
                    pad_id=pad_id,
                    batch_size=1 if contender.one_row else len(batch),
                    meter=contender.meter if repeat == 0 else None,
                )
                synchronize()
                spent[which] += time.perf_counter() - started
                if repeat == 0:
                    contender.generations.update(zip(batch, generations, strict=True))
                else:
                    assert [contender.generations[index] for index in batch] == generations, "decoding is deterministic"
            done += 1
            progress(done, (repeats + 1) * len(batches))
        if repeat:
            for contender, seconds in zip(contenders, spent, strict=True):
                contender.seconds.append(seconds)


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
