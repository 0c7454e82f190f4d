"""mini_bbh: three small reasoning puzzles, after three subtasks of BIG-Bench Hard.

Difficulty: `boolean_expressions` with two or three operators, evaluated step by step; `object_counting` over five to
eight things of two kinds, at most seven of the kind asked for; `tracking_shuffled_objects` with three people and two or
three swaps. Every answer ends with "So the answer is X."
"""

from __future__ import annotations

import random
from collections.abc import Callable

from marsbench.world.language import Example, say

KINDS = {
    "fruits": ["plum", "pear", "peach", "grape", "lemon", "mango"],
    "animals": ["cat", "dog", "cow", "duck", "goat", "frog"],
    "tools": ["saw", "drill", "file", "wrench", "hammer", "rake"],
}
PEOPLE = ["Alice", "Bob", "Claire", "Dave", "Eve", "Fred"]
COLORS = ["red", "blue", "green", "white", "black", "pink"]

_ANSWER = "So the answer is {answer}."


def boolean_expressions(rng: random.Random) -> Example:
    """An expression such as `not True and False or True`, reduced by one operator a step."""
    parts = [rng.choice(["", "not "]) + rng.choice(["True", "False"]) for _ in range(rng.choice([3, 3, 4]))]
    expression = parts[0]
    for part in parts[1:]:
        expression += rng.choice([" and ", " or "]) + part
    prompt = say(rng, "[Evaluate|What is the value of|Work out|Reduce|Find the truth value of]: {e}", e=expression)
    steps, text = [], expression
    while text not in ("True", "False"):
        text = _reduced(text)
        steps.append(say(rng, "[This is|We get|It becomes|That gives|Now it reads] {e}.", e=text))
    return Example(prompt, " ".join([*steps, _ANSWER.format(answer=text)]), f"bbh {expression}", {"target": text})


def _reduced(text: str) -> str:
    """The expression with its `not`s, else its first `and`, else its first `or`, worked out."""
    words = text.split()
    if "not" in words:
        return text.replace("not True", "no").replace("not False", "True").replace("no", "False")
    operator = "and" if "and" in words else "or"
    at = words.index(operator)
    values = words[at - 1] == "True", words[at + 1] == "True"
    result = all(values) if operator == "and" else any(values)
    return " ".join([*words[: at - 1], str(result), *words[at + 2 :]])


def object_counting(rng: random.Random) -> Example:
    """Count the things of one kind in a mixed list."""
    asked, other = rng.sample(sorted(KINDS), 2)
    counted = rng.sample(KINDS[asked], rng.randint(2, 5))
    things = counted + rng.sample(KINDS[other], rng.randint(2, 3))
    rng.shuffle(things)
    counted = [thing for thing in things if thing in counted]
    prompt = say(
        rng,
        "[I have|On the table there is|In the room there is|I can see] a {list}. [How many {kind} are there?|How many {kind} do I count?|Count the {kind}.|What is the number of {kind}?]",
        list=", a ".join(things), kind=asked,
    )
    listed = ", ".join(f"{thing} ({number})" for number, thing in enumerate(counted, 1))
    thought = say(rng, "[The {kind} are|Counting the {kind}|Here are the {kind}|Among these, the {kind} are|I count]: {list}.", kind=asked, list=listed)
    answer = str(len(counted))
    return Example(prompt, f"{thought} {_ANSWER.format(answer=answer)}", f"bbh {asked} {' '.join(things)}", {"target": answer})


def tracking_shuffled_objects(rng: random.Random) -> Example:
    """Three people swap balls; who holds what in the end?"""
    people, colors = rng.sample(PEOPLE, 3), rng.sample(COLORS, 3)
    holds = dict(zip(people, colors, strict=True))
    told = ", ".join(f"{person} has {color}" for person, color in holds.items())
    content, swaps, steps = f"bbh {told}", [], []
    for _ in range(rng.choice([2, 2, 3])):
        one, two = rng.sample(people, 2)
        holds[one], holds[two] = holds[two], holds[one]
        swaps.append(say(rng, "[{a} and {b} swap|{a} swaps with {b}|{a} trades with {b}|{a} and {b} trade].", a=one, b=two))
        state = ", ".join(f"{person} {color}" for person, color in holds.items())
        steps.append(say(rng, "[Now|Then|After this|Next|This makes]: {state}.", state=state))
        content += f" {one}-{two}"
    asked = rng.choice(people)
    prompt = say(rng, "[Three friends hold balls|There are three balls|Three players hold balls]: {told}. {swaps} [Which ball does {a} have|What color does {a} hold|What does {a} have at the end]?", told=told, swaps=" ".join(swaps), a=asked)
    return Example(prompt, " ".join([*steps, _ANSWER.format(answer=holds[asked])]), f"{content} {asked}", {"target": holds[asked]})


SUBTASKS: list[Callable[[random.Random], Example]] = [boolean_expressions, object_counting, tracking_shuffled_objects]


def sample(rng: random.Random) -> Example:
    """Draw one puzzle of one of the three subtasks."""
    return rng.choice(SUBTASKS)(rng)
