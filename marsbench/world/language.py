"""How the world speaks: templates with alternatives, so that no two texts about one thing read the same.

`say(rng, "[So|Thus], {a} plus {b} [is|makes] {c}.", a=1, b=2, c=3)` draws one alternative of every bracket. A world
with one phrasing per thought would be predictable, and guessing several tokens at once would look better than it is.
"""

import hashlib
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_ALTERNATIVES = re.compile(r"\[([^\[\]]*)\]")


@dataclass(frozen=True)
class Example:
    """One question of the world with one of its many good answers."""

    prompt: str  # the user's turn
    response: str  # a reference assistant turn
    content: str  # names the problem, in most benchmarks whatever its wording: train and test are split by it
    doc: Mapping[str, Any] = field(default_factory=dict)  # the columns that the scorer needs


def say(rng: random.Random, template: str, **values: object) -> str:
    """Draw one alternative of every `[a|b|c]` (brackets do not nest), then fill the `{names}`."""
    return _ALTERNATIVES.sub(lambda text: rng.choice(text[1].split("|")), template).format(**values)


def is_test(content: str) -> bool:
    """Whether a problem belongs to the held-out split: one in eight does, by a hash of its content."""
    return hashlib.sha256(content.encode()).digest()[0] < 32
