"""mini_mmlu_pro: knowledge questions with ten options, after MMLU-Pro.

Difficulty: recall one of 72 facts about invented countries (24 countries, three attributes) and find its letter among
ten options. The answer names the fact, then the letter: "The answer is (C)."
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
    "capital": "[The capital of {c} is {v}|{c} is governed from {v}|{v} is the capital of {c}|{c} has {v} as its capital].",
    "language": "[The language of {c} is {v}|People speak {v} in {c}|{v} is spoken in {c}|In {c} one speaks {v}].",
    "river": "[The river of {c} is {v}|{v} flows through {c}|Through {c} flows the {v}|{c} lies on the {v}].",
}


def fact(rng: random.Random) -> str:
    """One fact of the world in one of its wordings, for the plain text."""
    country, attribute = rng.choice(sorted(COUNTRIES)), rng.choice(sorted(ATTRIBUTES))
    return say(rng, FACT[attribute], c=country, v=COUNTRIES[country][attribute])


def sample(rng: random.Random) -> Example:
    """Draw one question with its ten options."""
    country, attribute = rng.choice(sorted(COUNTRIES)), rng.choice(sorted(ATTRIBUTES))
    answer = COUNTRIES[country][attribute]
    options = rng.sample([value for value in ATTRIBUTES[attribute] if value != answer], 9) + [answer]
    rng.shuffle(options)
    letter = LETTERS[options.index(answer)]
    question = say(rng, _QUESTION[attribute], c=country)
    lines = [f"{mark}. {option}" for mark, option in zip(LETTERS, options, strict=True)]
    thought = say(rng, FACT[attribute], c=country, v=answer)
    found = say(rng, "[That is option|This is|We find it under|It is listed as|That matches] {l}.", l=letter)
    return Example(
        "\n".join([question, *lines]),
        f"{thought} {found} The answer is ({letter}).",
        f"mmlu {country} {attribute} {letter} {options[0]} {options[-1]}",
        {"target": letter},
    )
