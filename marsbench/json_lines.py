"""Reading JSON Lines that a user gives us: every line checked, every mistake named with its file and line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from marsbench.errors import UserError


def read_objects(file: Path, columns: Sequence[str], *, unique: str | None = None) -> list[dict[str, Any]]:
    """The objects of a file, one a line.

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
    if not lines:
        needed = ", ".join(f'"{column}": ...' for column in columns or ["..."])
        raise UserError("the file is empty", where=str(file), fix=f"give lines of {{{needed}}}")
    records = [_object(line, columns, f"{file}, line {number}") for number, line in enumerate(lines, 1)]
    if unique is not None:
        _check_unique(file, records, unique)
    return records


def _object(line: bytes, columns: Sequence[str], where: str) -> dict[str, Any]:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError("not UTF-8", where=where, fix="save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        raise UserError(f"not a line of JSON: {error}", where=where, fix="mend or remove the line") from error
    if not isinstance(record, dict):
        raise UserError("not a JSON object", where=where, fix='write {"...": ...}, in braces')
    missing = [column for column in columns if column not in record]
    if missing:
        raise UserError(f"no column {', '.join(missing)}", where=where, fix=f"every line needs {', '.join(columns)}")
    return record


def _check_unique(file: Path, records: Sequence[Mapping[str, Any]], column: str) -> None:
    first: dict[str, int] = {}
    for number, record in enumerate(records, 1):
        earlier = first.setdefault(json.dumps(record[column]), number)
        if earlier != number:
            raise UserError(
                f"{column} {record[column]!r} stands in line {earlier} already",
                where=f"{file}, line {number}",
                fix="keep one of the two lines",
            )
