"""The page on GPUs: what the checks found on each, from their rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from marsbench.files import write_atomically
from marsbench.rendering.markdown import table
from marsbench.rows.kinds import CheckRow
from marsbench.rows.store import read_rows

ROWS, _PAGE = "results/gpu/checks.jsonl", "reports/gpu.md"
_SCALES = {"bytes": (2**30, "GiB"), "s": (1e-3, "ms")}  # a unit in a name -> what it is shown in


def checks_of(root: Path) -> list[CheckRow]:
    """All rows of checks that there are; none where no GPU was checked."""
    file = root / ROWS
    return [row for row in read_rows(file) if isinstance(row, CheckRow)] if file.exists() else []


def write_gpu_page(root: Path) -> list[Path]:
    """Render the page again where there are rows; returns its path."""
    rows = checks_of(root)
    return [write_atomically(root / _PAGE, render(rows).encode())] if rows else []


def render(rows: Sequence[CheckRow]) -> str:
    parts = ["# GPUs", "`marsbench gpu-check` on every GPU that it was run on. Models have random weights or are tiny."]
    for device in dict.fromkeys(row.device for row in rows):
        of_device = [row for row in rows if row.device == device]
        lines = [[row.check, verdict(row), f"{row.seconds:.0f} s", "quick" if row.quick else ""] for row in of_device]
        parts += [f"## {device}", table(["check", "verdict", "took", ""], lines, text=(0, 1, 3))]
        parts += ["\n".join(f"- {row.check}: {'; '.join(_in_words(row.facts))}." for row in of_device if row.facts)]
    return "\n\n".join(parts) + "\n"


def verdict(row: CheckRow) -> str:
    if row.status != "done":
        return f"{row.status}: {row.reason}"
    return {True: "holds", False: "DOES NOT HOLD", None: "measured"}[row.holds]


def _in_words(facts: Mapping[str, Any]) -> Iterator[str]:
    for name, value in facts.items():
        what, _, unit = name.rpartition(", ")
        if isinstance(value, Mapping):
            yield f"{name} ({', '.join(_in_words(value))})"
        elif unit in _SCALES and value is not None:
            yield f"{what} {value / _SCALES[unit][0]:.3g} {_SCALES[unit][1]}"
        elif isinstance(value, list):
            yield f"{name} {', '.join(f'{number:.3f}' for number in value)}"
        else:
            yield f"{name} {value:,.4g}" if isinstance(value, float) else f"{name} {'n/a' if value is None else value}"
