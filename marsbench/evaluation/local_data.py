"""Benchmark data from local files: JSON Lines below a data folder, in the columns of the hub's data sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marsbench.errors import UserError
from marsbench.json_lines import read_objects

if TYPE_CHECKING:  # the registry of benchmarks imports this module, and is read without datasets
    from datasets import Dataset

DATA_DIR = "data_dir"  # the column that says where a question came from


class Unavailable(UserError):
    """What this machine does not have, data or a checkpoint: a table skips its cells and says so."""


def dataset(
    data_dir: str, files: Mapping[str, str], columns: Sequence[str], id_column: str | None = None, **_: Any
) -> dict[str, Dataset]:
    """A data set, split by split; called by lm-eval with what a task file says under `metadata`.

    Every question tells in the column `DATA_DIR` where it came from: some scorers need more from there. `Unavailable`
    where there is no such file, `UserError` where a line is not what it should be; see `read_objects`.
    """
    return {split: _split(data_dir, file, tuple(columns), id_column) for split, file in files.items()}


@lru_cache(maxsize=64)
def _split(data_dir: str, name: str, columns: tuple[str, ...], id_column: str | None) -> Dataset:
    """One file; the subtasks of a benchmark may share it."""
    from datasets import Dataset

    file = local_file(Path(data_dir), name)
    return Dataset.from_list(
        [record | {DATA_DIR: data_dir} for record in read_objects(file, columns, unique=id_column)]
    )


def local_file(data_dir: Path, name: str) -> Path:
    """A file below the data folder, which must be there."""
    if not (data_dir / name).exists():
        raise Unavailable(
            "there is no local copy of this benchmark's data", where=str(data_dir / name),
            fix="put it there, or leave --data-dir out to load it from the hub",
        )  # fmt: skip
    return data_dir / name
