"""Rows on disk: JSON Lines, appended one at a time, safe against interruption and against a second writer."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple, get_args

from filelock import FileLock

from marsbench.errors import UserError, unknown_name
from marsbench.rows.kinds import Row, from_json, to_json

_LOOK_BACK = 1 << 16  # bytes

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
        self._rows: dict[str, Row] = {}
        self._read = _Read()

    def append(self, row: Row) -> None:
        """Add a row; it is on disk when this returns. A line that an interruption cut short is removed."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps(to_json(row)) + "\n"
        with self._lock, self._file.open("a+b") as stream:
            stream.truncate(_end_of_whole_lines(stream))
            stream.write(line.encode())
            stream.flush()
            os.fsync(stream.fileno())

    def rows(self) -> dict[str, Row]:
        """Key -> row. An unfinished last line is passed over, and only what is new since the last call is read."""
        if not self._file.exists():
            return {}
        with self._file.open("rb") as stream:
            stat = os.fstat(stream.fileno())
            if stat.st_ino != self._read.inode or stat.st_size < self._read.bytes:  # another file than before
                self._rows, self._read = {}, _Read(stat.st_ino)
            stream.seek(self._read.bytes)
            fresh = stream.read()
        whole = fresh[: fresh.rfind(b"\n") + 1]
        found = parse_rows(whole.decode(), str(self._file), first_line=self._read.lines + 1)
        self._rows |= {row.key: row for row in found}
        self._read = _Read(self._read.inode, self._read.bytes + len(whole), self._read.lines + len(found))
        return dict(self._rows)

    def remove(self) -> None:
        """Remove the file, if it is there."""
        for file in (self._file, Path(self._lock.lock_file)):
            file.unlink(missing_ok=True)


class BorrowedStore(RowStore):
    """A store that somebody else writes to: rows are kept here until they are handed over, beside those in the file.

    `known` are rows that may not have come to the file yet. Those that are added lie in the journal, too: what was
    killed before it could hand them over finds them there.
    """

    def __init__(self, file: Path, known: Iterable[Row] = (), *, journal: RowStore) -> None:
        super().__init__(file)
        self._known = {row.key: row for row in known}
        self._journal = journal
        self.added = journal.rows()

    def append(self, row: Row) -> None:
        """Keep a row for whoever writes."""
        self._journal.append(row)
        self.added[row.key] = row

    def rows(self) -> dict[str, Row]:
        """Key -> row, of the file and of what it is to hold."""
        return {**super().rows(), **self._known, **self.added}


class _Read(NamedTuple):
    """How far a file has been read."""

    inode: int = -1
    bytes: int = 0
    lines: int = 0


def _end_of_whole_lines(stream: BinaryIO) -> int:
    """Where the last whole line of a file ends; looks back from its end, not through all of it."""
    end = stream.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - _LOOK_BACK)
        stream.seek(start)
        newline = stream.read(end - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def parse_rows(text: str, where: str, *, first_line: int = 1) -> list[Row]:
    """The rows of a JSON Lines text; a line that is none is a `UserError` with its number."""
    rows = []
    for number, line in enumerate(text.splitlines(), first_line):
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
        raise UserError(
            "there is no such file of rows",
            where=str(file),
            fix="check the path, or measure: marsbench reproduce table2",
        ) from error
    except IsADirectoryError as error:
        raise UserError("rows lie in a file, not a folder", where=str(file), fix=f"give {file}/*.jsonl") from error


def rows_text(rows: Iterable[Row]) -> str:
    """Rows as JSON Lines."""
    return "".join(json.dumps(to_json(row)) + "\n" for row in rows)
