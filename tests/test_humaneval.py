"""HumanEval and HumanEval+: right programs pass, wrong and hostile ones do not, broken data is reported."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.error import URLError

import evalplus.data.humaneval
import pytest
import wget

from marsbench.errors import UserError
from marsbench.evaluation import humaneval, sandbox
from marsbench.evaluation.humaneval import (
    LOCAL_FILE,
    Problem,
    load_problems,
    pass_at_1,
    run_completions,
    score_programs,
)
from marsbench.evaluation.sandbox import Program, Recording

FIXTURE = Path(__file__).parent / "data"
PROBLEMS = load_problems(FIXTURE)


@pytest.fixture(params=["fixture", pytest.param("all", marks=pytest.mark.slow)])
def data_dir(request: pytest.FixtureRequest) -> Path:
    """The committed problems, and all of them where there is a local copy."""
    if request.param == "fixture":
        return FIXTURE
    if not os.environ.get("MARSBENCH_DATA"):
        pytest.skip("MARSBENCH_DATA names no local copy of the benchmark data")
    return Path(os.environ["MARSBENCH_DATA"])


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def read_docs(data_dir: Path) -> list[dict[str, Any]]:
    """HumanEval's own rows, as lm-eval hands them to its filters."""
    return lines_of(data_dir / "humaneval" / "test.jsonl")


def words(task_id: str, *completions: str) -> list[str]:
    """The words on completions of one committed problem."""
    [doc] = [doc for doc in read_docs(FIXTURE) if doc["task_id"] == task_id]
    return run_completions([completions], [doc], FIXTURE)[0]


def corrupt(solution: str, entry_point: str) -> str:
    """The same solution with each answer in a list."""
    return f"{solution}\n\nright = {entry_point}\ndef {entry_point}(*args):\n    return [right(*args)]\n"


def test_reference_solutions_pass_and_corrupted_ones_fail(data_dir: Path) -> None:
    """Guards against evalplus 0.3.1, which fails all for HumanEval/32, and against prompts that differ (115)."""
    docs, records = read_docs(data_dir), lines_of(data_dir / LOCAL_FILE)
    solutions = [record["canonical_solution"] for record in records]
    wrong = [corrupt(solution, doc["entry_point"]) for solution, doc in zip(solutions, docs, strict=True)]
    assert len(docs) == (4 if data_dir == FIXTURE else 164)
    found = run_completions(zip(solutions, wrong, strict=True), docs, data_dir)
    assert found == [["passed", "failed"]] * len(docs)


FIB, TRUNCATE = "HumanEval/55", "HumanEval/2"
ATTACKS = ("while True: pass", "import os; os._exit(0)")
WORDS = {  # problem -> completions, each with its word
    FIB: {
        "    return n if n < 2 else fib(n - 1) + fib(n - 2)": "passed",
        "    return 1 if n < 3 else fib(n - 1) + fib(n - 2)": "passed base only",  # HumanEval does not ask for fib(0)
    },
    TRUNCATE: {
        "    return number % 1.0\n": "passed",
        "    return number % 1.0\n```\nThis is right.": "passed",
        "    return number % 1.0\nThis is right.": "failed",
        "    return number % 1.0 + 5e-7": "passed",
        "    return number % 1.0 + 1e-4": "failed",
    },
}


def test_completions_by_hand() -> None:
    """Guards against HumanEval+ that counts as HumanEval, prose that becomes part of the program, and a tolerance that
    is lost, or far too wide; and against numbers of a word that are exchanged.
    """
    for task, completions in WORDS.items():
        assert words(task, *completions) == [*completions.values()]
    program = "def fib(n):\n    return 1 if n < 3 else fib(n - 1) + fib(n - 2)"
    assert score_programs([(FIB, program)], PROBLEMS) == ["passed base only"]
    for word, expected in {"passed": (1.0, 1.0), "passed base only": (1.0, 0.0), "failed": (0.0, 0.0)}.items():
        numbers = pass_at_1({}, [word])
        assert (numbers["pass@1"], numbers["pass@1_plus"]) == expected


def test_every_input_has_its_own_time_limit() -> None:
    """Guards against one limit for all inputs, and against limits that ignore how long the reference takes."""
    code = "import time\ndef wait(*seconds):\n    time.sleep(seconds[{index}])"
    inputs = [[0.0, 0.6, 1.6], [0.4, 1.3, 1.3]]  # limits: 1.0 s and about 1.6 s
    problem = Problem(Program(code.format(index=0), "wait", inputs, None), 1)
    programs = [("W/0", code.format(index=index)) for index in (0, 1, 2)]
    scores = score_programs(programs, {"W/0": problem})
    assert scores == ["passed", "passed", "timeout"]


def test_every_reference_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a reference for each program, which doubles the work."""
    asked: list[str] = []

    def count(calls: Sequence[Program], **options: Any) -> list[Recording]:
        asked.extend(call.entry_point for call in calls)
        return record_outputs(calls, **options)

    record_outputs = humaneval.record_outputs
    monkeypatch.setattr(humaneval, "record_outputs", count)
    code = "def fib(n):\n    return n"
    score_programs([("HumanEval/55", code)] * 3 + [("HumanEval/2", code)], PROBLEMS)
    assert asked == ["fib", "truncate_number"]


def test_hostile_programs_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against attacks that pass, hang, or cost other programs their verdict; test_sandbox.py has many more."""
    monkeypatch.setattr(sandbox, "WORTH_A_WORKER", 1)  # two workers
    right = PROBLEMS[FIB].reference.code
    codes = [f"{right}\nright = fib\ndef fib(n):\n    {attack}\n    return right(n)" for attack in ATTACKS]
    assert score_programs([(FIB, code) for code in [*codes, right]], PROBLEMS) == ["timeout", "killed", "passed"]


RECORDS = lines_of(FIXTURE / LOCAL_FILE)
FIRST, SECOND = (json.dumps(record) + "\n" for record in RECORDS[:2])
BROKEN = {
    "empty file": ("", "empty"),
    "broken JSON": (FIRST + "{'task_id'\n" + SECOND, "line 2"),
    "truncated last line": (FIRST + SECOND[: len(SECOND) // 2], "line 2"),
    "missing column": (FIRST + json.dumps({"task_id": "HumanEval/3"}) + "\n", "prompt(.|\n)*line 2"),
    "no tests": (FIRST + json.dumps({**json.loads(SECOND), "plus_input": []}) + "\n", "plus_input(.|\n)*line 2"),
    "tests that are null": (json.dumps({**json.loads(FIRST), "base_input": None}) + "\n", "base_input(.|\n)*line 1"),
    "arguments that are no list": (json.dumps({**json.loads(FIRST), "base_input": [3.5]}) + "\n", "base_input.0"),
    "a tolerance that is no number": (json.dumps({**json.loads(FIRST), "atol": float("nan")}) + "\n", "atol"),
    "duplicate": (FIRST + SECOND + FIRST, "HumanEval/2' stands in line 1 already(.|\n)*line 3"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_data_is_the_users_to_mend(tmp_path: Path, name: str) -> None:
    """Guards against broken data that is scored in part, or ends in a traceback."""
    content, message = BROKEN[name]
    (tmp_path / LOCAL_FILE).parent.mkdir()
    (tmp_path / LOCAL_FILE).write_text(content)
    with pytest.raises(UserError, match=message) as error:
        load_problems(tmp_path)
    assert error.value.where.startswith(str(tmp_path / LOCAL_FILE))


def test_what_cannot_be_scored_is_the_users_to_mend(tmp_path: Path) -> None:
    """Guards against a silent download where a local copy was asked for, questions that are left out of the score, and
    programs that are measured by a broken reference.
    """
    with pytest.raises(UserError, match=r"no local copy(.|\n)*HumanEvalPlus.jsonl"):
        load_problems(tmp_path)
    with pytest.raises(UserError, match="no tests for HumanEval/0"):
        score_programs([(TRUNCATE, ""), ("HumanEval/0", "")], PROBLEMS)
    problem = Problem(Program("def f(:", "f", [[1], [2]], None), 1)
    with pytest.raises(UserError, match="reference solution of X/0 does not run: failed"):
        score_programs([("X/0", "def f(x):\n    return x")], {"X/0": problem})


def test_without_a_folder_evalplus_finds_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a loader that knows local folders only."""
    monkeypatch.setattr(evalplus.data.humaneval, "HUMANEVAL_OVERRIDE_PATH", str(FIXTURE / LOCAL_FILE))
    assert load_problems() == PROBLEMS


def test_failed_download_is_the_users_to_mend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards against a traceback on a machine without a network."""

    def fail(*_: Any) -> None:
        raise URLError("no network")

    monkeypatch.setattr(wget, "download", fail)
    monkeypatch.setattr(evalplus.data.utils, "CACHE_DIR", str(tmp_path))
    with pytest.raises(UserError, match=r"cannot be downloaded(.|\n)*no network"):
        load_problems()
