"""mini_humaneval: complete a small Python function from its docstring, after HumanEval.

Some operations in a row on a number or a string (how many is the difficulty), or the choice of some of a list's values
and what to make of them. The program is run against seven inputs.
"""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

from marsbench.world.difficulty import Difficulty
from marsbench.world.language import Example, say


class Operation(NamedTuple):
    wording: str
    code: str
    run: Callable[[Any, int], Any]


NUMBER = [
    Operation("[plus {k}|increased by {k}|with {k} added]", "{v} + {k}", lambda v, k: v + k),
    Operation("[minus {k}|reduced by {k}|with {k} taken away]", "{v} - {k}", lambda v, k: v - k),
    Operation("[times {k}|multiplied by {k}]", "{v} * {k}", lambda v, k: v * k),
    Operation("[modulo {k}|reduced modulo {k}]", "{v} % {k}", lambda v, k: v % k),
    Operation("[squared|to the power of two]", "{v} ** 2", lambda v, k: v**2),
    Operation("[negated|with its sign changed]", "-{v}", lambda v, k: -v),
]
KEEP = [
    Operation("[above {k}|greater than {k}]", "v > {k}", lambda v, k: v > k),
    Operation("[below {k}|less than {k}]", "v < {k}", lambda v, k: v < k),
    Operation("[divisible by {k}|that {k} divides]", "v % {k} == 0", lambda v, k: v % k == 0),
    Operation("[different from {k}|not equal to {k}]", "v != {k}", lambda v, k: v != k),
]
REDUCE = [
    Operation("[the sum of|the total of]", "sum({v})", lambda v, k: sum(v)),
    Operation("[the number of|how many are]", "len({v})", lambda v, k: len(v)),
    Operation("[a sorted list of|in order]", "sorted({v})", lambda v, k: sorted(v)),
    Operation("[a reversed list of|backwards]", "{v}[::-1]", lambda v, k: v[::-1]),
]
STRING = [
    Operation("[in upper case|in capitals]", "{v}.upper()", lambda v, k: v.upper()),
    Operation("[reversed|backwards]", "{v}[::-1]", lambda v, k: v[::-1]),
    Operation("[repeated {k} times|{k} times over]", "{v} * {k}", lambda v, k: v * k),
    Operation("[without its first {k} letters|with the first {k} letters dropped]", "{v}[{k}:]", lambda v, k: v[k:]),
    Operation("[cut to {k} letters|with only its first {k} letters]", "{v}[:{k}]", lambda v, k: v[:k]),
]
FUNCTIONS = ["solve", "apply", "compute", "change", "work", "run", "build", "make"]
# Of names in two words the first is always "do": a word is copied where the one before it has been met in the prompt.
SECOND_WORDS = [
    "apple", "bridge", "candle", "desert", "engine", "forest", "garden", "hammer", "island", "jacket", "kettle", "ladder",
    "market", "needle", "orange", "pencil", "rabbit", "saddle", "tunnel", "window",
]  # fmt: skip
RESULTS = ["result", "value"]
_NUMBERS = [0, 1, 4, 7, 10, 23, -5]
_LISTS = [[], [3], [1, 2, 3, 4, 5, 6, 7, 8, 9], [9, 4, 9, 2], [-3, 12, 6], [8, 8, 1, 5], [10, 20, 5, 7]]
_STRINGS = ["", "a", "hello", "Python", "abcdefghij", "Mars rover", "xyzzy"]


def sample(rng: random.Random, level: Difficulty) -> Example:
    name = f"do_{rng.choice(SECOND_WORDS)}" if level.two_word_names else rng.choice(FUNCTIONS)
    argument = rng.choice(["x", "xs", "s"])
    return _on_list(rng, name) if argument == "xs" else _chain(rng, name, argument, rng.choice(level.operations))


def _chain(rng: random.Random, name: str, argument: str, count: int) -> Example:
    operations, inputs = (NUMBER, _NUMBERS) if argument == "x" else (STRING, _STRINGS)
    wording, lines, value, values = argument, [], argument, list[Any](inputs)
    chosen = [(operation, rng.randint(2, 9)) for operation in rng.sample(operations, min(count, len(operations)))]
    result = rng.choice(RESULTS)
    for number, (operation, k) in enumerate(chosen):
        wording += say(rng, "[, then|, and then|, after that|, next] " if number else " ")
        wording += say(rng, operation.wording, k=k)
        lines.append(f"    {result} = {operation.code.format(v=value, k=k)}")
        value, values = result, [operation.run(each, k) for each in values]
    lines[-1] = lines[-1].replace(f"{result} =", "return", 1)
    problem = " ".join(operation.code.replace("{k}", str(k)) for operation, k in chosen)
    wording = f"{say(rng, '[Return|Give back|Compute]')} {wording}."
    return _example(name, argument, wording, "\n".join(lines), inputs, values, problem)


def _on_list(rng: random.Random, name: str) -> Example:
    keep, reduce = rng.choice(KEEP), rng.choice(REDUCE)
    k = rng.randint(2, 9)
    asked = f"[Return|Give back|Compute] {reduce.wording} [the values|the numbers|those] in xs {keep.wording}."
    wording = say(rng, asked, k=k)
    kept = f"[v for v in xs if {keep.code.format(k=k)}]"
    if rng.random() < 0.5:
        body = f"    return {reduce.code.format(v=kept)}"
    else:
        result = rng.choice(RESULTS)
        body = f"    {result} = {kept}\n    return {reduce.code.format(v=result)}"
    expected = [reduce.run([v for v in values if keep.run(v, k)], k) for values in _LISTS]
    return _example(name, "xs", wording, body, _LISTS, expected, f"{keep.code.format(k=k)} {reduce.code}")


def _example(
    name: str, argument: str, wording: str, body: str, inputs: list[Any], expected: list[Any], problem: str
) -> Example:
    head = f'def {name}({argument}):\n    """{wording}"""\n'
    doc = {"entry_point": name, "inputs": [[value] for value in inputs], "expected": expected}
    response = f"```python\ndef {name}({argument}):\n{body}\n```"
    return Example(f"Complete this function.\n{head}", response, f"humaneval {argument} {problem}", doc)
