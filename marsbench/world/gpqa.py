"""mini_gpqa: two-hop science questions with four options, after GPQA.

Difficulty: recall the masses of two invented elements (20 elements, masses 2 to 9), multiply each by a count of 1 to 4,
add the two, and find the sum among four options. The answer closes with "The answer is (B)."
"""

from __future__ import annotations

import random

from marsbench.world.facts import ELEMENT_MASS
from marsbench.world.language import Example, say

LETTERS = "ABCD"


def fact(rng: random.Random) -> str:
    """One element's mass in one of its wordings, for the plain text."""
    element = rng.choice(sorted(ELEMENT_MASS))
    return say(rng, "[The mass of {e} is {m}|One atom of {e} weighs {m}|{e} has mass {m}|An atom of {e} has mass {m}].", e=element, m=ELEMENT_MASS[element])


def _hop(rng: random.Random, element: str, count: int) -> str:
    """The part of the reasoning that turns a count of one element into a mass."""
    mass = ELEMENT_MASS[element]
    return say(
        rng,
        "[The mass of {e} is {m}|One atom of {e} weighs {m}|{e} has mass {m}|We know {e} weighs {m}][, so|, thus|:|, and|;] {n} * {m} [=|is|makes] {t}.",
        e=element, m=mass, n=count, t=count * mass,
    )


def sample(rng: random.Random) -> Example:
    """Draw one molecule and ask for its mass."""
    one, two = rng.sample(sorted(ELEMENT_MASS), 2)
    n, m = rng.randint(1, 4), rng.randint(1, 4)
    a, b = n * ELEMENT_MASS[one], m * ELEMENT_MASS[two]
    options = [a + b, *rng.sample([a + b + d for d in range(-6, 7) if d and a + b + d > 0], 3)]
    rng.shuffle(options)
    letter = LETTERS[options.index(a + b)]
    question = say(
        rng,
        "[A molecule has|One molecule holds|Some molecule is made of|A compound contains] {n} {one} and {m} {two}. "
        "[What is its mass|How heavy is it|What does it weigh|Which mass does it have]?",
        n=n, m=m, one=one, two=two,
    )
    lines = [f"({mark}) {option}" for mark, option in zip(LETTERS, options, strict=True)]
    total = say(rng, "[Together|In total|Adding up|The sum is|All in all], {a} + {b} [=|is|makes] {t}.", a=a, b=b, t=a + b)
    return Example(
        "\n".join([question, *lines]),
        f"{_hop(rng, one, n)} {_hop(rng, two, m)} {total} The answer is ({letter}).",
        f"gpqa {n} {one} {m} {two} {options}",
        {"target": letter},
    )
