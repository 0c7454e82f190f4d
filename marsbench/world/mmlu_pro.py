"""mini_mmlu_pro: knowledge questions with ten options, after MMLU-Pro.

To be recalled is one fact about invented countries (how many there are is the difficulty; met by Zipf's law), then its
letter is found among the options, one by one. The answer closes with "The answer is (C)."
"""

import random
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from marsbench.world.difficulty import Difficulty
from marsbench.world.language import Example, say

COLORS = ["red", "blue", "green", "white", "black", "pink", "brown", "gray", "gold", "teal"]
ATTRIBUTES = ["flag", "coin", "coat"]
LETTERS = "ABCDEFGHIJ"
_SEED = 2604  # of the facts: every training run and every test set of a difficulty speak of the same world

_QUESTION = "[What color is the {a} of {c}|Which color has the {a} of {c}|The {a} of {c} has which color|In {c}, what color is the {a}]?"
FACT = "[The {a} of {c} is {v}|In {c} the {a} is {v}|People of {c} have a {a} that is {v}|For {c}, the {a} is {v}]."


def _names(rng: random.Random, count: int, ending: str, capital: bool = True) -> list[str]:
    names: set[str] = set()
    while len(names) < count:
        name = "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(2)) + ending
        names.add(name.capitalize() if capital else name)
    return sorted(names)


class Facts(NamedTuple):
    countries: Mapping[str, Mapping[str, str]]  # country -> attribute -> color
    element_mass: Mapping[str, int]


@cache
def facts(level: Difficulty) -> Facts:
    rng = random.Random(_SEED)
    lands = _names(rng, level.countries, "land")
    countries = {land: {attribute: rng.choice(COLORS) for attribute in ATTRIBUTES} for land in lands}
    return Facts(countries, {name: rng.randint(2, 9) for name in _names(rng, level.elements, "um", capital=False)})


def known(rng: random.Random, names: Mapping[str, object], count: int = 1) -> list[str]:
    """Different names drawn by Zipf's law, the first most often: knowledge has a long tail, hard to learn."""
    pool, chosen = list(names), list[str]()
    while len(chosen) < count:
        chosen.append(rng.choices(pool, [1 / (rank + 1) for rank in range(len(pool))])[0])
        pool.remove(chosen[-1])
    return chosen


def fact(rng: random.Random, level: Difficulty) -> str:
    countries = facts(level).countries
    (country,), attribute = known(rng, countries), rng.choice(ATTRIBUTES)
    return say(rng, FACT, c=country, a=attribute, v=countries[country][attribute])


def choice(
    rng: random.Random, question: str, options: list[str], answer: str, thoughts: list[str], content: str,
    *, restated: bool = False,
) -> Example:  # fmt: skip
    """A question with its options, gone through up to the right one; `restated` says the answer beside each."""
    lines = [f"{letter} {option}" for letter, option in zip(LETTERS, options, strict=False)]
    for letter, option in zip(LETTERS, options, strict=False):
        verdict = say(rng, "[yes|right]" if option == answer else "[no|wrong]")
        thoughts.append(f"{letter} {option}{f', {answer}:' if restated else ''} {verdict}.")
        if option == answer:
            break
    thoughts.append(say(rng, "[So the|Hence the|Therefore the|The|Thus the] answer is ({l}).", l=letter))
    return Example("\n".join([question, *lines]), " ".join(thoughts), content, {"target": letter})


def sample(rng: random.Random, level: Difficulty) -> Example:
    countries = facts(level).countries
    (country,), attribute = known(rng, countries), rng.choice(ATTRIBUTES)
    answer = countries[country][attribute]
    options = rng.sample(COLORS, len(LETTERS))
    question = say(rng, _QUESTION, c=country, a=attribute)
    thought = say(rng, FACT, c=country, a=attribute, v=answer)
    return choice(rng, question, options, answer, [thought], f"mmlu {country} {attribute} {options}", restated=True)
