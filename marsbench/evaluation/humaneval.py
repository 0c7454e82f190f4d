"""Scores programs by HumanEval's tests and those that HumanEval+ adds; references, too, run in the sandbox only."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict

from marsbench.errors import UserError
from marsbench.evaluation.local_data import DATA_DIR, Unavailable, local_file
from marsbench.evaluation.sandbox import EVALPLUS_MAX_TIME_LIMIT_S, Program, Reason, record_outputs, run_programs
from marsbench.json_lines import read_lines

LOCAL_FILE = "humanevalplus/HumanEvalPlus.jsonl"
PASSED_BASE_ONLY = "passed base only"

# evalplus's limits: a program has four times as long as the reference for an input, but at least a second.
TIME_FACTOR = 4.0
MIN_TIME_LIMIT_S = 1.0
MEMORY_LIMIT_MB = 4096

_Inputs = Annotated[list[list[Any]], Field(min_length=1)]  # of each test, the arguments


class _Line(TypedDict):
    task_id: str
    prompt: str
    canonical_solution: str
    entry_point: str
    base_input: _Inputs
    plus_input: _Inputs
    atol: Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class Problem:
    """One problem: its reference solution with all tests' arguments, of which so many are HumanEval's, the first."""

    reference: Program
    base_count: int


def load_problems(data_dir: Path | None = None) -> dict[str, Problem]:
    """HumanEval+ by task id, from `data_dir` or evalplus's download; `Unavailable` without, `UserError` if broken."""
    if data_dir is None:
        from evalplus.data import get_human_eval_plus

        try:
            with redirect_stdout(sys.stderr):  # it reports its progress
                records = list(get_human_eval_plus().values())
        except OSError as error:
            fix = "go online once, or give --data-dir"
            raise Unavailable("HumanEval+ cannot be downloaded", where=str(error), fix=fix) from error
    else:
        mend = f"every line needs {', '.join(_Line.__annotations__)}; fetch the file again"
        file = local_file(data_dir, LOCAL_FILE)
        records = read_lines(file, _Line, what="a problem of HumanEval+", mend=mend, unique="task_id")
    problems = {}
    for record in records:
        code, inputs = record["prompt"] + record["canonical_solution"], record["base_input"] + record["plus_input"]
        reference = Program(code, record["entry_point"], inputs, None, record["atol"])
        problems[record["task_id"]] = Problem(reference, len(record["base_input"]))
    return problems


def score_programs(programs: Sequence[tuple[str, str]], problems: Mapping[str, Problem]) -> list[str]:
    """`passed`, `passed base only` (HumanEval's own tests) or why not, for each (task id, whole program) pair."""
    task_ids = list(dict.fromkeys(task_id for task_id, _ in programs))
    if unknown := [task_id for task_id in task_ids if task_id not in problems]:
        raise UserError(f"no tests for {', '.join(unknown)}", where=LOCAL_FILE, fix="fetch the whole file again")
    references = [problems[task_id].reference for task_id in task_ids]
    recordings = record_outputs(references, memory_limit_mb=MEMORY_LIMIT_MB)
    tests = dict[str, list[Program]]()  # HumanEval's and those that HumanEval+ adds; they still lack their code
    for task_id, reference, recording in zip(task_ids, references, recordings, strict=True):
        if recording.reason != "passed":
            what = f"the reference solution of {task_id} does not run: {recording.reason}"
            raise UserError(what, where=LOCAL_FILE, fix="fetch the file again, or free memory and disk")
        limits = [max(MIN_TIME_LIMIT_S, TIME_FACTOR * seconds) for seconds in recording.seconds]
        called, inputs, count = reference.entry_point, reference.inputs, problems[task_id].base_count
        tests[task_id] = [
            Program("", called, inputs[part], recording.outputs[part], reference.atol, limits[part])
            for part in (slice(count), slice(count, None))
        ]

    def run(some: Sequence[tuple[str, str]], part: int) -> list[Reason]:
        return run_programs(
            [replace(tests[task_id][part], code=code) for task_id, code in some],
            time_limit_s=EVALPLUS_MAX_TIME_LIMIT_S, memory_limit_mb=MEMORY_LIMIT_MB,
        )  # fmt: skip

    base = run(programs, 0)
    plus = iter(run([program for program, verdict in zip(programs, base, strict=True) if verdict == "passed"], 1))
    return [PASSED_BASE_ONLY if verdict == "passed" != next(plus) else verdict for verdict in base]


def run_completions(
    responses: Iterable[Sequence[str]], docs: Iterable[Mapping[str, Any]], data_dir: str | Path | None = None
) -> list[list[str]]:
    """The word of every response to every question (an lm-eval filter), all programs in one go.

    A program is put together as lm-eval's `humaneval_instruct` does it: HumanEval's prompt, then the response up to
    the end of its code block. The tests lie in `data_dir`, or else where the questions came from.
    """
    answers, docs = [list(answer) for answer in responses], list(docs)
    programs = [
        (doc["task_id"], doc["prompt"] + text.partition("```")[0])
        for answer, doc in zip(answers, docs, strict=True)
        for text in answer
    ]
    folder = data_dir or (docs[0].get(DATA_DIR) if docs else None)
    words = iter(score_programs(programs, load_problems(Path(folder) if folder else None)))
    return [[next(words) for _ in answer] for answer in answers]


def pass_at_1(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Both numbers of a question, from the word on its one response (lm-eval's `process_results`)."""
    return {"pass@1": float(results[0] in ("passed", PASSED_BASE_ONLY)), "pass@1_plus": float(results[0] == "passed")}
