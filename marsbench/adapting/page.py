"""What `adapt` will do, what it found, and the page that says so on one screen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from marsbench.progress import roughly
from marsbench.racing.grid import Contender
from marsbench.rendering.markdown import paragraphs, table
from marsbench.statistics.intervals import Estimate

LAPS = 5  # of the race
HELD_OUT_EVERY = 6  # of that many prompts one is held out, until there are enough
_NEAR = 0.5  # of a logit, some steps of bf16 where logits lie: a tie of two tokens, which rounding decides


@dataclass(frozen=True)
class Plan:
    """How much is done in the time given; it is reckoned once, and kept for a run that goes on."""

    prompts: int  # that are answered, those held out among them
    held_out: int
    steps: int
    answering_s: float
    training_s: float
    racing_s: float

    @property
    def kept_back(self) -> range:
        """The numbers of the prompts held out."""
        return range(0, self.held_out * HELD_OUT_EVERY, HELD_OUT_EVERY)

    def in_words(self) -> str:
        """What will be done, and how long it takes."""
        return (
            f"{self.prompts:,} prompts answered ({roughly(self.answering_s)}), {self.steps:,} steps of training "
            f"({roughly(self.training_s)}), {self.held_out} prompts held out for a race ({roughly(self.racing_s)})"
        )


class Result(NamedTuple):
    """What the race says of one contender."""

    contender: Contender
    speed_up: Estimate  # tokens per second over `ar`
    tokens_per_forward: float
    same: int  # answers with the tokens of `ar`
    gaps: list[float]  # where others part from them: by how much the model prefers `ar`'s token, in logits


def page_of(base: str, adapter: Path, dtype: torch.dtype, plan: Plan, results: Sequence[Result]) -> str:
    """One screen: what the adapter buys on this machine, with which settings, and the commands to use it."""
    best = max(results, key=lambda one: one.speed_up.value)
    name = str(dtype).removeprefix("torch.")
    options = best.contender.typed
    on_it = f"--checkpoint {adapter} --dtype {name}"
    fastest = (
        f"{best.contender.name[0].upper()}{best.contender.name[1:]} is the fastest that gives the model's own tokens: "
        f"{_printed(best.speed_up)} times as fast as `ar` at batch size 1 in {name}, with "
        f"{best.tokens_per_forward:.2f} tokens per forward pass."
        if best.contender.name != "ar"
        else f"Nothing was faster than `ar` at batch size 1 in {name}: train longer (--hours), or on more prompts."
    )
    lines = [
        [
            one.contender.name, _printed(one.speed_up), f"{one.tokens_per_forward:.2f}",
            f"{one.same} of {plan.held_out}",
        ]
        for one in results
    ]  # fmt: skip
    return (
        paragraphs(
            f"# An adapter for {base}",
            fastest,
            _agreement(results, plan),
            table(["", "tokens/s over `ar`", "tokens/forward", "answers as `ar`'s"], lines),
            f"Trained for {plan.steps:,} steps on the model's own answers to {plan.prompts - plan.held_out:,} prompts; "
            f"raced on {plan.held_out} that training did not see, {LAPS} laps.",
            "## Use it",
            "\n".join([
                "```console",
                f"$ marsbench decode {on_it} {options} --prompt-ids prompts.jsonl --out out.jsonl",
                f'$ marsbench show "A question of yours" {on_it} {options}',
                f"$ marsbench serve {on_it} {_served(best.contender)}",
                "```",
            ]),
        )
        + "\n"
    )  # fmt: skip


def _agreement(results: Sequence[Result], plan: Plan) -> str:
    """Whether anything was lost."""
    gaps = [gap for one in results for gap in one.gaps]
    asked = plan.held_out * len(results)
    if not gaps:
        return f"Nothing was lost: all {asked} answers have the tokens of `ar`."
    return (
        f"Of {asked} answers, {asked - len(gaps)} have the tokens of `ar`. Where the others part from them, the two "
        f"tokens were {max(gaps):.2f} apart in logits at most: in 16 bits such ties end one way or the other."
        if max(gaps) <= _NEAR
        else f"**Of {asked} answers, {len(gaps)} part from `ar`'s where that was no near tie** ({max(gaps):.2f} logits "
        "apart at most): please report this with the folder's plan.json."
    )


def _printed(ratio: Estimate) -> str:
    return f"{ratio.value:.2f} [{ratio.interval.low:.2f}, {ratio.interval.high:.2f}]"


def _served(contender: Contender) -> str:
    """As `marsbench serve` takes them, which knows fewer methods."""
    window = contender.options.get("block_size")
    return f"--method mars-verified --block-size {window}" if window else "--method ar"
