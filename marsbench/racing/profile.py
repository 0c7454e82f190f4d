"""Where the time of decoding goes: the parts of a step, timed in a run of its own."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

from marsbench.answering import Answering
from marsbench.decoding.engine import Batch
from marsbench.decoding.generation import Request
from marsbench.decoding.outside import OutsideMethod
from marsbench.racing.race import synchronize


class _Parts:
    """Seconds by part; what runs inside a part counts for the inner one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._since = 0.0

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Around a block, or a function that it decorates."""
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
    contender: Answering, prompts: Sequence[Sequence[int]], *, batch_size: int, max_new_tokens: int,
    eos_id: int | Sequence[int], pad_id: int,
) -> dict[str, float]:  # fmt: skip
    """Where the time of decoding goes, in seconds by part, in a run of its own.

    `decoder` and `LM head` are the model's; `proposing` and `accepting` the method's (a draft model's forwards count
    for the method); `loop` is the rest: masks, cache places, committing, and what the host does.
    """
    method = contender.method
    assert not isinstance(method, OutsideMethod), "its loop is not ours to look into"
    parts, model = _Parts(), cast("Any", contender.loaded.model)
    lm_head = model.get_output_embeddings()
    timed: Any = SimpleNamespace(
        name="timed", causal_prompt=False,  # prompts in one piece, whatever the method
        bar=method.bar, most=method.most,
        propose=parts.timed("proposing")(method.propose), accept=parts.timed("accepting")(method.accept),
    )  # fmt: skip
    hooks = [
        lm_head.register_forward_pre_hook(lambda *_: parts.start("LM head")),
        lm_head.register_forward_hook(lambda *_: parts.stop()),
    ]
    requests = [Request(prompt, max_new_tokens, contender.threshold) for prompt in prompts]
    ids: dict[str, Any] = {"eos_id": eos_id, "pad_id": pad_id}
    try:
        with parts.timed("loop"):
            for first in range(0, len(requests), batch_size):
                batch = Batch(model, timed, on_finished=lambda *_: None, **ids)
                batch.decoder = parts.timed("decoder")(batch.decoder)
                batch.join(dict(enumerate(requests[first : first + batch_size])))
                while len(batch):
                    batch.step()
    finally:
        for hook in hooks:
            hook.remove()
    return parts.seconds
