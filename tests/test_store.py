"""Rows on disk: nothing lost, nothing half-written."""

import errno
import fcntl
import gzip
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up import ROOT, page_rows
from pydantic import AfterValidator

from marsbench import locks
from marsbench.errors import UserError
from marsbench.files import check_can_be_written, write_atomically
from marsbench.json_lines import Log, parse_json, read_json, read_lines
from marsbench.keys import HISTORY, versions
from marsbench.line import TrainedStage
from marsbench.locks import locked
from marsbench.presets import preset
from marsbench.rows.kinds import SCHEMA, AnyRow, EvaluationRow, StepCostRow, TrainingRow, to_json
from marsbench.rows.workspace import RowFile, Workspace, full_disk_explained, read_rows, rows_text
from marsbench.running.cells import CellRunner
from marsbench.running.plans import PlannedCell
from marsbench.running.run import Run
from marsbench.studies import studies
from marsbench.training.stages import recipe


def row(key: str, seconds: float = 1.0) -> StepCostRow:
    return StepCostRow(key, "done", "", "mini", {"ar": [seconds], "mars": [2 * seconds]})


def test_rows_survive_the_round_trip(tmp_path: Path) -> None:
    """Guards against a field that is written but not read."""
    origin: dict[str, Any] = {"checkpoint": "hash", "provenance": {"seed": 0}}
    rows = [
        row("a"),
        TrainingRow("b", "done", "", "mini", "mars", 4, 10, 20, 30, 1.5, 0.25, **origin),
        EvaluationRow("c", "failed", "no data", "mini", "mars", "mars", "mars", {"block_size": 4}, "gsm8k", "score"),
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text(rows_text(rows))
    assert read_rows(file) == rows


def test_old_rows_load_and_strange_ones_do_not() -> None:
    """Guards against rows dropped by an upgrade, and a newer file read wrongly."""
    record = {name: value for name, value in to_json(row("a")).items() if name != "provenance"}
    assert parse_json(json.dumps(record), AnyRow) == row("a")
    for strange in ({**record, "kind": "rumour"}, {**record, "schema": SCHEMA + 1}):
        with pytest.raises(ValueError, match="unknown"):
            parse_json(json.dumps(strange), AnyRow)


def test_two_writers_do_not_mix_lines_and_the_last_row_counts(tmp_path: Path) -> None:
    """Guards against two runs in one folder that corrupt each other's rows, and a rerun whose old row comes back."""
    file = tmp_path / "rows.jsonl"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: RowFile(file).append(row(str(number))), range(64)))
    RowFile(file).append(row("7", 2.0))
    assert RowFile(file).rows() == {str(number): row(str(number), 2.0 if number == 7 else 1.0) for number in range(64)}


def test_a_full_disk_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against any error of a library that cannot write, and against hiding bugs behind that message."""
    with pytest.raises(RuntimeError, match="a bug"), full_disk_explained(tmp_path / "not" / "there"):
        raise RuntimeError("a bug")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    with pytest.raises(UserError, match="disk is full"), full_disk_explained(tmp_path / "not" / "there"):
        raise RuntimeError("unexpected pos 64 vs 0")


def refuse(number: int) -> Any:
    """A system that refuses every file lock with this error."""
    return Mock(side_effect=OSError(number, os.strerror(number)))


def test_who_waits_is_told_for_whom(tmp_path: Path) -> None:
    """Guards against a command that hangs without a word."""
    file, messages = tmp_path / "new" / "lock", list[str]()
    with locked(file, say=messages.append):
        holder = f"process {os.getpid()} on {socket.gethostname()}"
        with pytest.raises(UserError, match=holder) as raised, locked(file, patience_s=0.1, say=messages.append):
            pass
        assert raised.value.where == str(file) and messages == [holder]
    with locked(file, say=messages.append):
        assert messages == [holder]


def test_a_lost_machine_is_not_waited_for_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a file in place of a lock that stays after its holder has gone, where there is no flock."""
    monkeypatch.setattr(fcntl, "flock", refuse(errno.ENOSYS))
    monkeypatch.setattr(locks, "_LOST_S", 0.2)
    file = tmp_path / "lock"
    with locked(file):
        assert file.exists()
    file.write_text("7\nelsewhere\n")
    with pytest.raises(UserError, match="process 7 on elsewhere"), locked(file):
        pass


def test_a_file_system_that_cannot_lock_is_found_out_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a traceback at the first row, after the first training."""
    Workspace(tmp_path, "micro").check_writable()
    monkeypatch.setattr(fcntl, "flock", refuse(errno.ENOLCK))
    with pytest.raises(UserError, match="cannot be locked here") as raised:
        Workspace(tmp_path, "micro").check_writable()
    assert raised.value.where.endswith("rows.jsonl.lock")


SAME_VERSIONS = {name: metadata.version(name) for name in ("torch", "transformers")}
MEASURED = [
    (scale, seed, key)
    for scale, seed in (("mini", 0), ("mini", 1))
    for key, study in studies().items()
    if study.plan in study.plans and key in Workspace(ROOT, scale, f"seed{seed}" if seed else "").pages
]


def test_a_version_is_the_length_of_its_history(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a new line of history that leaves keys as they were."""
    before = recipe(preset("micro"), "base").key
    monkeypatch.setitem(HISTORY, "world", (*HISTORY["world"], "another world"))
    assert versions("world") == {"world": len(HISTORY["world"])}
    assert recipe(preset("micro"), "base").key != before


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Run]:
    """One run for all tables, as each run loads every benchmark again."""
    folder = tmp_path_factory.mktemp("runs")
    return cache(lambda scale, seed: Run(preset(scale), Workspace(folder, scale), seed=seed))


@pytest.mark.parametrize(("scale", "seed", "table"), MEASURED)
def test_committed_cells_and_checkpoints_are_found_again(
    scale: str, seed: int, table: str, run_of: Callable[[str, int], Run]
) -> None:
    """Guards against a run that trains and measures again what the committed rows hold."""
    rows, plan = page_rows(table, scale, seed), studies()[table].plan
    assert plan is not None
    seed = (*plan.seeds, seed)[0]
    run = run_of(scale, seed)
    arms, checked = {arm.name: arm for arm in plan.lines}, 0
    trained = {}
    for row in rows:
        if isinstance(row, TrainingRow):
            trained[TrainedStage(row.stage, row.block_size)] = row.checkpoint
            if SAME_VERSIONS.items() <= row.provenance["versions"].items():  # they are part of a recipe
                size = row.block_size or 4
                assert row.key == recipe(preset(scale), row.stage, block_size=size, seed=seed).key
        if isinstance(row, EvaluationRow) and row.status == "done":
            arm = arms[row.arm]
            draft = trained[arm.draft] if arm.draft else None
            cell = PlannedCell(arm, row.benchmark, plan.questions)
            assert row.key == CellRunner(run)._key(cell, row.checkpoint, draft)
            checked += 1
    assert checked >= 6


@dataclass
class Numbered:
    n: int


def everything_below(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


@pytest.mark.parametrize("name", ["new.jsonl", "old.jsonl", "not/yet/there.jsonl"])
def test_what_can_be_written_passes_and_stays_as_it_is(name: str, tmp_path: Path) -> None:
    """Guards against a check that creates folders, leaves a file behind or empties the file that is there."""
    (tmp_path / "old.jsonl").write_text("old")
    before = everything_below(tmp_path)
    check_can_be_written(tmp_path / name, "--out")
    assert everything_below(tmp_path) == before
    assert (tmp_path / "old.jsonl").read_text() == "old"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("folder", "it is a folder"), ("file/below.jsonl", "is no folder"), ("file/far/below.jsonl", "is no folder"),
        ("pipe", "no ordinary file"), ("n" * 300, "name too long"),
    ],
)  # fmt: skip
def test_what_cannot_be_written_is_refused(name: str, reason: str, tmp_path: Path) -> None:
    """Guards against hours of work that end in a file that cannot be written, and a hint without the option's name."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match=f"(?i){reason}") as raised:
        check_can_be_written(tmp_path / name, "--image")
    assert raised.value.where == str(tmp_path / name) and "--image" in raised.value.fix
    assert [path.name for path in everything_below(tmp_path)] == ["file", "folder", "pipe"]


def test_a_folder_without_leave_to_write_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards against a folder that turns out to be another user's at the end only."""
    denied = PermissionError(errno.EACCES, "Permission denied")  # as the system would say to a plain user
    monkeypatch.setattr(tempfile, "NamedTemporaryFile", Mock(side_effect=denied))
    with pytest.raises(UserError, match="Permission denied"):
        check_can_be_written(tmp_path / "new" / "out.jsonl", "--out")


def test_a_file_has_its_content_before_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a name without content after a power cut, and two writers with one draft file."""
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
    """Guards against a cut line that is read, or joined to the next, lines read twice, and a traceback for a folder."""
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
    with pytest.raises(UserError, match="cannot be read") as raised:
        read_lines(tmp_path, Any, what="a line", mend="mend it")
    assert raised.value.where == str(tmp_path)


READERS: dict[str, Callable[[Path], Any]] = {
    "lines": lambda file: read_lines(file, Any, what="a line", mend="mend it"),
    "log": lambda file: Log[Any](file, Any, what="a line", mend="mend it").records(),
    "document": lambda file: read_json(file, mend="mend it"),
    "rows": read_rows,
}
NO_JSON = {  # what a line may hold instead of JSON, and the reason that is named
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
    content, reason = NO_JSON[fault]
    before = 0 if reader in ("document", "rows") else good
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "file"
        file.write_bytes(b'{"n": 1}\n' * before + data.draw(content) + b"\n")
        with pytest.raises(UserError, match="not" if reader == "rows" else reason) as raised:
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


@settings(max_examples=40, deadline=None)
@given(
    records=st.lists(VALUES, min_size=1), end=st.sampled_from(["\n", "\r\n"]), mark=st.booleans(), plain=st.booleans()
)
def test_what_is_json_is_read_as_python_reads_it(records: list[Any], end: str, mark: bool, plain: bool) -> None:
    """Guards against a reader that changes numbers or texts, splits at U+2028, or wants one editor's line ends."""
    text = end.join(json.dumps(record, ensure_ascii=plain) for record in records)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "file"
        file.write_bytes(text.encode("utf-8-sig" if mark else "utf-8"))
        values = read_lines(file, Any, what="a line", mend="mend it")
    assert json.dumps(values) == json.dumps(records)


@pytest.mark.parametrize("value", ["1.0", "true", '"1"', "null", "[1]"])
def test_a_value_of_another_type_is_none(value: str) -> None:
    """Guards against numbers that are made of texts, truth values or lists."""
    with pytest.raises(ValueError, match="n: "):
        parse_json(f'{{"n": {value}}}', Numbered)
