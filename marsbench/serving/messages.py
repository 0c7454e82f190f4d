"""What the two processes say to each other: jobs and knobs one way, what forwards brought the other way.

Nothing heavy is imported here.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from marsbench.decoding.generation import Finish, Request

MethodName = Literal["ar", "mars", "mars-verified"]
WIDEST = 16  # windows, at most


class Knob(NamedTuple):
    """How a row decodes: AR is a window of 1."""

    threshold: float | None
    window: int  # tokens that one forward settles at most
    verified: bool = False  # whether guesses are checked before they count


@dataclass(frozen=True, kw_only=True)
class Job(Request):
    """A request as the engine takes it, which turns its knobs; None leaves it to the server.

    A request that names its `threshold` keeps it. Only `min_threshold` permits a server with a table of windows to
    narrow the window of `mars`, and to decode at that tau while requests wait: `mars-verified` too, whose drafts then
    count unchecked.
    """

    id: int
    method: MethodName
    min_threshold: float | None = None
    widest: int | None = None  # window
    arrived: float = 0.0  # by the server's clock


@dataclass(frozen=True)
class Cancel:
    """A request that is to end now: its client is gone, or no more tokens are wanted."""

    id: int


@dataclass(frozen=True)
class Ending:
    finish: Finish
    emitted: int = 0  # tokens, an EOS counted once
    forwards: int = 0
    thresholds: tuple[float, float] | None = None  # the lowest and the highest that counted; None for `ar`
    windows: tuple[int, int] = (1, 1)
    lossless: bool = True  # whether its tokens are those of `ar`
    failure: str = ""  # why the engine could not answer


class State(NamedTuple):
    running: int = 0
    waiting: int = 0
    slots: int = 0  # of the KV cache, reserved
    threshold: float | None = None  # mean over the rows of `mars`
    window: float = 0.0  # mean over all rows


@dataclass(frozen=True)
class Report:
    state: State
    started: list[int] = field(default_factory=list)
    # Request -> the tokens that each forward brought it, an EOS left out.
    tokens: dict[int, list[list[int]]] = field(default_factory=dict)
    ended: list[tuple[int, Ending]] = field(default_factory=list)
    counted: Counter[str] = field(default_factory=Counter)  # by the names of metrics
    accepted: Counter[int] = field(default_factory=Counter)  # drafts that counted, by their place in a step


@dataclass(frozen=True)
class Ready:
    tokenizer: Any
    context: int  # tokens of prompt and answer at most
    vocabulary: int
    methods: tuple[MethodName, ...]  # that the checkpoint can do
    slots: int  # of the KV cache
    warning: str = ""
