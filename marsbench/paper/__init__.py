"""The numbers that the MARS paper published (arXiv 2604.07023), as printed there, and the one way to read them."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from marsbench.errors import check_known
from marsbench.json_lines import read_lines

REFERENCE = Path(__file__).with_name("reference.jsonl")


@dataclass(frozen=True)
class Published:
    """One published number. `None` means that the paper's table does not vary or state that field.

    Units follow from `metric`: `accuracy` and `accuracy_delta` in percentage points, `seconds` for all
    questions, `speedup` relative to AR with a KV cache, `train_h200_hours` in GPU hours; the rest as named.
    """

    table: str  # "2" ... "9"; "A" is the training cost
    scale: str  # "0.5b" or "7b"
    method: str
    metric: str
    value: float
    benchmark: str | None = None  # "average" is the paper's own mean over its six benchmarks
    block_size: int | None = None
    threshold: float | None = None  # 1.0 is the paper's way to write "accept exactly one token per forward"
    batch_size: int | None = None
    cache_block: int | None = None  # B_cache of the block-level cache
    draft: str | None = None
    target: str | None = None
    draft_length: int | None = None
    questions: int | None = None


def published(table: str, **filters: object) -> list[Published]:
    """The published numbers of one table, in the paper's order, whose fields equal all `filters`.

    `published("2", scale="7b", method="mars", benchmark="gsm8k")` is a list of one. `UserError` without such a table.
    """
    check_known("table of the paper", table, sorted({row.table for row in _all_published()}))
    rows = [row for row in _all_published() if row.table == table]
    return [row for row in rows if all(getattr(row, name) == wanted for name, wanted in filters.items())]


@lru_cache(maxsize=1)
def _all_published() -> tuple[Published, ...]:
    return tuple(read_lines(REFERENCE, Published, what="a published number", mend="install marsbench again"))
