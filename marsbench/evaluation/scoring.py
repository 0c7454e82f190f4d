"""Scoring logged responses without a model, and comparing two logs question by question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

from marsbench.errors import UserError
from marsbench.evaluation.harness import Exam, LoggedAnswer, LoggedModel, Scored, evaluate
from marsbench.json_lines import read_objects
from marsbench.statistics.intervals import Estimate, accuracy, mcnemar, paired_difference


@dataclass(frozen=True)
class ScoredFile:
    """A file of responses, scored."""

    exam: Exam
    scored: Scored

    def summary(self) -> dict[str, Any]:
        """What there is to say, as plain data: accuracy in % with its 95 % interval, and the scores beside it."""
        head = in_percent(accuracy(self.scored.correct))
        return {
            "benchmark": self.exam.benchmark.name,
            "n": len(self.scored.correct),
            "questions": sum(len(numbers) for numbers in self.exam.numbers.values()),
            "score": self.exam.benchmark.headline,
            "accuracy": head["accuracy"],
            "interval": head["interval"],
            "scores": {name: in_percent(accuracy(_flat(values))) for name, values in self.scored.scores.items()},
            "subtasks": self._subtasks(),
        }

    def _subtasks(self) -> dict[str, dict[str, Any]]:
        if len(self.exam.tasks) == 1:
            return {}
        values = dict(zip(self.exam.asked(), self.scored.correct, strict=True))
        return {
            task.removeprefix(f"{self.exam.benchmark.file.stem}_"): in_percent(
                accuracy([values[self.exam.numbers[task][place]] for place in places])
            )
            for task, places in self.exam.places.items()
        }

    def verdicts(self) -> list[dict[str, Any]]:
        """Every question with its scores, in the order of their numbers."""
        names = self.scored.scores.keys()
        return [
            {"doc_id": answer.doc_id, **dict(zip(names, values, strict=True))}
            for answer, *values in zip(self.scored.answers, *self.scored.scores.values(), strict=True)
        ]


def score_file(exam: Exam, responses: Path) -> ScoredFile:
    """Score a file of responses, JSON Lines of `{"doc_id": ..., "response": ...}`.

    `doc_id` is the question's number (its row in the benchmark's data, from 0; the subtasks of BBH in alphabetical
    order, one after the other), or `SUBTASK/INDEX`, or HumanEval's own `HumanEval/0`. Questions without a response are
    not scored.

    A line that says what was expected of its answer (`target`, as in the logs of `marsbench eval`) must belong to this
    benchmark: answers to other questions would score, too, and say nothing.

    Raises:
        UserError: a line is no such object, its question does not exist, is answered twice, or was another one.
    """
    found = _read_responses(exam, responses)
    model = LoggedModel(exam.only(found), {number: LoggedAnswer(number, text) for number, text in found.items()})
    return ScoredFile(model.exam, evaluate(model))


def compare_files(exam: Exam, first: Path, second: Path) -> dict[str, Any]:
    """Two files on the questions that both answer, as plain data; differences in points, first minus second.

    Raises:
        UserError: as for `score_file`; or no question is in both.
    """
    both = [score_file(exam, file) for file in (first, second)]
    answered = [set(one.exam.asked()) for one in both]
    shared = sorted(answered[0] & answered[1])
    if not shared:
        raise UserError("the two files answer no question in common", where=f"{first}, {second}", fix="check the files")
    scores = {}
    for name in exam.benchmark.scores:
        sides = [dict(zip(one.exam.asked(), one.scored.scores[name], strict=True)) for one in both]
        a, b = (_flat([side[number] for number in shared]) for side in sides)
        found = paired_difference({exam.benchmark.name: a}, {exam.benchmark.name: b})
        only_a, only_b, p_value = mcnemar(a, b)
        scores[name] = {
            "points": found.value,
            "interval": [found.interval.low, found.interval.high],
            "n": found.n,
            "right_only_in_first": only_a,
            "right_only_in_second": only_b,
            "p_mcnemar": p_value,
        }
    return {
        "benchmark": exam.benchmark.name,
        "questions": len(shared),
        "answered_only_in_first": len(answered[0] - answered[1]),
        "answered_only_in_second": len(answered[1] - answered[0]),
        "scores": scores,
    }


def _read_responses(exam: Exam, file: Path) -> dict[int, str]:
    """Question number -> response."""
    records = read_objects(file, ("doc_id", "response"))
    names, targets = _names(exam), dict[int, str]()
    if any(record.get("target") for record in records):
        for name, task in exam.tasks.items():
            targets |= dict(zip(exam.numbers[name], map(str, map(task.doc_to_target, task.eval_docs)), strict=True))
    found: dict[int, str] = {}
    for line, record in enumerate(records, 1):
        where = f"{file}, line {line}"
        number = names.get(str(record["doc_id"]))
        if number is None:
            raise UserError(
                f"{exam.benchmark.name} has no question {record['doc_id']!r}", where=where,
                fix=f"number its {len(set(names.values())):,} questions from 0, or write SUBTASK/INDEX, as in "
                + next(name for name in names if "/" in name),
            )  # fmt: skip
        if not isinstance(record["response"], str):
            raise UserError("the response is no text", where=where, fix="give it as a JSON string")
        if number in found:
            raise UserError(
                f"question {record['doc_id']!r} is answered twice", where=where, fix="keep one of the lines"
            )
        if record.get("target"):
            _check_target(exam, record["target"], targets[number], where)
        found[number] = record["response"]
    return found


def _check_target(exam: Exam, logged: Any, expected: str, where: str) -> None:
    """Refuse an answer that was given to another question than the one it would be scored by."""
    if logged != expected:
        asked, here = (shorten(str(text), 60, placeholder=" ...") for text in (logged, expected))
        raise UserError(
            f"this answers another question than {exam.benchmark.name} asks: {asked!r} was expected of it, here it is "
            f"{here!r}",
            where=where,
            fix='name the benchmark that was asked, or leave "target" out of the lines to score them all the same',
        )


def _names(exam: Exam) -> dict[str, int]:
    """Every name that a question goes by -> its number."""
    names: dict[str, int] = {}
    for task, numbers in exam.numbers.items():
        subtask = task.removeprefix(f"{exam.benchmark.file.stem}_")
        questions = exam.tasks[task].eval_docs
        names |= {str(number): number for number in numbers}
        names |= {f"{subtask}/{place}": number for place, number in enumerate(numbers)}
        if "task_id" in questions.column_names:
            names |= dict(zip(questions["task_id"], numbers, strict=True))
    return names


def _flat(values: Sequence[Any]) -> list[float]:
    """The values of all questions; those of a question's parts one by one."""
    return [part for value in values for part in (value if isinstance(value, list) else [value])]


def in_percent(estimate: Estimate) -> dict[str, Any]:
    """An accuracy with its interval as plain data."""
    interval = estimate.interval
    return {"accuracy": 100 * estimate.value, "interval": [100 * interval.low, 100 * interval.high], "n": estimate.n}
