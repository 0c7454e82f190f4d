"""What results are keyed by: a number's inputs, and a version number for each kind of work that makes numbers.

Source is not hashed: code may be moved and rewritten. A change of what numbers come out as is a line in `HISTORY`, and
all that stands on it is made anew; `tests/test_golden_cell.py` holds what the kinds of work come out as.
"""

import hashlib
import json
from typing import Any, Literal

Work = Literal["training", "decoding", "scoring", "timing", "world"]

# A kind of work is at the version that its history has lines; a line says from when on its numbers are others.
HISTORY: dict[Work, tuple[str, ...]] = {
    "training": ("November 2026: as first keyed by version",),
    "decoding": ("November 2026: as first keyed by version",),
    "scoring": ("November 2026: as first keyed by version",),
    "timing": (
        "November 2026: as first keyed by version",
        "November 2026: packed models on a CPU have fewer products and native code between them",
        "November 2026: their products of many positions are native, too",
    ),
    "world": ("November 2026: as first keyed by version",),
}


def versions(*works: Work) -> dict[str, int]:
    return {work: len(HISTORY[work]) for work in works}


def content_hash(content: Any) -> str:
    """Sixteen hexadecimal digits of SHA-256 over plain data, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
