"""Rows on disk: nothing lost, nothing half-written."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from marsbench.errors import UserError
from marsbench.evaluation.harness import AnswerLog, LoggedAnswer
from marsbench.json_lines import parse_json
from marsbench.rows.kinds import SCHEMA, AnyRow, EvaluationRow, StepCostRow, TrainingRow, to_json
from marsbench.rows.store import RowStore, existing_policy, read_rows, rows_text
from marsbench.rows.workspace import full_disk_explained


def row(key: str, seconds: float = 1.0) -> StepCostRow:
    return StepCostRow(key, "done", "", "mini", {"ar": [seconds], "mars": [2 * seconds]})


def test_rows_survive_the_round_trip(tmp_path: Path) -> None:
    """Guards against a field that is written but not read."""
    rows = [
        row("a"),
        TrainingRow(
            "b", "done", "", "mini", "mars", 4, 10, 20, 30, 1.5, 0.25, checkpoint="hash", provenance={"seed": 0}
        ),
        EvaluationRow(
            "c",
            "failed",
            "no data",
            "mini",
            "mars",
            "mars",
            "mars",
            {"block_size": 4},
            "gsm8k",
            "exact_match",
        ),
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text(rows_text(rows))
    assert read_rows(file) == rows


def test_old_rows_load_and_strange_ones_do_not() -> None:
    """Guards against an upgrade that drops rows silently, and against a newer file read wrongly."""
    record = {name: value for name, value in to_json(row("a")).items() if name != "provenance"}
    assert parse_json(json.dumps(record), AnyRow) == row("a")
    for strange in ({**record, "kind": "rumour"}, {**record, "schema": SCHEMA + 1}):
        with pytest.raises(ValueError, match="unknown"):
            parse_json(json.dumps(strange), AnyRow)


def test_an_unfinished_line_is_passed_over_and_mended(tmp_path: Path) -> None:
    """Guards against a kill during a write that makes the whole file unreadable, or glues two rows together."""
    file = tmp_path / "rows.jsonl"
    store = RowStore(file)
    store.append(row("a"))
    with file.open("a") as stream:
        stream.write(json.dumps(to_json(row("b")))[:-9])
    assert list(store.rows()) == ["a"]
    store.append(row("c"))
    assert list(store.rows()) == ["a", "c"]


def test_the_last_row_of_a_key_counts(tmp_path: Path) -> None:
    """Guards against a rerun whose old row comes back."""
    store = RowStore(tmp_path / "rows.jsonl")
    store.append(row("a", 1.0))
    store.append(row("a", 2.0))
    assert store.rows() == {"a": row("a", 2.0)}


def test_two_writers_do_not_mix_lines(tmp_path: Path) -> None:
    """Guards against two runs in one folder that corrupt each other's rows."""
    file = tmp_path / "rows.jsonl"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: RowStore(file).append(row(str(number))), range(64)))
    assert set(RowStore(file).rows()) == {str(number) for number in range(64)}


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    """Guards against a traceback where file and line would help."""
    file = tmp_path / "rows.jsonl"
    file.write_text(rows_text([row("a")]) + "{}\n")
    with pytest.raises(UserError, match="line 2"):
        read_rows(file)


def test_policies_have_names() -> None:
    """Guards against a misspelt policy taken for the default."""
    assert existing_policy("rerun") == "rerun"
    with pytest.raises(UserError, match="reuse, rerun, fail"):
        existing_policy("overwrite")


def test_a_full_disk_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against whatever a library raises when it cannot write, and against hiding bugs behind that message."""
    with pytest.raises(RuntimeError, match="a bug"), full_disk_explained(tmp_path / "not" / "there"):
        raise RuntimeError("a bug")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    with pytest.raises(UserError, match="disk is full"), full_disk_explained(tmp_path / "not" / "there"):
        raise RuntimeError("unexpected pos 64 vs 0")


def test_answers_of_an_interrupted_run_are_taken_up(tmp_path: Path) -> None:
    """Guards against answers lost, or a cut line that breaks the log."""
    file = tmp_path / "answers.jsonl"
    log = AnswerLog(file)
    log.add(LoggedAnswer(0, "zero", 3, 2, True))
    log.add(LoggedAnswer(1, "one", 4, 4, False))
    with file.open("a") as stream:
        stream.write('{"doc_id": 2, "resp')
    resumed = AnswerLog(file)
    assert resumed.answers == log.answers
    resumed.add(LoggedAnswer(2, "two", 1, 1, True))
    assert list(AnswerLog(file).answers) == [0, 1, 2]
