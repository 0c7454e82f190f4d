"""Where the time of decoding goes: the parts of a step, timed in a run of its own."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from marsbench.decoding.engine import Batch, Method
from marsbench.decoding.generation import Request
from marsbench.decoding.outside import OutsideMethod
from marsbench.decoding.rows import Most
from marsbench.forward.decoder import Decoder
from marsbench.racing.race import Entrant, synchronize


class _Timed:
    """A method whose two functions are timed."""

    name: ClassVar[str] = "timed"
    causal_prompt: ClassVar[bool] = False  # prompts in one piece, whatever the method

    def __init__(self, method: Method, parts: _Parts) -> None:
        self._method, self._parts = method, parts

    def bar(self, threshold: float | None) -> float:
        return self._method.bar(threshold)

    def most(self) -> Most | None:
        return self._method.most()

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
        self.start(part)
        try:
            yield
        finally:
            self.stop()

    def start(self, part: str) -> None:
        self._switch()
        self._open.append(part)

    def stop(self) -> None:
        self._switch()
        self._open.pop()

    def _switch(self) -> None:
        synchronize()
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] = self.seconds.get(self._open[-1], 0.0) + now - self._since
        self._since = now


def profile(
    contender: Entrant, prompts: Sequence[Sequence[int]], *, batch_size: int, max_new_tokens: int,
    eos_id: int | Sequence[int], pad_id: int,
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
