"""Benchmark data from local files: JSON Lines below a data folder, in the columns of the hub's data sets."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from datasets import Dataset

from marsbench.errors import UserError

DATA_DIR = "data_dir"  # the column that says where a question came from


class Unavailable(UserError):
    """Data that this machine does not have: a table skips its cells and says so."""


def dataset(
    data_dir: str, files: Mapping[str, str], columns: Sequence[str], id_column: str | None = None, **_: Any
) -> dict[str, Dataset]:
    """A data set, split by split; called by lm-eval with what a task file says under `metadata`.

    Every question tells in the column `DATA_DIR` where it came from: some scorers need more from there.

    Raises:
        Unavailable: there is no such file.
        UserError: a line is not what it should be; see `read_records`.
    """
    return {split: _split(data_dir, file, tuple(columns), id_column) for split, file in files.items()}


@lru_cache(maxsize=64)
def _split(data_dir: str, name: str, columns: tuple[str, ...], id_column: str | None) -> Dataset:
    """One file; the subtasks of a benchmark may share it."""
    file = local_file(Path(data_dir), name)
    return Dataset.from_list(
        [record | {DATA_DIR: data_dir} for record in read_records(file, columns, unique=id_column)]
    )


def local_file(data_dir: Path, name: str) -> Path:
    """A file below the data folder, which must be there."""
    if not (data_dir / name).exists():
        raise Unavailable(
            "there is no local copy of this benchmark's data", where=str(data_dir / name),
            fix="put it there, or leave --data-dir out to load it from the hub",
        )  # fmt: skip
    return data_dir / name


def read_records(file: Path, columns: Sequence[str], *, unique: str | None = None) -> list[dict[str, Any]]:
    """The objects of a JSON Lines file.

    Args:
        file: what to read.
        columns: what every object must have.
        unique: a column in which no two objects may agree.

    Raises:
        UserError: no such file, nothing in it, or a line that is no such object; with file and line.
    """
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"the file cannot be read: {error.strerror}", where=str(file), fix="check the path") from error
    records = [_record(line, columns, f"{file}, line {number}") for number, line in enumerate(lines, 1)]
    if not records:
        raise UserError("the file is empty", where=str(file), fix="fetch it again")
    if unique is not None:
        _check_unique(file, records, unique)
    return records


def _record(line: bytes, columns: Sequence[str], where: str) -> dict[str, Any]:
    try:
        record = json.loads(line.decode("utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"not a line of JSON in UTF-8: {error}", where=where, fix="mend or remove the line") from error
    missing = [column for column in columns if not isinstance(record, dict) or column not in record]
    if missing:
        raise UserError(f"no column {', '.join(missing)}", where=where, fix=f"every line needs {', '.join(columns)}")
    found: dict[str, Any] = record
    return found


def _check_unique(file: Path, records: Sequence[Mapping[str, Any]], column: str) -> None:
    first: dict[Any, int] = {}
    for number, record in enumerate(records, 1):
        earlier = first.setdefault(record[column], number)
        if earlier != number:
            raise UserError(
                f"{column} {record[column]!r} stands in line {earlier} already",
                where=f"{file}, line {number}",
                fix="keep one of the two lines",
            )
