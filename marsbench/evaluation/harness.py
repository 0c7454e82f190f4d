"""Evaluating a checkpoint with lm-eval: its tasks make the prompts and score, our engine answers.

Every answer is logged as soon as its row is finished. An interrupted evaluation goes on from its log, and a log can be
scored again without a model: both go through the same `score`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm_eval import evaluate as lm_eval_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM

from marsbench.decoding.engine import Method, context_length, decode
from marsbench.decoding.generation import Generation, Request
from marsbench.decoding.outside import OutsideMethod
from marsbench.evaluation.benchmarks import Benchmark
from marsbench.training.checkpoints import Loaded

# Called as answers come in: (answers so far, questions).
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Answer:
    """A logged response and what it cost."""

    doc_id: int
    response: str
    emitted: int = 0  # tokens, an emitted EOS counted once
    forwards: int = 0
    finished: bool = True  # ended with EOS


@dataclass(frozen=True)
class Scored:
    """A benchmark's answers with their scores, in the order of the questions."""

    answers: list[Answer]
    correct: list[float]


class AnswerLog:
    """The answers of one evaluation, appended to a JSON Lines file as they come."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.answers: dict[int, Answer] = {}
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists():
            self._recover()

    def add(self, answer: Answer) -> None:
        """Keep an answer; it is on disk when this returns."""
        self.answers[answer.doc_id] = answer
        with self._file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(vars(answer)) + "\n")
            stream.flush()
            os.fsync(stream.fileno())

    def _recover(self) -> None:
        """Read what an interrupted run left; a line cut short is dropped from the file too."""
        whole = 0
        for line in self._file.read_bytes().splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break
            answer = Answer(**json.loads(line))
            self.answers[answer.doc_id] = answer
            whole += len(line)
        with self._file.open("r+b") as stream:
            stream.truncate(whole)


class EngineModel(LM):  # type: ignore[misc]
    """lm-eval's view of a checkpoint that our engine decodes."""

    def __init__(
        self,
        loaded: Loaded,
        method: Method | OutsideMethod,
        log: AnswerLog,
        *,
        threshold: float | None,
        max_new_tokens: int,
        batch_size: int,
        progress: Progress,
    ) -> None:
        super().__init__()
        self._loaded, self._method, self._log = loaded, method, log
        self._threshold, self._max_new_tokens = threshold, max_new_tokens
        self._batch_size, self._progress = batch_size, progress

    @property
    def tokenizer_name(self) -> str:
        """What lm-eval keys its request cache by (we do not use that cache)."""
        return str(self._loaded.tokenizer.name_or_path)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation as the checkpoint's own template writes it."""
        return str(
            self._loaded.tokenizer.apply_chat_template(
                chat_history, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        )

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Answer every request that the log does not answer yet.

        All methods generate to EOS or the limit; the task's stop strings cut the text afterwards, so that no method
        stops by another rule than the rest.
        """
        todo = [request for request in requests if request.doc_id not in self._log.answers]
        tokenizer = self._loaded.tokenizer
        room = context_length(self._loaded.model) - self._max_new_tokens
        # A prompt that leaves no room for the answer loses its beginning, as lm-eval's own models do it.
        prompts = [tokenizer(request.args[0], add_special_tokens=False).input_ids[-room:] for request in todo]
        self._progress(len(self._log.answers), len(requests))

        def finished(index: int, generation: Generation) -> None:
            text = str(tokenizer.decode(generation.tokens, skip_special_tokens=True))
            response = _cut(text, todo[index].args[1].get("until", []))
            done = generation.finish == "eos"
            self._log.add(Answer(todo[index].doc_id, response, generation.emitted, generation.forwards, done))
            self._progress(len(self._log.answers), len(requests))

        decode(
            self._loaded.model,
            self._method,
            [Request(prompt, self._max_new_tokens, self._threshold) for prompt in prompts],
            eos_id=tokenizer.eos_token_id,
            pad_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
            batch_size=1 if isinstance(self._method, OutsideMethod) and self._method.one_row else self._batch_size,
            on_finished=finished,
        )
        return [self._log.answers[request.doc_id].response for request in requests]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """All benchmarks of the paper generate text."""
        raise TypeError("marsbench answers generation tasks only; this task asks for log-likelihoods")

    loglikelihood_rolling = loglikelihood


def evaluate(task: Any, benchmark: Benchmark, model: LM, log: AnswerLog, limit: int | None) -> Scored:
    """Have `model` answer the first `limit` questions of a task, and score the answers."""
    name = task.config.task
    results = lm_eval_evaluate(
        model,
        {"tasks": {name: task}, "groups": {}, "group_map": {}},
        limit=limit,
        bootstrap_iters=0,
        apply_chat_template=True,
        log_samples=True,
    )
    scores = {
        sample["doc_id"]: float(sample[benchmark.metric])
        for sample in results["samples"][name]
        if sample["filter"] == benchmark.filter
    }
    order = sorted(scores)
    return Scored([log.answers[doc_id] for doc_id in order], [scores[doc_id] for doc_id in order])


def task_fingerprint(task: Any) -> Mapping[str, Any]:
    """What of a task can change a score: its prompts, filters, metrics and version, as plain data."""
    fingerprint: Mapping[str, Any] = json.loads(
        json.dumps(task.config.to_dict(), default=lambda value: type(value).__name__)
    )
    return fingerprint


def _cut(text: str, stops: list[str]) -> str:
    """The text up to the first stop string."""
    ends = [text.index(stop) for stop in stops if stop and stop in text]
    return text[: min(ends)] if ends else text
