"""mini_ifeval: instructions whose fulfilment a program can check, after IFEval.

Name some things of a kind, under instructions on the format and, where the difficulty says so, on what is named. A
response counts when every instruction holds.
"""

import random
import re
from collections.abc import Callable, Mapping
from typing import Any

from marsbench.world.difficulty import Difficulty
from marsbench.world.language import Example, say
from marsbench.world.mmlu_pro import COLORS

TOPICS = {
    "animals": ["cat", "dog", "cow", "duck", "goat", "frog", "lion", "bear", "wolf", "crab"],
    "colors": COLORS,
    "fruits": ["plum", "pear", "peach", "grape", "lemon", "mango", "melon", "apple", "cherry", "fig"],
    "tools": ["saw", "drill", "file", "wrench", "hammer", "rake", "axe", "shovel", "pliers", "chisel"],
}
NUMBERS = {2: "two", 3: "three", 4: "four", 5: "five", 6: "six"}
OPENERS = ["Sure", "Okay", "Hello", "Yes"]
CLOSERS = ["done", "bye"]


def sample(rng: random.Random, level: Difficulty) -> Example:
    topic, count = rng.choice(sorted(TOPICS)), rng.randint(*level.things)
    first = rng.randrange(len(TOPICS[topic]))
    things = TOPICS[topic][first:] + TOPICS[topic][:first]
    asked = "[Name|List|Give me|Write down|Tell me] [{word}|exactly {word}] {topic}."
    asks = [say(rng, asked, word=NUMBERS[count], topic=topic)]
    rules: dict[str, Any] = {"count": count, "topic": topic}
    for rule in rng.sample(level.kinds_of_rules, rng.choice(level.rules)):
        rules[rule] = _DRAWN[rule](rng, things) if rule in _DRAWN else True
        asks.append(say(rng, _ASK[rule], value=rules[rule]))
        things = [thing for thing in things if allowed(rules, thing)]
    if level.says_which_first:
        rules["first"] = things[0]
        asks.append(say(rng, _ASK["first"], value=things[0]))
    prompt = " ".join(asks)
    return Example(prompt, _written(rules, things[:count]), f"ifeval {prompt}", {"rules": rules})


def allowed(rules: Mapping[str, Any], thing: str) -> bool:
    return thing != rules.get("without") and rules.get("without_letter", "-") not in thing


# What is drawn for a rule; the others hold or not.
_DRAWN: dict[str, Callable[[random.Random, list[str]], str]] = {
    "opener": lambda rng, things: rng.choice(OPENERS),
    "closer": lambda rng, things: rng.choice(CLOSERS),
    "without": lambda rng, things: rng.choice(things[1:]),
    "without_letter": lambda rng, things: rng.choice(_rare_letters(things)),
}
_MOST_HIT = 3  # things that a forbidden letter is in, so that enough are left


def _rare_letters(things: list[str]) -> list[str]:
    hits = {letter: sum(letter in thing for thing in things) for letter in sorted({*"".join(things)})}
    return [letter for letter, count in hits.items() if count <= _MOST_HIT]


_ASK = {
    "starred": "[Put each on its own line with a star|Use a starred list|Write them as a starred list|Start each line with a star].",
    "opener": "[Begin with the word {value}|Start with {value}|The first word must be {value}|Open with {value}].",
    "closer": "[End with the word {value}|Finish with {value}|The last word must be {value}|Close with {value}].",
    "capitals": "[Use only capital letters|Write in capitals|Everything must be in capital letters|No small letters].",
    "quoted": "[Put the answer in double quotes|Wrap it all in double quotes|Use double quotes around the answer|Quote the whole answer].",
    "numbered": "[Number them|Put a number before each|Count them as you go|Give each a number].",
    "without": "[Leave out {value}|Do not name {value}|Without {value}|No {value}, please].",
    "without_letter": "[None with the letter {value}|Avoid names with the letter {value}|No name may hold the letter {value}].",
    "first": "[The first is {value}|Take {value} first|Of them, {value} comes first|Name {value} before the others].",
}


def _written(rules: Mapping[str, Any], things: list[str]) -> str:
    starred = rules.get("starred", False)
    if rules.get("numbered"):
        things = [f"{number} {thing}" for number, thing in enumerate(things, 1)]
    body = "\n".join(f"* {thing}" for thing in things) if starred else ", ".join(things)
    parts = [rules.get("opener", ""), body, rules.get("closer", "")]
    text = ("\n" if starred else " ").join(part for part in parts if part)
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
        "without": lambda thing: thing not in named,
        "without_letter": lambda letter: not any(letter in thing for thing in named),
        "first": lambda thing: named[:1] == [thing],
        "numbered": lambda _: re.findall(r"\d+", text) == [str(n + 1) for n in range(rules["count"])],
    }
    return {rule: checks[rule](value) for rule, value in rules.items() if rule in checks}
