"""Scores programs for HumanEval by its own tests and by those that HumanEval+ adds.

The tests are EvalPlus's: inputs, and a reference solution whose outputs are right by definition. References and
generated programs run in the sandbox only. Inputs are plain JSON; evalplus converts none of HumanEval's either.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from marsbench.errors import UserError
from marsbench.evaluation.local_data import Unavailable, local_file
from marsbench.evaluation.sandbox import (
    EVALPLUS_MAX_TIME_LIMIT_S,
    Calls,
    Program,
    Reason,
    Recording,
    record_outputs,
    run_programs,
)
from marsbench.json_lines import read_objects

LOCAL_FILE = "humanevalplus/HumanEvalPlus.jsonl"
COLUMNS = ["task_id", "prompt", "canonical_solution", "entry_point", "base_input", "plus_input", "atol"]
PASSED_BASE_ONLY = "passed base only"

# evalplus's limits: a program has four times as long as the reference for an input, but at least a second.
TIME_FACTOR = 4.0
MIN_TIME_LIMIT_S = 1.0
MEMORY_LIMIT_MB = 4096


@dataclass(frozen=True)
class Problem:
    """One problem: its reference solution as a whole program, and its tests' arguments, HumanEval's first."""

    task_id: str
    entry_point: str
    reference: str
    inputs: list[list[Any]]
    base_count: int  # how many inputs are HumanEval's
    atol: float


def load_problems(data_dir: Path | None = None) -> dict[str, Problem]:
    """HumanEval+ by task id, from `data_dir` or else through evalplus's own download.

    Raises:
        Unavailable: the file is missing, or the download failed.
        UserError: the file is broken.
    """
    if data_dir is None:
        records = _download()
    else:
        records = read_objects(local_file(data_dir, LOCAL_FILE), COLUMNS, unique="task_id")
    return {record["task_id"]: _problem(record) for record in records}


def _download() -> list[dict[str, Any]]:
    from evalplus.data import get_human_eval_plus

    try:
        with redirect_stdout(sys.stderr):  # it reports its progress
            return list(get_human_eval_plus().values())
    except OSError as error:
        raise Unavailable(
            "HumanEval+ cannot be downloaded", where=str(error), fix="go online once, or give --data-dir"
        ) from error


def _problem(record: Mapping[str, Any]) -> Problem:
    return Problem(
        record["task_id"],
        record["entry_point"],
        record["prompt"] + record["canonical_solution"],
        record["base_input"] + record["plus_input"],
        len(record["base_input"]),
        record["atol"],
    )


def score_programs(
    programs: Sequence[tuple[str, str]], problems: Mapping[str, Problem], *, jobs: int | None = None
) -> list[str]:
    """A word for each (task id, whole program) pair, in their order, from `jobs` workers (default: one per core).

    `passed` (HumanEval's tests and those that HumanEval+ adds), `passed base only`, or why HumanEval's were not. The
    reference of each problem runs once. What fails HumanEval's tests is not run on the others.

    Raises:
        UserError: a task id is not among the problems, a reference does not run, or the sandbox does not start.
    """
    task_ids = list(dict.fromkeys(task_id for task_id, _ in programs))
    if unknown := [task_id for task_id in task_ids if task_id not in problems]:
        raise UserError(f"no tests for {', '.join(unknown)}", where=LOCAL_FILE, fix="fetch the whole file again")
    tests = _tests([problems[task_id] for task_id in task_ids], jobs)
    base = _run([replace(tests[task_id][0], code=code) for task_id, code in programs], jobs)
    survivors = [program for program, verdict in zip(programs, base, strict=True) if verdict == "passed"]
    plus = iter(_run([replace(tests[task_id][1], code=code) for task_id, code in survivors], jobs))
    return [PASSED_BASE_ONLY if verdict == "passed" != next(plus) else verdict for verdict in base]


def _tests(problems: Sequence[Problem], jobs: int | None) -> dict[str, tuple[Program, Program]]:
    """By task id, HumanEval's tests and those that HumanEval+ adds, as programs that still lack their code."""
    calls = [Calls(problem.reference, problem.entry_point, problem.inputs) for problem in problems]
    recordings = record_outputs(calls, jobs=jobs, memory_limit_mb=MEMORY_LIMIT_MB)
    tests = {}
    for problem, recording in zip(problems, recordings, strict=True):
        if recording.reason != "passed":
            what = f"the reference solution of {problem.task_id} does not run: {recording.reason}"
            raise UserError(what, where=LOCAL_FILE, fix="fetch the file again, or free memory and disk")
        parts = slice(problem.base_count), slice(problem.base_count, None)
        tests[problem.task_id] = _part(problem, recording, parts[0]), _part(problem, recording, parts[1])
    return tests


def _part(problem: Problem, recording: Recording, part: slice) -> Program:
    return Program(
        "",
        problem.entry_point,
        problem.inputs[part],
        recording.outputs[part],
        problem.atol,
        limits_s=[max(MIN_TIME_LIMIT_S, TIME_FACTOR * seconds) for seconds in recording.seconds[part]],
    )


def _run(programs: Sequence[Program], jobs: int | None) -> list[Reason]:
    return run_programs(programs, jobs=jobs, time_limit_s=EVALPLUS_MAX_TIME_LIMIT_S, memory_limit_mb=MEMORY_LIMIT_MB)


def run_completions(
    responses: Iterable[Sequence[str]], docs: Iterable[Mapping[str, Any]], data_dir: Path | None = None
) -> list[list[str]]:
    """The word of every response to every question (an lm-eval filter, once bound to `data_dir`), all in one go.

    A program is put together as lm-eval's `humaneval_instruct` does it: HumanEval's prompt, then the response up to
    the end of its code block.
    """
    answers = [list(answer) for answer in responses]
    programs = [
        (doc["task_id"], doc["prompt"] + text.partition("```")[0])
        for answer, doc in zip(answers, docs, strict=True)
        for text in answer
    ]
    words = iter(score_programs(programs, load_problems(data_dir)))
    return [[next(words) for _ in answer] for answer in answers]


def pass_at_1(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Both numbers of a question, from the word on its one response (lm-eval's `process_results`)."""
    return {"pass@1": float(results[0] in ("passed", PASSED_BASE_ONLY)), "pass@1_plus": float(results[0] == "passed")}
