"""The questions of a sweep: prompts made by lm-eval's tasks, and the score of any response, worked out once."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from lm_eval.api.instance import Instance

from marsbench.errors import UserError
from marsbench.evaluation.benchmarks import benchmark
from marsbench.evaluation.harness import Exam, LoggedAnswer, cut_in_words, evaluate, prepare, without_beginning


@dataclass(frozen=True)
class Question:
    benchmark: str
    doc_id: int  # its number in the benchmark's data
    prompt: str  # in the chat template, up to where the assistant begins


@dataclass
class Questions:
    """As many questions of every benchmark, in turn: question i is of benchmark i modulo their number."""

    exams: Mapping[str, Exam]
    questions: list[Question]
    _scores: dict[tuple[str, int, str], float] = field(default_factory=dict)  # (benchmark, doc_id, response) -> score

    @property
    def benchmarks(self) -> list[str]:
        return list(self.exams)

    def prompts(self, tokenizer: Any, room: int) -> "Prompts":
        """The prompts as token ids; of those longer than `room` tokens, the end."""
        whole = tokenizer([question.prompt for question in self.questions], add_special_tokens=False).input_ids
        cut = [without_beginning(ids, room) for ids in whole]
        return Prompts([ids for ids, _ in cut], [count for _, count in cut])

    def cut_in_words(self, prompts: "Prompts", room: int) -> list[str]:
        cuts = {name: prompts.cuts[place :: len(self.exams)] for place, name in enumerate(self.exams)}
        return [said for name, cuts_of in cuts.items() if (said := cut_in_words(name, cuts_of, room))]

    def score(self, responses: Sequence[str]) -> list[float]:
        """The accuracy of each question's response, 0 or 1; a response is scored once, however often it comes."""
        for name, exam in self.exams.items():
            new = {
                question.doc_id: response
                for question, response in zip(self.questions, responses, strict=True)
                if question.benchmark == name and (name, question.doc_id, response) not in self._scores
            }
            if new:
                answers = {number: LoggedAnswer(number, response) for number, response in new.items()}
                scored = evaluate(exam.only(new), answers)
                for answer, correct in zip(scored.answers, scored.correct, strict=True):
                    self._scores[name, answer.doc_id, answer.response] = correct
        return [
            self._scores[question.benchmark, question.doc_id, response]
            for question, response in zip(self.questions, responses, strict=True)
        ]

    def fingerprint(self) -> str:
        """Sixteen hexadecimal digits over the prompts and all that decides their scores."""
        tasks = {name: exam.fingerprint for name, exam in self.exams.items()}
        content = json.dumps([tasks, [vars(question) for question in self.questions]], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]


def ask(names: Sequence[str], count: int, tokenizer: Any, data_dir: Path | None = None) -> Questions:
    """`count` questions from all the benchmarks alike, in a tokenizer's chat template.

    Raises:
        UserError: the count is no multiple of the number of benchmarks, or a benchmark has fewer questions.
    """
    each = per_benchmark(count, names)
    exams = {name: prepare(benchmark(name), data_dir).first(each) for name in names}
    for name, exam in exams.items():
        if len(exam.asked()) < each:
            raise UserError(f"{name} has {len(exam.asked())} questions, not {each}", fix="ask fewer prompts")
    prompts = {name: prompts_of(exam, tokenizer) for name, exam in exams.items()}
    in_turn = zip(*[exam.asked() for exam in exams.values()], strict=True)
    questions = [
        Question(name, number, prompts[name][number])
        for numbers in in_turn
        for name, number in zip(exams, numbers, strict=True)
    ]
    return Questions(exams, questions)


class Prompts(NamedTuple):
    ids: list[list[int]]
    cuts: list[int]  # of each, the tokens that the context had no room for


def per_benchmark(count: int, names: Sequence[str]) -> int:
    """How many of `count` questions fall to each benchmark; `UserError` where they cannot be shared alike."""
    each, rest = divmod(count, len(names))
    if rest or not each:
        raise UserError(
            f"{count} prompts cannot be shared by {len(names)} benchmarks alike", fix=f"ask a multiple of {len(names)}"
        )
    return each


def prompts_of(exam: Exam, tokenizer: Any) -> dict[int, str]:
    """Number of a question -> its prompt, in a tokenizer's chat template."""
    prompts, answers = dict[int, str](), dict[int, LoggedAnswer]()

    def note(requests: Mapping[int, Instance]) -> None:
        for number, request in requests.items():
            prompts[number], answers[number] = request.args[0], LoggedAnswer(number, "")

    evaluate(exam, answers, tokenizer, note)
    return prompts
