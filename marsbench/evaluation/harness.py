"""Evaluating a checkpoint with lm-eval, whose tasks make the prompts and score; answers are logged as they come."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from lm_eval import evaluate as lm_eval_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM

from marsbench.answering import Answering
from marsbench.decoding.generation import Generation, Request
from marsbench.errors import UserError
from marsbench.evaluation.answers import cut_text
from marsbench.evaluation.benchmarks import Benchmark, load_tasks, question_numbers
from marsbench.evaluation.benchmarks import fingerprint as fingerprint_of
from marsbench.forward.limits import room_for_prompt
from marsbench.json_lines import Log
from marsbench.keys import content_hash
from marsbench.progress import Counted


@dataclass(frozen=True)
class Exam:
    """A benchmark's questions that are asked: a number is a row of its data, a place an index in an lm-eval task."""

    benchmark: Benchmark
    tasks: Mapping[str, Any]  # by lm-eval's name
    numbers: Mapping[str, Sequence[int]]  # of all questions of each task
    places: Mapping[str, Sequence[int]]  # of the questions that are asked, ascending; tasks without any are left out

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """All that decides answers and scores: for it, every document is read."""
        return fingerprint_of(self.tasks)

    def question_numbers(self) -> list[int]:
        return sorted(self.numbers[task][place] for task, places in self.places.items() for place in places)

    def number(self, task: str, nth: int) -> int:
        return self.numbers[task][self.places[task][nth]]

    def first(self, limit: int | None) -> "Exam":
        """So many questions, as evenly from all subtasks as can be, each one's first; None = all."""
        in_turn = sorted((nth, task) for task, places in self.places.items() for nth in range(len(places)))
        return self.only(self.number(task, nth) for nth, task in in_turn[:limit])

    def shard(self, number: int, of: int) -> "Exam":
        """One of so many parts, counted from 1."""
        if not (part := self.question_numbers()[number - 1 :: of]) and of > 1:
            what = f"{self.benchmark.name}: part {number} of {of} has no question"
            raise UserError(what, fix=f"{len(self.question_numbers()):,} are asked: choose fewer parts")
        return self.only(part)

    def only(self, wanted: Iterable[int]) -> "Exam":
        """Those of the questions whose number is among the wanted ones."""
        wanted = set(wanted)
        places = {
            task: [place for place in places if self.numbers[task][place] in wanted]
            for task, places in self.places.items()
        }
        return replace(self, places={task: kept for task, kept in places.items() if kept})


def prepare(benchmark: Benchmark, data_dir: Path | None = None) -> Exam:
    tasks = load_tasks(benchmark, data_dir)
    numbers = question_numbers(benchmark, tasks)
    return Exam(benchmark, tasks, numbers, {task: range(len(known)) for task, known in numbers.items()})


@dataclass(frozen=True)
class LoggedAnswer:
    doc_id: int  # the question's number
    response: str
    emitted: int = 0  # tokens, an emitted EOS counted once
    forwards: int = 0
    finished: bool = True  # ended with EOS
    target: str = ""  # what the task expects
    prompt_cut: int = 0  # tokens of the prompt that were left out, for want of room in the context
    digest: str = ""  # of its tokens, see `digest_of`; empty in logs of before there were any


@dataclass(frozen=True)
class Scored:
    """Answers in the order of their questions' numbers, with each score: 0 or 1, or a list of these for its parts."""

    exam: Exam
    answers: list[LoggedAnswer]
    scores: Mapping[str, list[Any]]

    @property
    def correct(self) -> list[float]:
        return next(iter(self.scores.values()))

    @property
    def digests(self) -> list[str]:
        """What each answer's tokens hash to; none where that is not known of all."""
        hashes = [answer.digest for answer in self.answers]
        return hashes if all(hashes) else []


class AnswerLog:
    def __init__(self, *files: Path) -> None:
        """Answers are added to the first file; others have answers of other commands."""
        how: dict[str, Any] = {"what": "an answer", "mend": "remove it; it is answered again"}
        self._log, *others = [Log[LoggedAnswer](file, LoggedAnswer, **how) for file in files]
        self.answers = {answer.doc_id: answer for log in (*others, self._log) for answer in log.records()}

    def add(self, answer: LoggedAnswer) -> None:
        self.answers[answer.doc_id] = answer
        self._log.append(vars(answer))


Ask = Callable[[Mapping[int, Instance]], None]  # answers lm-eval's requests, by question number


class GeneratingLM(LM):  # type: ignore[misc]
    """A model as lm-eval asks it, with a tokenizer, or none where the prompts are not read."""

    tokenizer_name = "marsbench"  # what lm-eval keys its request cache by
    _tokenizer: Any = None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation in the tokenizer's template; without a generation prompt, its last turn is left open."""
        if self._tokenizer is None:
            return "\n".join(turn["content"] for turn in chat_history)
        how = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
        return str(self._tokenizer.apply_chat_template(chat_history, tokenize=False, **how))

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        what = "marsbench answers generation tasks only; this task asks for log-likelihoods"
        raise UserError(what, fix="choose a task whose output is generated, such as gsm8k")

    loglikelihood_rolling = loglikelihood


class _ExamModel(GeneratingLM):
    """The answers to an exam as a model of lm-eval's."""

    def __init__(self, exam: Exam, answers: Mapping[int, LoggedAnswer], tokenizer: Any, ask: Ask | None) -> None:
        super().__init__()
        self._exam, self._answers, self._tokenizer, self._ask = exam, answers, tokenizer, ask

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The answers to the requests, missing ones answered first; stop strings cut the text of all methods alike."""
        asked = [(self._exam.number(request.task_name, request.doc_id), request) for request in requests]
        if self._ask is not None:
            self._ask({number: request for number, request in asked if number not in self._answers})
        return [cut_text(self._answers[number].response, stops_of(request)) for number, request in asked]


def answer(exam: Exam, log: AnswerLog, answering: Answering, max_new_tokens: int, progress: Counted) -> Scored:
    """Have a checkpoint answer what an exam's log lacks, and score all; `progress` is told of (answers, questions)."""
    asked, tokenizer = len(exam.question_numbers()), answering.loaded.tokenizer
    room = room_for_prompt(answering.loaded.model, max_new_tokens)

    def answer_missing(requests: Mapping[int, Instance]) -> None:  # called by lm-eval, through `_ExamModel`
        todo = list(requests.items())
        progress(asked - len(todo), asked)

        def finished(index: int, done: Generation) -> None:
            (number, request), (_, cut) = todo[index], prompts[index]
            target = str(exam.tasks[request.task_name].doc_to_target(request.doc))
            text, digest, ended = answering.text(done.tokens), digest_of(done.tokens), done.finish == "eos"
            log.add(LoggedAnswer(number, text, done.emitted, done.forwards, ended, target, cut, digest))
            progress(min(len(log.answers), asked), asked)

        encoded = [tokenizer(request.args[0], add_special_tokens=False).input_ids for _, request in todo]
        prompts = [without_beginning(ids, room) for ids in encoded]
        asking = [Request(prompt, max_new_tokens, answering.threshold) for prompt, _ in prompts]
        answering.decode(asking, on_finished=finished)

    return evaluate(exam, log.answers, tokenizer, answer_missing)


def stops_of(request: Instance) -> list[str]:
    stops = request.args[1].get("until") or []
    return [stops] if isinstance(stops, str) else list(stops)


def digest_of(tokens: Sequence[int]) -> str:
    """Eight hexadecimal digits of SHA-256 over token ids: whether two answers are alike, without keeping either."""
    return content_hash(list(tokens))[:8]


def without_beginning(prompt_ids: Sequence[int], room: int) -> tuple[list[int], int]:
    """The end of a prompt that fits into `room` tokens, as lm-eval's own models cut it, and how many are left out."""
    cut = max(len(prompt_ids) - room, 0)
    return list(prompt_ids[cut:]), cut


def cut_in_words(benchmark: str, cuts: Sequence[int], room: int) -> str:
    """One line on the prompts that lost their beginnings; empty where none did."""
    lost = sum(cut > 0 for cut in cuts)
    longest = f"the context leaves {room:,} tokens for a prompt, and the longest has {room + max(cuts, default=0):,}"
    return f"{benchmark}: {lost:,} of {len(cuts):,} prompts lost their beginnings; {longest}" if lost else ""


def evaluate(exam: Exam, answers: Mapping[int, LoggedAnswer], tokenizer: Any = None, ask: Ask | None = None) -> Scored:
    """Score the answers to an exam, by question number; missing ones are added by `ask`, from templated prompts."""
    results = lm_eval_evaluate(
        _ExamModel(exam, answers, tokenizer, ask),
        {"tasks": {name: exam.tasks[name] for name in exam.places}, "groups": {}, "group_map": {}},
        samples={name: list(places) for name, places in exam.places.items()}, bootstrap_iters=0,
        apply_chat_template=True, log_samples=True,
    )  # fmt: skip
    values_of: dict[str, dict[int, Any]] = {name: {} for name in exam.benchmark.scores}
    for task, samples in results["samples"].items():
        for sample in samples:
            for name, (metric, after) in exam.benchmark.scores.items():
                if sample["filter"] == after:
                    value, number = sample[metric], exam.numbers[task][sample["doc_id"]]
                    values_of[name][number] = [*map(float, value)] if isinstance(value, list) else float(value)
    order = exam.question_numbers()
    scores = {name: [values[number] for number in order] for name, values in values_of.items()}
    return Scored(exam, [answers[number] for number in order], scores)
