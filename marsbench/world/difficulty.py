"""How hard the world's questions are: what a generator may ask of a model, at each of its levels.

`USUAL` is the world that the mini benchmarks ask about; the `hard` benchmarks have the same six shapes with more things,
operands, steps, facts and rules. `EXAM` is the harder world with more steps in two shapes: only tests ask it. Pairs are
ranges with both ends; of other tuples one entry is drawn, as often as it stands there.
"""

from dataclasses import dataclass, replace

from marsbench.errors import check_known

# What the models of a world learn from, and how often: problems that take longest to learn count for more. Each level
# names its own, in this order: another benchmark must not change what an existing world says.
_SIX = (
    ("mini_ifeval", 1.0), ("mini_bbh", 1.0), ("mini_mmlu_pro", 1.5), ("mini_gpqa", 1.3), ("mini_gsm8k", 1.0),
    ("mini_humaneval", 1.0),
)  # fmt: skip


@dataclass(frozen=True)
class Difficulty:
    """One level; the generators say what their entries mean."""

    name: str
    # mini_ifeval
    things: tuple[int, int]  # named in an answer
    rules: tuple[int, ...]  # of format and content, together
    kinds_of_rules: tuple[str, ...]
    says_which_first: bool  # whether the request names the thing to begin with
    # mini_bbh
    operands: tuple[int, ...]
    moves: tuple[int, ...]
    days: tuple[int, int]
    # mini_mmlu_pro and mini_gpqa
    countries: int
    elements: int
    atoms: tuple[int, int]  # of one element in a molecule
    elements_per_molecule: int
    mass_per_kind: int  # of a molecule, from one kind of matter to the next
    # mini_gsm8k
    events: tuple[int, ...]
    start: tuple[int, int]
    operand: int  # the largest
    # mini_humaneval
    operations: tuple[int, ...]
    two_word_names: bool  # functions are called `do_...`, by one of many words
    taught: tuple[tuple[str, float], ...] = _SIX  # benchmarks that training draws from, and their weights


_FORMAT = ("capitals", "closer", "numbered", "opener", "quoted", "starred")
USUAL = Difficulty(
    "usual",
    things=(2, 4), rules=(1, 2), kinds_of_rules=_FORMAT, says_which_first=False,
    operands=(3, 3, 4), moves=(2, 3, 3), days=(2, 6),
    countries=80, elements=40, atoms=(1, 4), elements_per_molecule=2, mass_per_kind=10,
    events=(2, 2, 3), start=(3, 15), operand=6,
    operations=(2, 3, 4), two_word_names=False,
)  # fmt: skip
HARD = Difficulty(
    "hard",
    things=(3, 6), rules=(2, 3), kinds_of_rules=(*_FORMAT, "without", "without_letter"), says_which_first=True,
    operands=(4, 5, 6, 7), moves=(3, 4, 5), days=(3, 13),
    countries=300, elements=120, atoms=(1, 6), elements_per_molecule=3, mass_per_kind=20,
    events=(3, 4, 5), start=(3, 50), operand=29,
    operations=(3, 4, 5), two_word_names=True,
)  # fmt: skip
# What a converged model is asked of the two shapes that it has learned to the full: one step more than it was taught.
EXAM = replace(HARD, name="exam", events=(6,), operations=(5, 6))
DIFFICULTIES = {level.name: level for level in (USUAL, HARD, EXAM)}


def difficulty(name: str) -> Difficulty:
    check_known("difficulty", name, DIFFICULTIES)
    return DIFFICULTIES[name]
