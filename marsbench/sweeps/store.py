"""Rows on disk: JSON Lines, appended one at a time, safe against interruption and against a second writer."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, get_args

from filelock import FileLock

from marsbench.errors import UserError, unknown_name
from marsbench.sweeps.rows import Row, from_json, to_json

Existing = Literal["reuse", "rerun", "fail"]  # what to do about a result that is there already


def existing_policy(name: str) -> Existing:
    """The policy of that name, or a `UserError`."""
    for policy in get_args(Existing):
        if name == policy:
            found: Existing = policy
            return found
    raise unknown_name("policy for existing results", name, list(get_args(Existing)))


class RowStore:
    """A file of rows. The last row of a key is the one that counts."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lock = FileLock(str(file) + ".lock")

    def append(self, row: Row) -> None:
        """Add a row; it is on disk when this returns. A line that an interruption cut short is removed."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps(to_json(row)) + "\n"
        with self._lock, self._file.open("a+b") as stream:
            stream.seek(0)
            whole = stream.read().rfind(b"\n") + 1
            stream.truncate(whole)
            stream.write(line.encode())
            stream.flush()
            os.fsync(stream.fileno())

    def rows(self) -> dict[str, Row]:
        """Key -> row. An unfinished last line is passed over."""
        if not self._file.exists():
            return {}
        text = self._file.read_text(encoding="utf-8")
        return {row.key: row for row in parse_rows(text[: text.rfind("\n") + 1], str(self._file))}


def parse_rows(text: str, where: str) -> list[Row]:
    """The rows of a JSON Lines text; a line that is none is a `UserError` with its number."""
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            rows.append(from_json(json.loads(line)))
        except (ValueError, TypeError) as error:
            raise UserError(
                f"not a row: {error}",
                where=f"{where}, line {number}",
                fix="remove the line; its cell is measured again",
            ) from error
    return rows


def read_rows(file: Path) -> list[Row]:
    """The rows of a published file."""
    try:
        return parse_rows(file.read_text(encoding="utf-8"), str(file))
    except FileNotFoundError as error:
        raise UserError("there are no rows", where=str(file), fix="measure them: marsbench reproduce table2") from error


def rows_text(rows: Iterable[Row]) -> str:
    """Rows as JSON Lines."""
    return "".join(json.dumps(to_json(row)) + "\n" for row in rows)
