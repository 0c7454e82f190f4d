"""What results are keyed by: hashes of plain data, and of the source code that decides a number.

A checkpoint's key and a cell's key hold the hash of the code behind them, so that no number of old code passes for one
of new code. Code that was moved, reworded or given a clearer error yields the same numbers as before, and nothing
should be trained or measured again for it: `SAME_NUMBERS` says so, state of the code by state of the code.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parent

# Hash of today's code -> the hash that its results are keyed by, of earlier code that gave the same numbers. An entry
# is a claim: who adds one has seen that no number changes. A test holds committed rows' keys to those of today's code.
SAME_NUMBERS: dict[str, str] = {}


def content_hash(content: Any) -> str:
    """Sixteen hexadecimal digits of SHA-256 over plain data, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


@cache
def source_hash(*parts: str) -> str:
    """The hash that results of some code are keyed by.

    Args:
        parts: rooms of the package, as in "decoding", or single files, as in "training/data.py".
    """
    files = [file for part in parts for file in PACKAGE.glob(part if part.endswith(".py") else f"{part}/*.py")]
    today = files_hash(sorted(files))
    return SAME_NUMBERS.get(today, today)


def files_hash(files: Iterable[Path]) -> str:
    """Sixteen hexadecimal digits of SHA-256 over the contents of files, in their order."""
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:16]
