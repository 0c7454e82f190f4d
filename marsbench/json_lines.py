"""JSON Lines: logs of our own that survive a kill, and files of users, every mistake named with its file and line."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from marsbench.errors import UserError

_Record = TypeVar("_Record")
_SYNC_EVERY_S = 1.0


class Log(Generic[_Record]):
    """A file that only grows: a line outlives the process once `append` returns; one that a kill cut short never was.

    A power cut costs the lines of a second: to wait for the disk after each took a quarter of the time of answering.
    One process appends at a time; others may read meanwhile.
    """

    def __init__(self, file: Path, parse: Callable[[dict[str, Any]], _Record], *, what: str, mend: str) -> None:
        """Nothing is read yet, and the file need not exist.

        `parse` raises ValueError, TypeError or KeyError for an object that is none; `what` a line is and how to `mend`
        one are for errors.
        """
        self.file, self._parse, self._what, self._mend = file, parse, what, mend
        self._inode, self._bytes, self._records, self._synced = -1, 0, list[_Record](), -math.inf

    def append(self, record: Mapping[str, Any]) -> None:
        """Add a line; one that was cut short is removed."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a+b") as stream:
            stream.seek(max(stream.seek(0, os.SEEK_END) - 1, 0))
            if stream.read(1) not in (b"", b"\n"):  # a kill cut the last line short
                stream.seek(0)
                stream.truncate(stream.read().rfind(b"\n") + 1)
            stream.write(json.dumps(record).encode() + b"\n")
            stream.flush()
            if time.monotonic() >= self._synced + _SYNC_EVERY_S:
                os.fsync(stream.fileno())
                self._synced = time.monotonic()

    def records(self) -> list[_Record]:
        """What all whole lines stand for; only new ones are read. `UserError`, with file and line, for what is none."""
        if not self.file.exists():
            return []
        with self.file.open("rb") as stream:
            stat = os.fstat(stream.fileno())
            if stat.st_ino != self._inode or stat.st_size < self._bytes:  # another file than before
                self._inode, self._bytes, self._records = stat.st_ino, 0, []
            stream.seek(self._bytes)
            fresh = stream.read()
        whole = fresh[: fresh.rfind(b"\n") + 1]
        self._records += parse_lines(
            whole.decode(), str(self.file), self._parse, what=self._what, mend=self._mend, first=len(self._records) + 1
        )
        self._bytes += len(whole)
        return list(self._records)


def parse_lines(
    text: str, where: str, parse: Callable[[dict[str, Any]], _Record], *, what: str, mend: str, first: int = 1
) -> list[_Record]:
    """What the lines of a text stand for; see `Log`. `where` and the number of the `first` line are for errors."""
    found = []
    for number, line in enumerate(text.splitlines(), first):
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise TypeError("no JSON object")
            found.append(parse(record))
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(f"not {what}: {error}", where=f"{where}, line {number}", fix=mend) from error
    return found


def read_objects(file: Path, columns: Sequence[str], *, unique: str | None = None) -> list[dict[str, Any]]:
    """The objects of a file, one a line, all with the `columns`; no two agree in the column `unique`.

    `UserError`, with file and line, for no such file, nothing in it, or a line that is no such object.
    """
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"the file cannot be read: {error.strerror}", where=str(file), fix="check the path") from error
    if not lines:
        needed = ", ".join(f'"{column}": ...' for column in columns or ["..."])
        raise UserError("the file is empty", where=str(file), fix=f"give lines of {{{needed}}}")
    records, first = list[dict[str, Any]](), dict[str, int]()
    for number, line in enumerate(lines, 1):
        where = f"{file}, line {number}"
        try:
            record = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise UserError("not UTF-8", where=where, fix="save the file as UTF-8") from error
        except json.JSONDecodeError as error:
            raise UserError(f"not a line of JSON: {error}", where=where, fix="mend or remove the line") from error
        if not isinstance(record, dict):
            raise UserError("not a JSON object", where=where, fix='write {"...": ...}, in braces')
        if missing := ", ".join(column for column in columns if column not in record):
            raise UserError(f"no column {missing}", where=where, fix=f"every line needs {', '.join(columns)}")
        if unique is not None and (earlier := first.setdefault(json.dumps(record[unique]), number)) != number:
            what = f"{unique} {record[unique]!r} stands in line {earlier} already"
            raise UserError(what, where=where, fix="keep one of the two lines")
        records.append(record)
    return records
