"""Scoring logged responses without a model, and comparing two logs question by question."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

from marsbench.errors import UserError
from marsbench.evaluation.harness import Exam, LoggedAnswer, Scored, evaluate
from marsbench.json_lines import read_lines
from marsbench.statistics.intervals import Estimate, accuracy, mcnemar, paired_difference


def summary(scored: Scored) -> dict[str, Any]:
    """What there is to say, as plain data: accuracy in % with its 95 % interval, and the scores beside it."""
    exam, correct, family = scored.exam, scored.correct, f"{scored.exam.benchmark.file.stem}_"
    head, by_number = in_percent(accuracy(correct)), dict(zip(exam.question_numbers(), correct, strict=True))
    subtasks = {
        task.removeprefix(family): in_percent(accuracy([by_number[exam.numbers[task][place]] for place in places]))
        for task, places in exam.places.items()
    }
    return {
        "benchmark": exam.benchmark.name, "n": len(correct),
        "questions": sum(len(numbers) for numbers in exam.numbers.values()), "score": exam.benchmark.headline,
        "accuracy": head["accuracy"], "interval": head["interval"],
        "scores": {name: in_percent(accuracy(_flat(values))) for name, values in scored.scores.items()},
        "subtasks": subtasks if len(exam.tasks) > 1 else {},
    }  # fmt: skip


def verdicts(scored: Scored) -> list[dict[str, Any]]:
    return [
        {"doc_id": answer.doc_id, **dict(zip(scored.scores, values, strict=True))}
        for answer, *values in zip(scored.answers, *scored.scores.values(), strict=True)
    ]


@dataclass(frozen=True)
class _Response:
    doc_id: int | str
    response: str
    target: Any = None


def score_file(exam: Exam, file: Path) -> Scored:
    """Score a file of responses, JSON Lines of `{"doc_id": ..., "response": ...}`; questions without one are left out.

    `doc_id` is the question's number, `SUBTASK/INDEX`, or HumanEval's own `HumanEval/0`. A line with a `target`, as in
    the logs of `marsbench eval`, must belong to this benchmark. `UserError` names a line that is wrong or there twice.
    """
    mend = 'every line needs {"doc_id": ..., "response": "..."}'
    records = read_lines(file, _Response, what="a response", mend=mend)
    names, targets = _names(exam), dict[int, str]()
    if any(record.target for record in records):
        for name, task in exam.tasks.items():
            targets |= dict(zip(exam.numbers[name], map(str, map(task.doc_to_target, task.eval_docs)), strict=True))
    said: dict[int, LoggedAnswer] = {}
    for line, record in enumerate(records, 1):
        where = f"{file}, line {line}"
        if (number := names.get(str(record.doc_id))) is None:
            fix = f"number its {len(set(names.values())):,} questions from 0, or write SUBTASK/INDEX"
            raise UserError(f"{exam.benchmark.name} has no question {record.doc_id!r}", where=where, fix=fix)
        if number in said:
            raise UserError(f"question {record.doc_id!r} is answered twice", where=where, fix="keep one of the lines")
        if record.target and record.target != targets[number]:
            expected = shorten(targets[number], 60, placeholder=" ...")
            what = f"this answers another question; here {exam.benchmark.name} expects {expected!r}"
            fix = 'name the benchmark that was asked, or remove "target" from the lines to score them anyway'
            raise UserError(what, where=where, fix=fix)
        said[number] = LoggedAnswer(number, record.response)
    return evaluate(exam.only(said), said)


def compare_files(exam: Exam, first: Path, second: Path) -> dict[str, Any]:
    """Two files on the questions that both answer (else `UserError`), as plain data; points are first minus second."""
    both = [score_file(exam, file) for file in (first, second)]
    answered = [set(answers.exam.question_numbers()) for answers in both]
    if not (shared := sorted(answered[0] & answered[1])):
        raise UserError("the two files answer no question in common", where=f"{first}, {second}", fix="check the files")
    scores = {}
    for name in exam.benchmark.scores:
        sides = [dict(zip(answers.exam.question_numbers(), answers.scores[name], strict=True)) for answers in both]
        a, b = (_flat([side[number] for number in shared]) for side in sides)
        difference = paired_difference({exam.benchmark.name: a}, {exam.benchmark.name: b})
        only_a, only_b, p_value = mcnemar(a, b)
        scores[name] = {
            "points": difference.value, "interval": [difference.interval.low, difference.interval.high],
            "n": difference.n,
            "right_only_in_first": only_a, "right_only_in_second": only_b, "p_mcnemar": p_value,
        }  # fmt: skip
    return {
        "benchmark": exam.benchmark.name, "questions": len(shared),
        "answered_only_in_first": len(answered[0] - answered[1]),
        "answered_only_in_second": len(answered[1] - answered[0]), "scores": scores,
    }  # fmt: skip


def _names(exam: Exam) -> dict[str, int]:
    names: dict[str, int] = {}
    for task, numbers in exam.numbers.items():
        subtask = task.removeprefix(f"{exam.benchmark.file.stem}_")
        questions = exam.tasks[task].eval_docs
        names |= {str(number): number for number in numbers}
        names |= {f"{subtask}/{place}": number for place, number in enumerate(numbers)}
        if "task_id" in questions.features:
            names |= dict(zip(questions["task_id"], numbers, strict=True))
    return names


def _flat(values: Sequence[Any]) -> list[float]:
    return [part for value in values for part in (value if isinstance(value, list) else [value])]


def in_percent(estimate: Estimate) -> dict[str, Any]:
    interval = estimate.interval
    return {"accuracy": 100 * estimate.value, "interval": [100 * interval.low, 100 * interval.high], "n": estimate.n}
