"""mini_bbh: three small reasoning puzzles, after three subtasks of BIG-Bench Hard.

`boolean_expressions` are evaluated step by step; `navigate` moves on a line; `date_understanding` counts some days from a
day of the week. How many operands, moves and days is the difficulty. Every answer ends with "So the answer is X."
"""

import random

from marsbench.world.difficulty import Difficulty
from marsbench.world.language import Example, say

DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]

_ANSWER = "So the answer is {answer}."


def boolean_expressions(rng: random.Random, level: Difficulty) -> Example:
    """An expression such as `not True and False or True`, reduced by one operator a step."""
    parts = [rng.choice(["", "not "]) + rng.choice(["True", "False"]) for _ in range(rng.choice(level.operands))]
    expression = parts[0] + "".join(rng.choice([" and ", " or "]) + part for part in parts[1:])
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
    result = (all if operator == "and" else any)(words[place] == "True" for place in (at - 1, at + 1))
    return " ".join([*words[: at - 1], str(result), *words[at + 2 :]])


def navigate(rng: random.Random, level: Difficulty) -> Example:
    """Steps forward and backward on a line; does one come back to the start?"""
    place, told, steps = 0, [], []
    count = rng.choice(level.moves)
    for number in range(count):
        forward = place <= 0 or (place < 10 and rng.random() < 0.4)
        n = rng.randint(1, 9) if forward else rng.randint(1, min(place, 9))
        if number == count - 1 and 0 < place <= 9 and rng.random() < 0.5:
            forward, n = False, place
        told.append(say(rng, "[Take|Go|Walk] {n} [steps|paces] {way}.", n=n, way="forward" if forward else "back"))
        after = place + n if forward else place - n
        sum_ = f"{place} {'+' if forward else '-'} {n}"
        steps.append(say(rng, "[From|We are at|Now at|At] {p}: {s} [=|is|makes] {q}.", p=place, s=sum_, q=after))
        place = after
    answer = "No" if place else "Yes"
    asked = "[Do you return to the start|Are you back where you began|Is that the starting point]?"
    prompt = f"{' '.join(told)} {say(rng, asked)}"
    return Example(prompt, " ".join([*steps, _ANSWER.format(answer=answer)]), f"bbh {told}", {"target": answer})


def date_understanding(rng: random.Random, level: Difficulty) -> Example:
    """The day of the week some days from now or ago, counted off."""
    today, days, ahead = rng.randrange(7), rng.randint(*level.days), rng.random() < 0.5
    passed = [DAYS[(today + (n if ahead else -n)) % 7] for n in range(1, days + 1)]
    whens = "[in {n} days|{n} days from now|{n} days later]", "[{n} days ago|{n} days before|{n} days earlier]"
    asked = "[Today is|It is|We have] {day}. [Which day|What day of the week|What day] [is|comes] {when}?"
    prompt = say(rng, asked, day=DAYS[today], when=say(rng, whens[0 if ahead else 1], n=days))
    counted = ", ".join(f"{n} {day}" for n, day in enumerate(passed, 1))
    way = "[forward|onward]" if ahead else "[back|backward]"
    thought = say(rng, f"[We count|Counting|One by one|Day by day] {way}: {{c}}.", c=counted)
    return Example(prompt, f"{thought} {_ANSWER.format(answer=passed[-1])}", f"bbh {prompt}", {"target": passed[-1]})


def sample(rng: random.Random, level: Difficulty) -> Example:
    return rng.choice([boolean_expressions, navigate, date_understanding])(rng, level)
