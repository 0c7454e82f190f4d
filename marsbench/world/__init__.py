"""The embedded benchmark world: six question generators with the shape of the paper's six benchmarks.

`draw` yields examples without end, `corpus` the plain text on which the base model is pretrained, both deterministic by
seed, at each level of difficulty. Train and test never share a problem: a hash of its content, not of its wording, says
to which split it belongs. (Of ifeval, and of dates and walks in bbh, the content is the wording: there, a test question
may be a training question in other words.)
"""

import random
from collections.abc import Callable, Iterator
from functools import cache
from typing import Literal

from marsbench.world import bbh, gpqa, gsm8k, humaneval, ifeval, mmlu_pro
from marsbench.world.difficulty import USUAL, Difficulty, difficulty
from marsbench.world.language import Example, is_test

__all__ = ["USUAL", "Difficulty", "Example", "difficulty"]  # of its modules, what others take from here

Split = Literal["train", "test"]
# How the questions of each mini benchmark are drawn.
GENERATORS: dict[str, Callable[[random.Random, Difficulty], Example]] = {
    "mini_ifeval": ifeval.sample,
    "mini_bbh": bbh.sample,
    "mini_mmlu_pro": mmlu_pro.sample,
    "mini_gpqa": gpqa.sample,
    "mini_gsm8k": gsm8k.sample,
    "mini_humaneval": humaneval.sample,
}
_FACTS = [mmlu_pro.fact, gpqa.fact]


def modelled_on(benchmark: str) -> str:
    """The real benchmark that one of the world's has the shape of, `gsm8k` for `mini_gsm8k`; a real one is its own."""
    group, _, name = benchmark.partition("_")  # the usual ones, the harder ones, those that stay within training
    return name if group in ("mini", "hard", "within") else benchmark


def within_training(benchmark: str) -> str:
    """What asks the same without a step more than training shows; the benchmark itself where none does."""
    return {"hard_gsm8k": "within_gsm8k", "hard_humaneval": "within_humaneval"}.get(benchmark, benchmark)


def draw(benchmark: str, split: Split, seed: int, level: Difficulty = USUAL) -> Iterator[Example]:
    """Examples of one benchmark and split, without end, the same for the same seed."""
    rng = random.Random(f"{benchmark} {split} {seed}")
    while True:
        example = GENERATORS[benchmark](rng, level)
        if is_test(example.content) == (split == "test"):
            yield example


@cache
def test_set(benchmark: str, size: int, level: Difficulty = USUAL) -> tuple[Example, ...]:
    chosen: dict[str, Example] = {}
    for example in draw(benchmark, "test", 0, level):
        chosen.setdefault(example.prompt, example)
        if len(chosen) == size:
            break
    return tuple(chosen.values())


def conversations(seed: int, level: Difficulty = USUAL) -> Iterator[Example]:
    """Training examples of the benchmarks that a level is taught by, mixed at random, without end."""
    rng = random.Random(f"conversations {seed}")
    streams = [draw(benchmark, "train", seed, level) for benchmark, _ in level.taught]
    weights = [weight for _, weight in level.taught]
    while True:
        yield next(rng.choices(streams, weights)[0])


def corpus(seed: int, level: Difficulty = USUAL) -> Iterator[str]:
    """The world's plain text, without end: worked problems and, between them, loose facts."""
    return (given + said for given, said in texts(seed, level))


def texts(seed: int, level: Difficulty = USUAL) -> Iterator[tuple[str, str]]:
    """The world's plain text in two parts: the problem, drawn at random, and what follows from it."""
    rng = random.Random(f"corpus {seed}")
    examples = conversations(seed + 1, level)
    while True:
        if rng.random() < 0.12:
            yield "", " ".join(rng.choice(_FACTS)(rng, level) for _ in range(rng.randint(4, 8)))
        else:
            example = next(examples)
            yield f"{example.prompt}\n", example.response
