"""JSON and JSON Lines: every file of either is read here, into typed structures; mistakes are named by place."""

import codecs
import json
import math
import os
import time
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

from marsbench.errors import UserError, told_to_user

_Record = TypeVar("_Record")
_SYNC_EVERY_S = 1.0
_READER = lru_cache(TypeAdapter[Any])  # of a kind; making one takes as long as reading hundreds of lines
_PACKED = {b"\x1f\x8b": "gzip", b"PK\x03\x04": "zip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


class Log(Generic[_Record]):
    """A file that only grows, by one process: a line outlives it once `append` returns; half a line never was.

    A power cut costs the lines of a second: to wait for the disk after each took a quarter of the time of answering.
    """

    def __init__(self, file: Path, kind: Any, *, what: str, mend: str) -> None:
        self.file, self._kind, self._what, self._mend = file, kind, what, mend
        self._inode, self._bytes, self._records, self._synced = -1, 0, list[_Record](), -math.inf

    def append(self, record: Mapping[str, Any]) -> None:
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
        first = len(self._records) + 1
        self._records += parse_lines(whole, self.file, self._kind, what=self._what, mend=self._mend, first=first)
        self._bytes += len(whole)
        return list(self._records)


def parse_json(text: bytes | str, kind: Any = Any) -> Any:
    """A JSON document as what `kind` says, whatever pydantic knows: a dataclass, a type of `typing`.

    Nothing is converted; fields that `kind` lacks are left out, NaN and Infinity are numbers. `ValueError`, in one line
    and with the place, for another kind, no JSON, more than 200 levels or 4,300 digits, or half a surrogate pair.
    """
    try:
        return _READER(kind).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"{place}: {first['msg']}" if place else first["msg"]) from None


def parse_lines(content: bytes, file: Path, kind: Any, *, what: str, mend: str, first: int = 1) -> list[Any]:
    """Lines of JSON as `kind` (see `parse_json`); the others are for errors: `what` a line is, how to `mend` one."""
    check_text(content, file, first)
    records = []
    for number, line in enumerate(content.splitlines(), first):
        try:
            records.append(parse_json(line, kind))
        except ValueError as error:
            said = str(error).replace("line 1 column", "column")
            raise UserError(f"not {what}: {said}", where=f"{file}, line {number}", fix=mend) from error
    return records


def read_lines(file: Path, kind: Any, *, what: str, mend: str, unique: str | None = None) -> list[Any]:
    """The lines of a file as `parse_lines` has them, at least one; no two objects agree in the entry `unique`."""
    content = read_text(file)
    if not content:
        raise UserError("the file is empty", where=str(file), fix=mend)
    records, first = parse_lines(content, file, kind, what=what, mend=mend), dict[Any, int]()
    for number, record in enumerate(records if unique else [], 1):
        if (earlier := first.setdefault(record[unique], number)) != number:
            said, where = f"{unique} {record[unique]!r} stands in line {earlier} already", f"{file}, line {number}"
            raise UserError(said, where=where, fix="keep one of the two lines")
    return records


def read_json(file: Path, kind: Any = Any, *, mend: str) -> Any:
    """A file that is one JSON document, as what `kind` says; `UserError`, with how to `mend` it, if it is not."""
    with told_to_user("the file is damaged", ValueError, where=file, fix=mend):
        return parse_json(read_text(file, mend), kind)


def read_text(file: Path, mend: str = "check the path") -> bytes:
    """A file of UTF-8 without a byte order mark; `UserError` where it cannot be read, is packed or not UTF-8."""
    try:
        content = file.read_bytes().removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        raise UserError(f"the file cannot be read: {error.strerror}", where=str(file), fix=mend) from error
    check_text(content, file)
    return content


def check_text(content: bytes, file: Path, first: int = 1) -> None:
    """Refuse content that is packed or not UTF-8; the number of its `first` line is for the error."""
    if packed := next((name for magic, name in _PACKED.items() if content.startswith(magic)), None):
        raise UserError(f"the file is {packed}, not text", where=str(file), fix="unpack it, and give what was in it")
    try:
        content.decode()
    except UnicodeDecodeError as error:
        line = first + content[: error.start].count(b"\n")
        raise UserError("not UTF-8", where=f"{file}, line {line}", fix="save the file as UTF-8") from error
