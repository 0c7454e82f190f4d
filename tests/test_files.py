"""Files that a user names: what can be written, and what can be read."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import pytest

from marsbench.errors import UserError
from marsbench.files import check_can_be_written, write_atomically
from marsbench.json_lines import Log, read_objects


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
        read_objects(tmp_path, ["doc_id"])
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

    def parse(record: dict[str, int]) -> int:
        read.append(record["n"])
        return record["n"]

    def log() -> Log[int]:
        return Log(tmp_path / "new" / "log.jsonl", parse, what="a number", mend="remove it")

    first = log()
    assert first.records() == []
    first.append({"n": 1})
    with first.file.open("a") as stream:
        stream.write('{"n": 2')
    assert first.records() == first.records() == [1] and read == [1]
    log().append({"n": 3})
    assert first.records() == [1, 3] and read == [1, 3]
    first.file.write_text('{"n": 4}\n')
    assert first.records() == [4], "another file than before"
    first.file.write_text('{"n": 4}\n{"m": 5}\n')
    with pytest.raises(UserError, match="not a number") as raised:
        first.records()
    assert raised.value.where == f"{first.file}, line 2" and raised.value.fix == "remove it"
