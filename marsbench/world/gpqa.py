"""mini_gpqa: two-hop science questions with four options, after GPQA.

To be recalled are the masses of two or three invented elements (met by Zipf's law); multiplied by counts and added,
they tell which of four kinds of matter it is. The answer closes with "The answer is (B)."
"""

import random
from itertools import accumulate

from marsbench.world.difficulty import Difficulty
from marsbench.world.language import Example, say
from marsbench.world.mmlu_pro import choice, facts, known

KINDS = ["gas", "liquid", "glass", "metal"]  # by a molecule's mass, the last for all above
_MASS = "[The mass of|One atom of|We know that|Each] {e} [is|weighs|has] {m}"


def fact(rng: random.Random, level: Difficulty) -> str:
    masses = facts(level).element_mass
    (element,) = known(rng, masses)
    return say(rng, f"{_MASS}.", e=element, m=masses[element])


# How a count of one element becomes a mass, and how masses add up to a kind.
_HOP = _MASS + "[, so|, thus|, and|;] {n} * {m} [=|is|makes] {t}."
_TOTAL = "[Together|In total|Adding up|All in all], {sums}, [a|thus a|which is a|so a] {kind}."


def sample(rng: random.Random, level: Difficulty) -> Example:
    masses = facts(level).element_mass
    atoms = [(rng.randint(*level.atoms), element) for element in known(rng, masses, level.elements_per_molecule)]
    parts = [count * masses[element] for count, element in atoms]
    options, kind = rng.sample(KINDS, len(KINDS)), KINDS[min(sum(parts) // level.mass_per_kind, 3)]
    molecule = [f"{count} {element}" for count, element in atoms]
    question = say(
        rng,
        "[A molecule has|One molecule holds|Some molecule is made of|A compound contains] {atoms}. "
        "[What does it form|What kind of matter is it|As what does it occur|What is it]?",
        atoms=f"{', '.join(molecule[:-1])} and {molecule[-1]}",
    )
    pairs = zip(accumulate(parts), parts[1:], strict=False)
    sums = ", ".join(f"{sum_} + {part} [=|is|makes] {sum_ + part}" for sum_, part in pairs)
    total = say(rng, _TOTAL.replace("{sums}", sums), kind=kind)
    hops = [say(rng, _HOP, e=name, m=masses[name], n=count, t=count * masses[name]) for count, name in atoms]
    return choice(rng, question, options, kind, [*hops, total], f"gpqa {' '.join(molecule)} {options}")
