"""Files that a user names: what can be written, and what can be read."""

from __future__ import annotations

import errno
import gzip
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import AfterValidator

from marsbench.errors import UserError
from marsbench.files import check_can_be_written, write_atomically
from marsbench.json_lines import Log, parse_json, read_json, read_lines
from marsbench.rows.store import read_rows


@dataclass
class Numbered:
    n: int


def everything_below(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


@pytest.mark.parametrize("name", ["new.jsonl", "old.jsonl", "not/yet/there.jsonl"])
def test_what_can_be_written_passes_and_stays_as_it_is(name: str, tmp_path: Path) -> None:
    """Guards against a check that creates folders, leaves a probe behind or empties the file that is there."""
    (tmp_path / "old.jsonl").write_text("old")
    before = everything_below(tmp_path)
    check_can_be_written(tmp_path / name, "--out")
    assert everything_below(tmp_path) == before
    assert (tmp_path / "old.jsonl").read_text() == "old"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("folder", "it is a folder"),
        ("file/below.jsonl", "is no folder"),
        ("file/far/below.jsonl", "is no folder"),
        ("pipe", "no ordinary file"),
        ("n" * 300, "name too long"),
    ],
)
def test_what_cannot_be_written_is_refused(name: str, said: str, tmp_path: Path) -> None:
    """Guards against hours of work that end in a file that cannot be written, and a mend without the option's name."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match=f"(?i){said}") as raised:
        check_can_be_written(tmp_path / name, "--image")
    assert raised.value.where == str(tmp_path / name) and "--image" in raised.value.fix
    assert [path.name for path in everything_below(tmp_path)] == ["file", "folder", "pipe"]


def test_a_folder_without_leave_to_write_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards against a folder of somebody else's that is found out at the end."""

    def refuse(**_: object) -> None:  # as the system would, were we not root
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", refuse)
    with pytest.raises(UserError, match="Permission denied"):
        check_can_be_written(tmp_path / "new" / "out.jsonl", "--out")


def test_a_folder_is_no_json_lines(tmp_path: Path) -> None:
    """Guards against a traceback where a folder is given for a file."""
    with pytest.raises(UserError, match="cannot be read") as raised:
        read_lines(tmp_path, Any, what="a line", mend="mend it")
    assert raised.value.where == str(tmp_path)


def test_a_file_has_its_content_before_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a name without content after a power cut, and processes of one number that share a draft."""
    steps, drafts, replace, fsync = list[str](), set[Path](), Path.replace, os.fsync

    def watched(draft: Path, target: Path) -> Path:
        drafts.add(draft)
        steps.append("named")
        return replace(draft, target)

    def synced(number: int) -> None:
        steps.append("on disk")
        fsync(number)

    monkeypatch.setattr(Path, "replace", watched)
    monkeypatch.setattr(os, "fsync", synced)
    for content in (b"one", b"two"):
        write_atomically(tmp_path / "file", content)
        assert (tmp_path / "file").read_bytes() == content
    assert steps == ["on disk", "named"] * 2 and len(drafts) == 2
    assert [*tmp_path.iterdir()] == [tmp_path / "file"]


def test_a_log_outlives_a_kill(tmp_path: Path) -> None:
    """Guards against a cut line that is read, or glued to the next one, and against lines that are read twice."""
    read = list[int]()

    def count(record: Numbered) -> Numbered:
        read.append(record.n)
        return record

    def log() -> Log[Numbered]:
        kind = Annotated[Numbered, AfterValidator(count)]
        return Log(tmp_path / "new" / "log.jsonl", kind, what="a number", mend="remove it")

    first = log()
    assert first.records() == []
    first.append({"n": 1})
    with first.file.open("a") as stream:
        stream.write('{"n": 2')
    assert first.records() == first.records() == [Numbered(1)] and read == [1]
    log().append({"n": 3})
    assert first.records() == [Numbered(1), Numbered(3)] and read == [1, 3]
    first.file.write_text('{"n": 4}\n')
    assert first.records() == [Numbered(4)], "another file than before"
    first.file.write_text('{"n": 4}\n{"m": 5}\n')
    with pytest.raises(UserError, match="not a number") as raised:
        first.records()
    assert raised.value.where == f"{first.file}, line 2" and raised.value.fix == "remove it"


# ---- files that hold something else ---------------------------------------------------------------------------------

READERS: dict[str, Callable[[Path], Any]] = {
    "lines": lambda file: read_lines(file, Any, what="a line", mend="mend it"),
    "log": lambda file: Log[Any](file, Any, what="a line", mend="mend it").records(),
    "document": lambda file: read_json(file, mend="mend it"),
    "rows": read_rows,
}
NO_JSON = {  # what a line may hold instead of JSON, and what is said of it
    "a number of thousands of digits": (st.integers(4301, 9000).map(lambda size: b"[" + b"7" * size + b"]"), "range"),
    "deep nesting": (st.integers(202, 30_000).map(lambda depth: b"[" * depth + b"]" * depth), "recursion limit"),
    "half a surrogate pair": (st.integers(0xD800, 0xDFFF).map(lambda half: b'"\\u%x"' % half), "hex escape|surrogate"),
    "Latin-1": (st.text(st.characters(min_codepoint=192, max_codepoint=255), min_size=1).map(
        lambda text: f'"{text}."'.encode("latin-1")), "not UTF-8"),
    "a line cut short": (st.sampled_from([b"", b"{", b'{"n": 1', b'{"n": }', b'{"n": 1,}', b"{'n': 1}"]), "JSON"),
}  # fmt: skip


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("fault", NO_JSON)
@settings(max_examples=10, deadline=None)
@given(data=st.data(), good=st.integers(0, 3))
def test_every_reader_names_the_line(reader: str, fault: str, data: st.DataObject, good: int) -> None:
    """Guards against tracebacks (4,300 digits, recursion, encoding), and against texts that a tokenizer cannot take."""
    content, said = NO_JSON[fault]
    before = 0 if reader in ("document", "rows") else good
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "file"
        file.write_bytes(b'{"n": 1}\n' * before + data.draw(content) + b"\n")
        with pytest.raises(UserError, match="not" if reader == "rows" else said) as raised:
            READERS[reader](file)
    place = str(file) if reader == "document" else f"{file}, line {before + 1}"
    assert raised.value.where.startswith(place) and raised.value.fix


@pytest.mark.parametrize("reader", READERS)
def test_a_packed_file_is_called_so(reader: str, tmp_path: Path) -> None:
    """Guards against "not UTF-8" where a file only has to be unpacked."""
    (tmp_path / "file").write_bytes(gzip.compress(b'{"n": 1}\n') + b"\n")
    with pytest.raises(UserError, match="is gzip") as raised:
        READERS[reader](tmp_path / "file")
    assert "unpack it" in raised.value.fix


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(
    records=st.lists(VALUES, min_size=1), end=st.sampled_from(["\n", "\r\n"]), mark=st.booleans(), plain=st.booleans()
)
def test_what_is_json_is_read_as_python_reads_it(records: list[Any], end: str, mark: bool, plain: bool) -> None:
    """Guards against a reader that changes numbers or texts, parts lines at U+2028, or wants one editor's line ends."""
    text = end.join(json.dumps(record, ensure_ascii=plain) for record in records)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "file"
        file.write_bytes(text.encode("utf-8-sig" if mark else "utf-8"))
        found = read_lines(file, Any, what="a line", mend="mend it")
    assert json.dumps(found) == json.dumps(records)


@pytest.mark.parametrize("given", ["1.0", "true", '"1"', "null", "[1]"])
def test_a_value_of_another_type_is_none(given: str) -> None:
    """Guards against numbers that are made of texts, truths or lists on their way in."""
    with pytest.raises(ValueError, match="n: "):
        parse_json(f'{{"n": {given}}}', Numbered)
