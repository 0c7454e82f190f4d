"""Rows on disk: JSON Lines, appended one at a time, safe against interruption and against a second writer."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, cast, get_args

from marsbench.errors import unknown_name
from marsbench.json_lines import Log, parse_lines, read_text
from marsbench.locks import locked
from marsbench.rows.kinds import AnyRow, Row, to_json

PATIENCE_S = 600.0  # with another writer, who holds the lock for a moment at a time
_MEND = "remove the line; its cell is measured again"

Existing = Literal["reuse", "rerun", "fail"]  # what to do about a result that is there already


def existing_policy(name: str) -> Existing:
    """The policy of that name, or a `UserError`."""
    if name not in get_args(Existing):
        raise unknown_name("policy for existing results", name, list(get_args(Existing)))
    return cast("Existing", name)


class RowStore:
    """A file of rows. The last row of a key is the one that counts."""

    def __init__(self, file: Path) -> None:
        self._log = Log[Row](file, AnyRow, what="a row", mend=_MEND)
        self._lock = file.with_name(f"{file.name}.lock")

    def append(self, row: Row) -> None:
        """Add a row; it is on disk when this returns."""
        with locked(self._lock, patience_s=PATIENCE_S):
            self._log.append(to_json(row))

    def rows(self) -> dict[str, Row]:
        """Key -> row; an unfinished last line is passed over."""
        return {row.key: row for row in self._log.records()}

    def remove(self) -> None:
        """Remove the file, if it is there."""
        for file in (self._log.file, self._lock):
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


def read_rows(file: Path) -> list[Row]:
    """The rows of a published file."""
    mend = f"give {file}/*.jsonl" if file.is_dir() else "check the path, or measure: marsbench reproduce table2"
    return parse_lines(read_text(file, mend), file, AnyRow, what="a row", mend=_MEND)


def rows_text(rows: Iterable[Row]) -> str:
    return "".join(json.dumps(to_json(row)) + "\n" for row in rows)
