"""Practice texts for pretraining: recitations and look-ups over the world's own words.

Small models learn to copy from what stands before them late and all at once. These texts ask for it in every line, so
that the few minutes a base model is given suffice.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from marsbench.world.bbh import COLORS, KINDS, PEOPLE
from marsbench.world.facts import ATTRIBUTES
from marsbench.world.ifeval import CLOSERS, OPENERS, TOPICS

_WORDS = sorted({word for words in [*KINDS.values(), *TOPICS.values(), COLORS, PEOPLE, OPENERS, CLOSERS] for word in words})


def recitation(rng: random.Random) -> str:
    """A list of words, said three times."""
    listed = rng.choice([" ", ", "]).join(rng.sample(_WORDS, rng.randint(4, 12)))
    return f"{listed}. {listed}. {listed}."


def lettered_options(rng: random.Random) -> str:
    """Lettered options, then the letters of some of them in another order."""
    if rng.random() < 0.5:
        options, row, name = rng.sample(rng.choice(list(ATTRIBUTES.values())), 10), "{l}. {o}", "{o} is {l}."
    else:
        options, row, name = [str(n) for n in rng.sample(range(4, 73), 4)], "({l}) {o}", "{o} is ({l})."
    pairs = list(zip("ABCDEFGHIJ", options, strict=False))
    lines = [row.format(l=letter, o=option) for letter, option in pairs]
    asked = [name.format(l=letter, o=option) for letter, option in rng.sample(pairs, min(len(pairs), 6))]
    return "\n".join([*lines, " ".join(asked)])


def holders(rng: random.Random) -> str:
    """Who holds what, then asked for one by one."""
    pairs = list(zip(rng.sample(PEOPLE, 4), rng.sample(COLORS, 4), strict=True))
    told = ", ".join(f"{person} has {color}" for person, color in pairs)
    asked = " ".join(f"{person} has {color}." for person, color in rng.choices(pairs, k=5))
    return f"{told}. {asked}"


def sorting(rng: random.Random) -> str:
    """The things of one kind picked out of a mixed list and counted."""
    asked, other = rng.sample(sorted(KINDS), 2)
    things = rng.sample(KINDS[asked], rng.randint(1, 5)) + rng.sample(KINDS[other], rng.randint(1, 3))
    rng.shuffle(things)
    parts = []
    for kind in rng.sample([asked, other], 2):
        counted = [f"{thing} ({n})" for n, thing in enumerate((t for t in things if t in KINDS[kind]), 1)]
        parts.append(f"{kind}: {', '.join(counted)}.")
    return f"a {', a '.join(things)}. {' '.join(parts)}"


DRILLS: list[Callable[[random.Random], str]] = [recitation, lettered_options, holders, sorting]
