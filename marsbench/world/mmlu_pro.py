"""mini_mmlu_pro: knowledge questions with ten options, after MMLU-Pro.

Difficulty: recall one of 72 facts about invented countries (24 countries, three attributes) and find its letter among
ten options. The answer states the fact, goes through
the options and closes with the letter: "The answer is (C)."
"""

from __future__ import annotations

import random

from marsbench.world.facts import ATTRIBUTES, COUNTRIES
from marsbench.world.language import Example, say

LETTERS = "ABCDEFGHIJ"

_QUESTION = {
    "capital": "[What is the capital of {c}|Which city is the capital of {c}|{c} is governed from which city|Which city is the seat of {c}]?",
    "language": "[What is spoken in {c}|Which language do people speak in {c}|Which is the language of {c}|What do people in {c} speak]?",
    "river": "[Which river flows through {c}|What is the great river of {c}|Which is the river of {c}|Through {c} flows which river]?",
}
FACT = {
    "capital": "[The capital of {c} is|{c} is governed from|The seat of {c} lies in|The capital city in {c} is] {v}",
    "language": "[The language of {c} is|People in {c} speak|The tongue of {c} is|In {c} one speaks] {v}",
    "river": "[The river of {c} is|Through {c} flows the|The great river in {c} is|{c} lies on the] {v}",
}


def fact(rng: random.Random) -> str:
    """One fact of the world in one of its wordings, for the plain text."""
    country, attribute = rng.choice(sorted(COUNTRIES)), rng.choice(sorted(ATTRIBUTES))
    return say(rng, FACT[attribute], c=country, v=COUNTRIES[country][attribute]) + "."


def search(rng: random.Random, options: list[str], answer: str) -> str:
    """The options gone through one by one up to the right one."""
    last = options.index(answer)
    wrong = [say(rng, "{l} {o} [no|not so|is not it].", l=l, o=o) for l, o in zip(LETTERS, options[:last], strict=False)]
    return " ".join([*wrong, say(rng, "{l} {o} [yes|it is|fits].", l=LETTERS[last], o=answer)])


def closing(rng: random.Random, letter: str) -> str:
    """The sentence that states the choice, in one of its wordings; every one ends the same way."""
    return say(rng, "[So the|Hence the|Therefore the|The|Thus the] answer is ({l}).", l=letter)


def sample(rng: random.Random) -> Example:
    """Draw one question with its ten options."""
    country, attribute = rng.choice(sorted(COUNTRIES)), rng.choice(sorted(ATTRIBUTES))
    answer = COUNTRIES[country][attribute]
    options = rng.sample(ATTRIBUTES[attribute], len(LETTERS))
    letter = LETTERS[options.index(answer)]
    question = say(rng, _QUESTION[attribute], c=country)
    lines = [f"{mark} {option}" for mark, option in zip(LETTERS, options, strict=True)]
    thought = say(rng, FACT[attribute], c=country, v=answer)
    return Example(
        "\n".join([question, *lines]),
        f"{thought}. {search(rng, options, answer)} {closing(rng, letter)}",
        f"mmlu {country} {options}",
        {"target": letter},
    )
