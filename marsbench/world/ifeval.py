"""mini_ifeval: instructions whose fulfilment a program can check, after IFEval.

Difficulty: name two to four things of a kind, under one or two format instructions out of six (as a starred list,
with a given first or last word, in capitals, in quotes, numbered). A
response counts when every instruction holds.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from typing import Any

from marsbench.world.facts import COLORS
from marsbench.world.language import Example, say

TOPICS = {
    "animals": ["cat", "dog", "cow", "duck", "goat", "frog", "lion", "bear", "wolf", "crab"],
    "colors": COLORS,
    "fruits": ["plum", "pear", "peach", "grape", "lemon", "mango", "melon", "apple", "cherry", "fig"],
    "tools": ["saw", "drill", "file", "wrench", "hammer", "rake", "axe", "shovel", "pliers", "chisel"],
}
NUMBERS = {2: "two", 3: "three", 4: "four"}
OPENERS = ["Sure", "Okay", "Hello", "Yes"]
CLOSERS = ["done", "bye"]


def sample(rng: random.Random) -> Example:
    """Draw a request, its instructions, and a response that follows them."""
    topic, count = rng.choice(sorted(TOPICS)), rng.randint(2, 4)
    first = rng.randrange(len(TOPICS[topic]))
    things = [TOPICS[topic][(first + n) % len(TOPICS[topic])] for n in range(count)]
    asks = [
        say(
            rng,
            "[Name|List|Give me|Write down|Tell me] [{word}|exactly {word}] {topic}.",
            word=NUMBERS[count],
            topic=topic,
        )
    ]
    rules: dict[str, Any] = {"count": count, "topic": topic}
    for rule in rng.sample(sorted(_RULES), rng.choice([1, 2])):
        rules[rule] = _RULES[rule](rng)
        asks.append(say(rng, _ASK[rule], value=rules[rule]))
    prompt = " ".join(asks)
    return Example(prompt, _written(rules, things), f"ifeval {prompt}", {"rules": rules})


_RULES: dict[str, Callable[[random.Random], Any]] = {
    "starred": lambda rng: True,
    "opener": lambda rng: rng.choice(OPENERS),
    "closer": lambda rng: rng.choice(CLOSERS),
    "capitals": lambda rng: True,
    "quoted": lambda rng: True,
    "numbered": lambda rng: True,
}
_ASK = {
    "starred": "[Put each on its own line with a star|Use a starred list|Write them as a starred list|Start each line with a star].",
    "opener": "[Begin with the word {value}|Start with {value}|The first word must be {value}|Open with {value}].",
    "closer": "[End with the word {value}|Finish with {value}|The last word must be {value}|Close with {value}].",
    "capitals": "[Use only capital letters|Write in capitals|Everything must be in capital letters|No small letters].",
    "quoted": "[Put the answer in double quotes|Wrap it all in double quotes|Use double quotes around the answer|Quote the whole answer].",
    "numbered": "[Number them|Put a number before each|Count them as you go|Give each a number].",
}


def _written(rules: Mapping[str, Any], things: list[str]) -> str:
    """A response that follows every rule."""
    starred = rules.get("starred", False)
    if rules.get("numbered"):
        things = [f"{number} {thing}" for number, thing in enumerate(things, 1)]
    body = "\n".join(f"* {thing}" for thing in things) if starred else ", ".join(things)
    breaks = "\n" if starred else " "
    parts = [rules.get("opener", ""), body, rules.get("closer", "")]
    text = breaks.join(part for part in parts if part)
    text = text.upper() if rules.get("capitals") else text
    return f'"{text}"' if rules.get("quoted") else text


def followed(rules: Mapping[str, Any], response: str) -> dict[str, bool]:
    """Instruction -> whether the response follows it (the checker behind the task file)."""
    text = response.strip()
    words = re.findall(r"[a-z]+", text.lower())
    named = [word for word in words if word in TOPICS[rules["topic"]]]
    checks: dict[str, Callable[[Any], bool]] = {
        "count": lambda n: len(named) == len(set(named)) == n,
        "starred": lambda _: len(re.findall(r"^\"?\* ", text, re.MULTILINE)) == rules["count"],
        "opener": lambda word: words[:1] == [word.lower()],
        "closer": lambda word: words[-1:] == [word.lower()],
        "capitals": lambda _: text == text.upper(),
        "quoted": lambda _: len(text) > 1 and text[0] == text[-1] == '"',
        "numbered": lambda _: re.findall(r"\d+", text) == [str(n + 1) for n in range(rules["count"])],
    }
    return {rule: checks[rule](value) for rule, value in rules.items() if rule in checks}
