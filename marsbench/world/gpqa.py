"""mini_gpqa: two-hop science questions with four options, after GPQA.

Difficulty: recall the masses of two invented elements (40 elements, met by Zipf's law, masses 2 to 9), multiply each by a count of 1 to 4,
add the two, tell by the sum which of four kinds of matter it is, and find that kind among the options. The answer
closes with "The answer is (B)."
"""

from __future__ import annotations

import random

from marsbench.world.facts import ELEMENT_MASS, known
from marsbench.world.language import Example, say
from marsbench.world.mmlu_pro import closing, search

LETTERS = "ABCD"
KINDS = ["gas", "liquid", "glass", "metal"]  # by the tens of a molecule's mass, the last for all above


def kind_of(mass: int) -> str:
    """The kind of matter that a molecule of this mass forms."""
    return KINDS[min(mass // 10, 3)]


def fact(rng: random.Random) -> str:
    """One element's mass in one of its wordings, for the plain text."""
    (element,) = known(rng, ELEMENT_MASS)
    return say(
        rng,
        "[The mass of|One atom of|We know that|Each] {e} [is|weighs|has] {m}.",
        e=element,
        m=ELEMENT_MASS[element],
    )


def _hop(rng: random.Random, element: str, count: int) -> str:
    """The part of the reasoning that turns a count of one element into a mass."""
    mass = ELEMENT_MASS[element]
    return say(
        rng,
        "[The mass of|One atom of|We know that|Each] {e} [is|weighs|has] {m}[, so|, thus|, and|;] {n} * {m} [=|is|makes] {t}.",
        e=element,
        m=mass,
        n=count,
        t=count * mass,
    )


def sample(rng: random.Random) -> Example:
    """Draw one molecule and ask what kind of matter it forms."""
    one, two = known(rng, ELEMENT_MASS, 2)
    n, m = rng.randint(1, 4), rng.randint(1, 4)
    a, b = n * ELEMENT_MASS[one], m * ELEMENT_MASS[two]
    options, kind = rng.sample(KINDS, len(KINDS)), kind_of(a + b)
    letter = LETTERS[options.index(kind)]
    question = say(
        rng,
        "[A molecule has|One molecule holds|Some molecule is made of|A compound contains] {n} {one} and {m} {two}. "
        "[What does it form|What kind of matter is it|As what does it occur|What is it]?",
        n=n,
        m=m,
        one=one,
        two=two,
    )
    lines = [f"{mark} {option}" for mark, option in zip(LETTERS, options, strict=True)]
    total = say(
        rng,
        "[Together|In total|Adding up|All in all], {a} + {b} [=|is|makes] {t}, [a|thus a|which is a|so a] {k}.",
        a=a,
        b=b,
        t=a + b,
        k=kind,
    )
    return Example(
        "\n".join([question, *lines]),
        f"{_hop(rng, one, n)} {_hop(rng, two, m)} {total} {search(rng, options, kind)} {closing(rng, letter)}",
        f"gpqa {n} {one} {m} {two} {options}",
        {"target": letter},
    )
