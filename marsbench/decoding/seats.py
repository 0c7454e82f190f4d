"""The host's side of the rows in flight: whose they are, and what each has come to so far."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from typing import NamedTuple

from marsbench.decoding.generation import Finish, Generation, Request, end_of


class New(NamedTuple):
    """What a forward has brought a row."""

    tokens: list[int]
    born: list[int]  # the forward of the batch that settled each of them
    positions: int  # entries of the row's window that were no fillers


@dataclass
class Seat:
    """A request in flight. It keeps the tokens, so that the device is asked for none of them twice."""

    index: int  # what the caller calls the request
    request: Request
    bar: float  # the confidence to pass
    before: int = 0  # forwards of the batch before the request's first
    tokens: list[int] = field(default_factory=list)
    settled_by: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Prompt and tokens."""
        return len(self.request.prompt_ids) + len(self.tokens)

    @property
    def end(self) -> int:
        """The length at which the request must stop."""
        return len(self.request.prompt_ids) + self.request.max_new_tokens

    def take(self, new: New, eos_ids: Set[int]) -> tuple[list[int], Finish | None]:
        """Note what has come: those of the tokens that count, and what has ended the answer, None if nothing has."""
        fresh, finish = new.tokens, None
        if self.request.stop or not eos_ids.isdisjoint(fresh):
            fresh, finish = self._up_to_its_end(fresh, eos_ids)
        self.tokens += fresh
        self.settled_by += [number - self.before for number in new.born[: len(fresh)]]
        if finish is None and len(self.tokens) >= self.request.max_new_tokens:
            finish = "length"
        return fresh, finish

    def _up_to_its_end(self, tokens: list[int], eos_ids: Set[int]) -> tuple[list[int], Finish | None]:
        # A stop sequence may have begun before; nothing in front of that has to be looked at again.
        reach = max((len(stop) for stop in self.request.stop), default=1) - 1
        begun = self.tokens[-reach:] if reach else []
        count, finish = end_of([*begun, *tokens], self.request, eos_ids)
        return tokens[: count - len(begun)], None if finish == "length" else finish

    def generation(self, finish: Finish, forwards: int) -> Generation:
        """What it has come to when the batch has run so many forwards."""
        return Generation.of(self.tokens, self.settled_by, forwards - self.before, finish)
