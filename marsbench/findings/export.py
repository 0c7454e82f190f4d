"""Rows as a table for other tools: merged from several files, filtered, exported through pandas."""

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from marsbench.errors import UserError, unknown_name
from marsbench.files import check_can_be_written, write_atomically
from marsbench.findings.sweep import speed_up
from marsbench.rows.kinds import EvaluationRow, Row, SweepRow, to_json
from marsbench.rows.workspace import read_rows, rows_text

FORMATS = (".csv", ".parquet", ".jsonl")


def merged(files: Sequence[Path]) -> list[Row]:
    """The rows of files and stores; of a cell that several of them hold, the last finished row, else the last."""
    for file in files:
        if file.is_dir() and not any(file.glob("*.jsonl")):
            raise UserError("no rows are here", where=str(file), fix="give a file or a store of rows: results/mini")
    rows = [row for file in files for row in read_rows(file)]
    done = {row.key for row in rows if row.status == "done"}
    return [*{row.id: row for row in rows if row.status == "done" or row.key not in done}.values()]


def matching(rows: Sequence[Row], conditions: Sequence[str]) -> list[Row]:
    """The rows that meet all conditions, each FIELD=VALUE with a field as in the table, such as `options.threshold`."""
    kept = [(row, _flat(to_json(row))) for row in rows]
    for condition in conditions:
        name, equals, value = condition.partition("=")
        if not equals:
            raise UserError(f"{condition!r} is not a condition", fix="write --where FIELD=VALUE, such as method=mars")
        known = sorted({field for _, fields in kept for field in fields})
        if kept and name not in known:
            raise unknown_name("field", name, known)
        kept = [(row, fields) for row, fields in kept if name in fields and _same(fields[name], value)]
    return [row for row, _ in kept]


def _same(value: Any, wanted: str) -> bool:
    """Whether a field holds a value given as text; numbers are compared as numbers."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        with suppress(ValueError):
            return float(wanted) == value
    return str(value) == wanted


def _flat(record: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in record.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def derived(row: Row) -> dict[str, float]:
    """What a reader wants of a row beside its raw values, if anything.

    `accuracy` is a fraction; `speed_up` is over `ar` of the same race, compiled where the row is, with its interval.
    """
    if row.status == "done" and isinstance(row, EvaluationRow):
        return {"accuracy": row.accuracy.value, "tokens_per_forward": row.tokens_per_forward.value}
    if row.status != "done" or not isinstance(row, SweepRow):
        return {}
    numbers = {"accuracy": row.accuracy.value, "tokens_per_forward": row.tokens_per_forward}
    numbers["tokens_per_second"] = row.tokens_per_second
    if ratio := speed_up(row):
        numbers |= {"speed_up": ratio.value, "speed_up_low": ratio.interval.low, "speed_up_high": ratio.interval.high}
    return numbers


def export(rows: Sequence[Row], file: Path) -> Path:
    """Write rows as CSV, Parquet, or JSON Lines that this program reads again, by the file's name.

    Lists are JSON in CSV, and in those Parquet columns where not all values are lists, or lists of lists.
    """
    if file.suffix not in FORMATS:
        raise unknown_name("kind of file", file.suffix or file.name, list(FORMATS))
    check_can_be_written(file, "--out")
    if not rows:
        raise UserError("no row is left to write", where=str(file), fix="widen --where; without --out, rows are shown")
    if file.suffix == ".jsonl":
        return write_atomically(file, rows_text(rows).encode())
    import pandas as pd

    # A line per row, a column per field, and columns of what follows from them.
    whole = pd.DataFrame([_flat(to_json(row)) | derived(row) for row in rows])
    table = whole.map(lambda value: json.dumps(value) if isinstance(value, list) else value)
    if file.suffix == ".csv":
        return write_atomically(file, table.to_csv(index=False).encode())
    table = table.convert_dtypes()  # a column of Parquet has one type
    table = table.astype(dict.fromkeys(table.select_dtypes("object"), "string"))
    for name, column in whole.items():
        known = [*column.dropna()]
        if known and all(isinstance(value, list) and list not in map(type, value) for value in known):
            table[str(name)] = column
    return write_atomically(file, table.to_parquet(index=False))
