"""mini_gsm8k: word problems about counting things, after GSM8K.

Steps of addition, subtraction or multiplication; how many there are and how large their operands is the difficulty. The
answer is worked out step by step and closed with "The answer is N."
"""

import random

from marsbench.world.difficulty import Difficulty
from marsbench.world.language import Example, say

NAMES = ["Tom", "Ann", "Ben", "Eva", "Sam", "Mia", "Leo", "Zoe", "Max", "Ida"]
THINGS = ["apples", "pens", "coins", "books", "eggs", "cards", "shells", "stamps"]

ORDER = ["First", "Then", "Finally"]  # of up to three events
LONG_ORDER = ["First", "Second", "Third", "Fourth", "Fifth"]

_STORY = {
    "+": "{name} [buys|finds|gets|is given|picks up] {n} more[| {things}| of them].",
    "-": "{name} [sells|loses|gives away|drops] {n}[| {things}| of them].",
    "*": "the number [of {things}|of them] grows {n} times[| over].",
}
_THOUGHT = {
    "+": "[{name} adds|add|we add] {n}[, so|, and|;] {a} + {n} [=|is|makes] {b}.",
    "-": "[{name} parts with|take away|we subtract] {n}[, so|, and|;] {a} - {n} [=|is|leaves] {b}.",
    "*": "[multiply by|it grows|we multiply by] {n}[, so|, and|;] {a} * {n} [=|is|makes] {b}.",
}


def sample(rng: random.Random, level: Difficulty) -> Example:
    name, things, start = rng.choice(NAMES), rng.choice(THINGS), rng.randint(*level.start)
    words: dict[str, object] = {"name": name, "things": things, "n": start}
    story = [say(rng, "{name} [has|owns|starts with|begins with] {n} {things}.", **words)]
    begins = "[At first there are|{name} starts with|We begin with|The start is|In the beginning:] {n} {things}."
    thoughts = [say(rng, begins, **words)]
    content, total = f"gsm8k {name} {things} {start}", start
    for order in (ORDER if max(level.events) <= len(ORDER) else LONG_ORDER)[: rng.choice(level.events)]:
        operator = rng.choice(["+", "+", *(["-", "-"] if total > 2 else []), *(["*"] if total <= 10 else [])])
        n = rng.randint(*{"+": (1, level.operand), "-": (1, min(level.operand, total - 1)), "*": (2, 3)}[operator])
        after = {"+": total + n, "-": total - n, "*": total * n}[operator]
        words |= {"n": n, "a": total, "b": after}
        story.append(f"{order} {say(rng, _STORY[operator], **words)}")
        thoughts.append(f"{order} {say(rng, _THOUGHT[operator], **words)}")
        content, total = f"{content} {operator}{n}", after
    asked = "How many {things} [does {name} have now|are there now|are there in the end|does {name} end up with]?"
    story.append(say(rng, asked, **words))
    thoughts.append(f"The answer is {total}.")
    return Example(" ".join(story), " ".join(thoughts), content, {"target": str(total)})
