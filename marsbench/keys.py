"""What results are keyed by: hashes of plain data, and of the source code that decides a number.

A checkpoint's key and a cell's key hold the hash of the code behind them, so that no number of old code passes for one
of new code. Code that was moved, reworded or given a clearer error yields the same numbers as before, and nothing
should be trained or measured again for it: `SAME_NUMBERS` says so of the code as it is today.

`python -m marsbench.keys` prints `SAME_NUMBERS` for the code as it lies there, for who has changed it and no number.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

PACKAGE = Path(__file__).resolve().parent

# The code behind each kind of number: rooms of the package, and single files.
DECODING = ("forward", "decoding", "compiled", "methods")
DECODING_THE_WORLD = (*DECODING, "world")
SCORING = (*DECODING, "evaluation", "world")
CLASSING = (*SCORING, "studies/gains/word_classes.py")
SERVING = (*DECODING, "serving")
_TRAINING = tuple(f"training/{name}.py" for name in ("data", "objectives", "tokenizer", "trainer", "visibility"))
TRAINING_ON_THE_WORLD = ("world", *_TRAINING)
TRAINING_ON_CHATS = ("training/chat_data.py", "training/micro_batches.py", *_TRAINING)
# Join either, where heads or adapters are trained.
MEDUSA, GATED = ("training/medusa.py",), ("training/gated.py", "forward/adapter.py")


class Known(NamedTuple):
    """A state of some code, and the hash that its numbers are keyed by: of earlier code that gave the same ones."""

    today: str
    keyed_by: str


# An entry is a claim: who changes it has seen that no number changes. It counts as long as the code is what it says. A
# test holds the keys of the committed rows to it.
SAME_NUMBERS: dict[tuple[str, ...], Known] = {
    DECODING: Known("0b50a2a36a93017f", "c7844b4def492a80"),
    DECODING_THE_WORLD: Known("7d4dbcf248185d76", "06a63162efb8d61b"),
    SCORING: Known("e42090caa7e9f659", "694a1b97baa02a4a"),
    CLASSING: Known("6acffc5415c28fa8", "09e664ffc46b9fbb"),
    SERVING: Known("9ee731ab8f592a06", "38b6be8a77cbd8a0"),
    TRAINING_ON_THE_WORLD: Known("1a0b812d21f12cf4", "30dd42a99b1fa670"),
    TRAINING_ON_CHATS: Known("1b73e7d310c5d606", "c3b435694cb14e55"),
    (*TRAINING_ON_THE_WORLD, *MEDUSA): Known("1d0e2f380989268e", "fd7a60e3942063a8"),
    (*TRAINING_ON_CHATS, *MEDUSA): Known("35138ede827647d9", "dbef0f5ed848a0a9"),
    (*TRAINING_ON_THE_WORLD, *GATED): Known("d18672b407460710", "dc47e10fb4c56819"),
    (*TRAINING_ON_CHATS, *GATED): Known("b5d1880498276414", "8acbd76c0aaae448"),
}


def content_hash(content: Any) -> str:
    """Sixteen hexadecimal digits of SHA-256 over plain data, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


@cache
def source_hash(*parts: str) -> str:
    """The hash that numbers of some code are keyed by.

    Args:
        parts: rooms of the package, as in "decoding", or single files, as in "training/data.py".
    """
    today, known = files_hash(*parts), SAME_NUMBERS.get(parts)
    return known.keyed_by if known is not None and known.today == today else today


def files_hash(*parts: str) -> str:
    """Sixteen hexadecimal digits of SHA-256 over the files of some code as they are today."""
    files = sorted(file for part in parts for file in PACKAGE.glob(part if part.endswith(".py") else f"{part}/*.py"))
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:16]


def main() -> None:
    """Print `SAME_NUMBERS` with today's states."""
    for parts, known in SAME_NUMBERS.items():
        print(f"{parts}: Known({files_hash(*parts)!r}, {known.keyed_by!r}),")


if __name__ == "__main__":
    main()
