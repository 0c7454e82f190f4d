"""Autoregressive decoding: one token per forward, the baseline that every other method is held against."""

from dataclasses import dataclass

from marsbench.decoding.reading import verify
from marsbench.decoding.rows import Accepted, Most, Rows
from marsbench.decoding.step import Method
from marsbench.forward.window import Answer, Window


@dataclass(frozen=True)
class Autoregressive(Method):
    """The next token, with a KV cache."""

    name = "ar"

    def most(self) -> Most:
        return Most(pending=1, drafted=0, behind=0)

    def accept(self, rows: Rows, window: Window, answer: Answer) -> Accepted:
        return verify(rows, answer)
