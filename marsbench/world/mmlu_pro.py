"""mini_mmlu_pro: knowledge questions with ten options, after MMLU-Pro.

To be recalled is one fact about invented countries (how many there are is the difficulty; met by Zipf's law; three emblems,
ten colors), then the color's letter found among ten options. The answer states the fact, goes through the options one by one and closes with the
letter: "The answer is (C)."
"""

from __future__ import annotations

import random

from marsbench.world.difficulty import Difficulty
from marsbench.world.facts import ATTRIBUTES, COLORS, facts, known
from marsbench.world.language import Example, say

LETTERS = "ABCDEFGHIJ"

_QUESTION = "[What color is the {a} of {c}|Which color has the {a} of {c}|The {a} of {c} has which color|In {c}, what color is the {a}]?"
FACT = "[The {a} of {c} is {v}|In {c} the {a} is {v}|People of {c} have a {a} that is {v}|For {c}, the {a} is {v}]."


def fact(rng: random.Random, level: Difficulty) -> str:
    """One fact of the world in one of its wordings, for the plain text."""
    countries = facts(level).countries
    (country,), attribute = known(rng, countries), rng.choice(ATTRIBUTES)
    return say(rng, FACT, c=country, a=attribute, v=countries[country][attribute])


def search(rng: random.Random, options: list[str], answer: str, *, restated: bool = False) -> str:
    """The options gone through one by one up to the right one; `restated` says the answer beside each of them."""
    checks = []
    for letter, option in zip(LETTERS, options, strict=False):
        beside = f", {answer}:" if restated else ""
        verdict = say(rng, "[yes|right]" if option == answer else "[no|wrong]")
        checks.append(f"{letter} {option}{beside} {verdict}.")
        if option == answer:
            break
    return " ".join(checks)


def closing(rng: random.Random, letter: str) -> str:
    """The sentence that states the choice, in one of its wordings; every one ends the same way."""
    return say(rng, "[So the|Hence the|Therefore the|The|Thus the] answer is ({l}).", l=letter)


def sample(rng: random.Random, level: Difficulty) -> Example:
    """Draw one question with its ten options."""
    countries = facts(level).countries
    (country,), attribute = known(rng, countries), rng.choice(ATTRIBUTES)
    answer = countries[country][attribute]
    options = rng.sample(COLORS, len(LETTERS))
    letter = LETTERS[options.index(answer)]
    question = say(rng, _QUESTION, c=country, a=attribute)
    lines = [f"{mark} {option}" for mark, option in zip(LETTERS, options, strict=True)]
    thought = say(rng, FACT, c=country, a=attribute, v=answer)
    return Example(
        "\n".join([question, *lines]),
        f"{thought} {search(rng, options, answer, restated=True)} {closing(rng, letter)}",
        f"mmlu {country} {attribute} {options}",
        {"target": letter},
    )
