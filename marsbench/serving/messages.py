"""What the two processes say to each other: jobs and knobs one way, what forwards brought the other way.

Nothing heavy is imported here.
"""

from collections import Counter
from collections.abc import Mapping
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
    best: int | None = None  # log-probabilities of its tokens are wanted, and of so many of the best at each place
    streamed: bool = False  # whether they are wanted as the tokens come
    arrived: float = 0.0  # by the server's clock


@dataclass(frozen=True)
class Cancel:
    """A request that is to end now: its client is gone, or its first `used` tokens are all that is wanted."""

    id: int
    used: int | None = None


class Likelihood(NamedTuple):
    """Log-probabilities of the model itself (AR) for some tokens in a row."""

    tokens: list[int]
    chosen: list[float]
    best: list[list[tuple[int, float]]]  # at each place, the most probable tokens and their log-probabilities

    def part(self, count: int) -> "Likelihood":
        return Likelihood(self.tokens[:count], self.chosen[:count], self.best[:count])


@dataclass(frozen=True)
class Ending:
    finish: Finish
    emitted: int = 0  # tokens, an EOS counted once
    forwards: int = 0
    thresholds: tuple[float, float] | None = None  # the lowest and the highest that counted; None for `ar`
    windows: tuple[int, int] = (1, 1)
    lossless: bool = True  # whether its tokens are those of `ar`
    # Masks of a decoding step -> how many such steps settled 0, 1, 2, ... tokens beyond the first.
    accepted: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    likelihood: Likelihood | None = None  # where it did not come with the tokens
    failure: str = ""  # why the engine could not answer


class State(NamedTuple):
    running: int = 0
    waiting: int = 0
    slots: int = 0  # of the KV cache, reserved
    threshold: float | None = None  # mean over the rows of `mars`
    window: float = 0.0  # mean over all rows


# The tokens of one forward, an EOS left out, and how probable they are, where this is wanted as they come.
Piece = tuple[list[int], Likelihood | None]


@dataclass(frozen=True)
class Report:
    state: State
    started: list[int] = field(default_factory=list)
    tokens: dict[int, list[Piece]] = field(default_factory=dict)  # request -> what each forward brought it
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
