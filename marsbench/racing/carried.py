"""Acceptance that is carried over: a method keeps as many tokens a step as measured elsewhere, whatever the model says.

So random weights of a true shape race as trained ones would (others say forced or synthetic acceptance). What such a
method writes means nothing, and no claim on accuracy may stand on it.
"""

import random
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from marsbench.errors import UserError
from marsbench.paper import published

_DRAWS = 4096  # made ahead: a step looks one up for each row
_MODE = "thinking_off"  # in the YAML of other suites; MARS has no other
_KINDS = ("mean", "rates", "published", "file")


class Carried(NamedTuple):
    """How often guesses are kept, and whose measurement that is."""

    rates: tuple[float, ...]  # of each guess of a window: the part of all steps that keep it and those before it
    source: str


def draws_of(rates: Sequence[float], seed: int = 0) -> list[int]:
    drawn = random.Random(f"acceptance {seed}")
    return [sum(one < rate for rate in rates) for one in (drawn.random() for _ in range(_DRAWS))]


def carried_of(said: Any, guesses: int, where: str = "") -> Carried:
    """What a grid says of a contender's acceptance (`_KINDS`), for so many guesses, or `UserError`."""
    known = [name for name in _KINDS if isinstance(said, Mapping) and name in said]
    if len(known) != 1 or set(said) - {*known, *(("scale", "block_size") if known == ["published"] else ())}:
        raise UserError(f"acceptance: {said} is not understood", where=where, fix=f"say one of: {', '.join(_KINDS)}")
    (kind,) = known
    value, source = said[kind], f"{kind} {said[kind]}"
    if kind == "rates":
        rates = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else ()
        falls = all(0 <= after <= before <= 1 for before, after in zip((1.0, *rates), rates, strict=False))
        if len(rates) != guesses or not falls:
            fix = "give the part of all steps that keep each guess and those before it, none above the one before"
            raise UserError(f"{value} are no rates of {guesses} guesses", where=where, fix=fix)
        return Carried(rates, f"rates {', '.join(f'{rate:g}' for rate in rates)}")
    if kind == "published":
        value, source = _published(value, said.get("scale", "7b"), said.get("block_size", guesses + 1), where)
    elif kind == "file":
        value, source = _in_file(Path(str(value)), guesses), str(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value <= guesses + 1:
        raise UserError(f"{guesses} guesses cannot settle {value} tokens", where=where, fix=f"give 1 to {guesses + 1}")
    return Carried(_rates(float(value), guesses), source)


def _rates(mean: float, guesses: int) -> tuple[float, ...]:
    """Rates of guesses that are each as likely to be kept as the one before, and together come to a mean."""

    def at(rate: float) -> list[float]:
        return list(accumulate([rate] * guesses, lambda so_far, one: so_far * one))

    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if 1 + sum(at(middle)) < mean else (low, middle)
    return tuple(at(high))


def _published(benchmark: Any, scale: str, block_size: int, where: str) -> tuple[float, str]:
    rows = published("4", scale=scale, benchmark=benchmark, block_size=block_size, threshold=0.95)
    values = [row.value for row in rows if row.metric == "tokens_per_forward"]
    if not values:
        what = f"the paper has no tokens per forward of {benchmark} at {scale}, B = {block_size}"
        fix = "name one of its benchmarks, or average, a scale of 0.5b or 7b, and a block size of its Table 4"
        raise UserError(what, where=where, fix=fix)
    return values[0], f"the paper's Table 4, {benchmark}, {scale}, B = {block_size}, tau = 0.95"


def _in_file(file: Path, guesses: int) -> Any:
    try:
        (modes,) = yaml.safe_load(file.read_text(encoding="utf-8")).values()
        by_guesses = {int(number): float(mean) for number, mean in modes.get(_MODE, next(iter(modes.values()))).items()}
    except (OSError, yaml.YAMLError, AttributeError, TypeError, ValueError, StopIteration, RecursionError) as error:
        raise UserError(f"no table of acceptance: {error}", where=str(file), fix="see docs/sweeps.md") from error
    if guesses not in by_guesses:
        fix = f"it has: {', '.join(map(str, by_guesses))}"
        raise UserError(f"it has nothing for {guesses} drafts", where=str(file), fix=fix)
    return by_guesses[guesses]
