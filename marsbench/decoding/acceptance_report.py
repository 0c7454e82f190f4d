"""How often drafts were right, under the names that engines and their benchmarks share.

`mean_acceptance_length` and `acceptance_rate_per_position` are vLLM's and llama.cpp's, the fields of `csv` those of
speculators' `acceptance.csv`. Forwards that verify no draft count in none of them, but in tokens per forward.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import yaml

from marsbench.decoding.generation import Generation, Meter


@dataclass(frozen=True)
class Acceptance:
    num_drafts: int  # forwards that verified any
    num_draft_tokens: int
    accepted_at: tuple[int, ...]  # how often the draft at each position was right, and all before it

    @classmethod
    def of(cls, generations: Iterable[Generation]) -> "Acceptance":
        drafts, tokens, right = 0, 0, list[int]()
        for generation in generations:
            for drafted, counts in generation.acceptance_histogram_by_draft_length.items():
                drafts, tokens = drafts + sum(counts), tokens + drafted * sum(counts)
                right += [0] * (drafted - len(right))
                for place in range(drafted):
                    right[place] += sum(counts[place + 1 :])
        return cls(drafts, tokens, tuple(right))

    @property
    def num_accepted_tokens(self) -> int:
        return sum(self.accepted_at)

    @property
    def mean_acceptance_length(self) -> float:
        """Right drafts of a forward that verifies some, and the token after them."""
        return 1 + self.num_accepted_tokens / max(self.num_drafts, 1)

    @property
    def acceptance_rate_per_position(self) -> list[float]:
        """Of all forwards that verify drafts, the share whose draft at a position is right: unconditional."""
        return [count / self.num_drafts for count in self.accepted_at]

    def in_words(self) -> str:
        rates = " ".join(f"{rate:.2f}" for rate in self.acceptance_rate_per_position)
        return f"mean_acceptance_length {self.mean_acceptance_length:.2f}, acceptance_rate_per_position {rates}"

    def csv(self, subset: str) -> str:
        fields = {
            "subset": subset, "num_drafts": self.num_drafts, "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens, "acceptance_length": self.mean_acceptance_length,
            **{f"acceptance_at_pos_{place}": rate for place, rate in enumerate(self.acceptance_rate_per_position)},
        }  # fmt: skip
        return ",".join(fields) + "\n" + ",".join(map(str, fields.values())) + "\n"

    def table(self, name: str) -> str:
        """As YAML, the mean at the longest draft, which suites that carry acceptance over to other weights read."""
        return yaml.safe_dump({name: {"thinking_off": {len(self.accepted_at): round(self.mean_acceptance_length, 4)}}})


def cycle_in_words(generations: Sequence[Generation], meter: Meter, forwards_per_cycle: int) -> str:
    """What a cycle, from drafts to what is right of them, gives and takes behind the prompts."""
    if not (forwards := sum(generation.forwards - 1 for generation in generations)):
        return "no forward behind the prompts"
    tokens = sum(sum(generation.accepted[1:]) for generation in generations)
    each = forwards_per_cycle / forwards
    return f"a cycle: {each * tokens:.2f} tokens, {forwards_per_cycle} forwards, {each * meter.positions:.1f} positions"
