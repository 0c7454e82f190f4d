"""Methods that bring a loop of their own: they get the same requests, and their answers are cut by the same rules."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from marsbench.decoding.acceptance import bar
from marsbench.decoding.generation import Generation, Meter, Request, end_of
from marsbench.errors import UserError

# Called with a request's index and what it has come to.
OnFinished = Callable[[int, Generation], None]


class OutsideMethod(ABC):
    """A reference point that does not run through our loop."""

    name: ClassVar[str]
    one_row: ClassVar[bool] = False  # decodes one sequence at a time

    def bar(self, threshold: float | None) -> float:
        return bar(threshold, None, self.name)

    @abstractmethod
    def continue_batch(
        self, model: Any, requests: Sequence[Request], eos_ids: list[int], pad_id: int, meter: Meter | None = None
    ) -> list[tuple[list[int], list[int]]]:
        """Continue a batch greedily, each request to its limit at least: (new tokens, tokens per forward) of each.

        Where there is a meter, it is told of every forward.
        """


def decode_outside(
    model: Any, method: OutsideMethod, requests: Sequence[Request], eos_ids: list[int], pad_id: int, batch_size: int,
    on_finished: OnFinished, meter: Meter | None = None,
) -> list[Generation]:  # fmt: skip
    """`decode` for an outside method: prompts of similar length together, the answers in the order of the requests."""
    if method.one_row and batch_size > 1:
        raise UserError(f"method {method.name!r} decodes one sequence at a time", fix="give a batch size of 1")
    if any(request.temperature for request in requests):
        raise UserError(f"method {method.name!r} is a greedy reference point", fix="give temperature 0")
    for request in requests:
        method.bar(request.threshold)
    generations: dict[int, Generation] = {}
    by_length = sorted(range(len(requests)), key=lambda index: len(requests[index].prompt_ids))
    for first in range(0, len(requests), batch_size):
        indices = by_length[first : first + batch_size]
        batch = [requests[index] for index in indices]
        answers = method.continue_batch(model, batch, eos_ids, pad_id, meter)
        for index, (tokens, accepted) in zip(indices, answers, strict=True):
            # Cut at the request's own end, and only the forwards up to there count.
            emitted, finish = end_of(tokens[: requests[index].max_new_tokens], requests[index], eos_ids)
            settled_by = [number for number, count in enumerate(accepted, 1) for _ in range(count)][:emitted]
            generations[index] = Generation.of(tokens[:emitted], settled_by, settled_by[-1], finish)
            on_finished(index, generations[index])
    return [generations[index] for index in range(len(requests))]
