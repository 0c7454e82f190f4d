"""The invented facts that the knowledge questions ask for: countries and chemical elements.

They are drawn from a fixed seed, so that every training run and every test set of a difficulty speak of the same world.
"""

import random
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from marsbench.world.difficulty import Difficulty

_SEED = 2604


def _names(rng: random.Random, count: int, ending: str, capital: bool = True) -> list[str]:
    names: set[str] = set()
    while len(names) < count:
        name = "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(2)) + ending
        names.add(name.capitalize() if capital else name)
    return sorted(names)


COLORS = ["red", "blue", "green", "white", "black", "pink", "brown", "gray", "gold", "teal"]
ATTRIBUTES = ["flag", "coin", "coat"]


class Facts(NamedTuple):
    countries: Mapping[str, Mapping[str, str]]  # country -> attribute -> color
    element_mass: Mapping[str, int]


@cache
def facts(level: Difficulty) -> Facts:
    """The facts of the world at a difficulty: the harder, the more there are."""
    rng = random.Random(_SEED)
    countries = {
        country: {attribute: rng.choice(COLORS) for attribute in ATTRIBUTES}
        for country in _names(rng, level.countries, "land")
    }
    return Facts(countries, {name: rng.randint(2, 9) for name in _names(rng, level.elements, "um", capital=False)})


def known(rng: random.Random, names: Mapping[str, object], count: int = 1) -> list[str]:
    """Different names drawn by Zipf's law, the first most often: knowledge has a long tail, hard to learn."""
    pool, chosen = list(names), list[str]()
    while len(chosen) < count:
        chosen.append(rng.choices(pool, [1 / (rank + 1) for rank in range(len(pool))])[0])
        pool.remove(chosen[-1])
    return chosen
