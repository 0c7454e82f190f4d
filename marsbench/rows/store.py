"""Rows on disk, as JSON Lines.

A run appends what it measures to one file, row by row, safe against interruption and against a second writer. What
pages show lies in stores, a folder for each scale and training seed: a measurement stands there once.
"""

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from marsbench.files import write_atomically
from marsbench.json_lines import Log, parse_lines, read_text
from marsbench.locks import locked
from marsbench.rows.kinds import AnyRow, EvaluationRow, Row, TrainingRow, to_json

PATIENCE_S = 600.0  # with another writer, who holds the lock for a moment at a time
_MEND = "remove the line; its cell is measured again"


class RowStore:
    """A file of rows. The last row of a key is the one that counts."""

    def __init__(self, file: Path) -> None:
        self._log = Log[Row](file, AnyRow, what="a row", mend=_MEND)
        self._lock = file.with_name(f"{file.name}.lock")

    def append(self, row: Row) -> None:
        """Add a row that is not there; it is on disk when this returns. Several processes may write."""
        with locked(self._lock, patience_s=PATIENCE_S):
            if self.rows().get(row.key) != row:
                self._log.append(to_json(row))

    def rows(self) -> dict[str, Row]:
        """Key -> row; an unfinished last line is passed over."""
        return {row.key: row for row in self._log.records()}


def read_rows(path: Path) -> list[Row]:
    """The rows of a published file, or of a store: all files of a folder, those of folders below it left out."""
    if path.is_dir():
        return [row for file in sorted(path.glob("*.jsonl")) for row in read_rows(file)]
    content = read_text(path, "check the path, or measure: marsbench reproduce table2")
    return parse_lines(content, path, AnyRow, what="a row", mend=_MEND)


def write_rows(folder: Path, rows: Iterable[Row]) -> None:
    """Write a store anew: one file per stage, and one for each other kind of work. Of equal rows, the last is kept."""
    files = defaultdict[str, list[Row]](list)
    for row in {row.id: row for row in rows}.values():
        name = row.stage if isinstance(row, EvaluationRow | TrainingRow) else row.kind
        files[f"{name}.jsonl"].append(row)
    for name, of_file in files.items():
        write_atomically(folder / name, rows_text(of_file).encode())
    for file in folder.glob("*.jsonl"):
        if file.name not in files:
            file.unlink()


def rows_text(rows: Iterable[Row]) -> str:
    return "".join(json.dumps(to_json(row)) + "\n" for row in rows)
