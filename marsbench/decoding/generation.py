"""What goes into the decode loop and what comes out: `Request`, `Generation`, and a `Meter` of the work done.

Nothing heavy is imported here: the registry of methods speaks of these types, and lists itself at once.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from marsbench.errors import integer

Metric = Literal["probability", "entropy", "margin"]
Layout = Literal["groups", "linear"]  # where `mars-verified` puts its masks
Dtype = Literal["float32", "bfloat16", "float16"]  # of weights and caches, as torch calls them
Finish = Literal["eos", "stop", "length", "cancelled"]
# Positions of prompts in one forward, at most: more are hardly faster. At 7B in half precision these take about 5 GiB
# for a prompt of 32,768 tokens, 4 of them for who sees whom, and 1 GiB for prompts of 1,024.
PREFILL_POSITIONS = 8192


@dataclass(frozen=True)
class Request:
    """One prompt to continue. The same `seed` gives the same tokens in any batch, and by any lossless method."""

    prompt_ids: Sequence[int]
    max_new_tokens: int = 256  # an emitted EOS counted
    threshold: float | None = None  # see `acceptance`; for MARS, None accepts one token per forward, as AR
    temperature: float = 0.0  # above 0, tokens are sampled
    seed: int = 0
    top_k: int = 0  # what is sampled is one of so many of the most probable tokens; 0 or less: of all
    top_p: float = 1.0  # ... and of the fewest of these that together are so probable
    min_p: float = 0.0  # ... that are so probable at least, as a part of the most probable one
    stop: Sequence[Sequence[int]] = ()  # token sequences that end the output, and are its last tokens
    ignore_eos: bool = False  # the output runs to its limit
    window: int = 1  # tokens that one forward settles at most, for `methods.mixed`
    verified: bool = False  # whether guesses are checked before they count, likewise

    @property
    def is_cut(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


@dataclass(frozen=True)
class Generation:
    """One continuation and what it cost."""

    tokens: list[int]  # up to and without EOS
    settled_by: list[int]  # for every emitted token, EOS included: which of the row's forwards settled it, from 1
    forwards: int  # forward passes of the model that this row took part in
    finish: Finish
    eos_id: int | None = None  # the EOS that ended it, where one did
    # Drafts that each forward verified; none where another library decodes, which does not say.
    drafted: list[int] = field(default_factory=list, compare=False)

    @classmethod
    def of(
        cls, emitted: list[int], settled_by: list[int], forwards: int, finish: Finish, drafted: Sequence[int] = ()
    ) -> "Generation":
        kept, eos_id = (emitted[:-1], emitted[-1]) if finish == "eos" else (emitted, None)
        return cls(kept, settled_by, forwards, finish, eos_id, [*drafted])

    @property
    def emitted(self) -> int:
        """Tokens emitted, an EOS counted once: `tokens_per_forward` of AR is exactly 1."""
        return len(self.settled_by)

    @property
    def accepted(self) -> list[int]:
        """Tokens settled by each forward; they sum to `emitted`."""
        counts = [0] * self.forwards
        for number in self.settled_by:
            counts[number - 1] += 1
        return counts

    @property
    def acceptance_histogram_by_draft_length(self) -> dict[int, list[int]]:
        """For each number of drafts that a forward verified: how many forwards found 0, 1, ... of them right."""
        histogram: dict[int, list[int]] = {}
        for drafted, settled in zip(self.drafted, self.accepted, strict=False):
            if drafted:
                histogram.setdefault(drafted, [0] * (drafted + 1))[min(max(settled - 1, 0), drafted)] += 1
        return histogram

    @property
    def tokens_per_forward(self) -> float:
        """Emitted tokens over forward passes (the paper's tok/fwd, counted per row)."""
        return self.emitted / self.forwards


@dataclass
class Meter:
    """The work that a decoding did, counted by the loop; a parted prompt is several forwards here, and one tick."""

    forwards: int = 0  # of the target model, over windows
    positions: int = 0  # entries in those windows, over all rows, fillers left out
    prompt_forwards: int = 0
    prompt_positions: int = 0
    cache_bytes: int = 0  # the most that KV caches held at any time, a draft model's included
    peak_bytes: int = 0  # the most that all tensors held on a GPU, as a race reads it; 0 = not known

    def count(self, positions: int, cache_bytes: int, *, prompt: bool) -> None:
        if prompt:
            self.prompt_forwards += 1
            self.prompt_positions += positions
        else:
            self.forwards += 1
            self.positions += positions
        self.cache_bytes = max(self.cache_bytes, cache_bytes)

    def tick(self) -> None:
        """Called after every step, and once for the prompts that join, as soon as the host knows what was settled."""


def seed_of(seed: Any, number: int = 0) -> int:
    """The seed of the answer of that number: `seed` + `number`, in 64 bits."""
    return (integer(seed, "seed") + number + 2**63) % 2**64 - 2**63


def as_list(eos_id: int | Sequence[int]) -> list[int]:
    return [eos_id] if isinstance(eos_id, int) else list(eos_id)


def end_of(
    tokens: list[int], request: Request, eos_ids: Collection[int], before: Sequence[int] = ()
) -> tuple[int, Finish]:
    """How many of these tokens count, with the first EOS or stop sequence, and what ended them: "length" without one.

    A stop sequence may have begun in the output `before` them.
    """
    heeded = () if request.ignore_eos else eos_ids
    ends: list[tuple[int, Finish]] = [(tokens.index(eos) + 1, "eos") for eos in heeded if eos in tokens]
    for stop in map(list, request.stop):
        output = [*before, *tokens]
        places = range(max(len(before) + 1, len(stop)), len(output) + 1)
        ends += [(place - len(before), "stop") for place in places if output[place - len(stop) : place] == stop]
    return min(ends, default=(len(tokens), "length"))
