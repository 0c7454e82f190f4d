"""Measures all rows of the serving page: servers as own processes, and requests sent when they are due."""

import hashlib
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import chain
from multiprocessing import get_context
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np
import torch

from marsbench.answering import default_ids, fit
from marsbench.decoding.engine import decode
from marsbench.decoding.generation import Request
from marsbench.errors import UserError
from marsbench.keys import versions
from marsbench.line import TrainedStage
from marsbench.provenance import others_cores, provenance, warning
from marsbench.racing.course import ask
from marsbench.rows.kinds import Row, ServingRow
from marsbench.running.checkpoints import Checkpoints
from marsbench.running.run import Run, made_once
from marsbench.studies.serving import policies
from marsbench.studies.serving.load import Heard, Shot, fire
from marsbench.studies.serving.policies import AR, AT_ONCE, QUEUE, Cell, Effort, Policy, effort_at
from marsbench.training.checkpoints import load

_PERCENTILES = (0.5, 0.9, 0.99)
_ASKED = ("gsm8k", "humaneval")  # of a model that people use, as on its own page


class Targets(NamedTuple):  # the times that a user accepts, in seconds
    first_token: float = 0.0
    per_token: float = 0.0


def serving_rows(run: Run) -> list[Row]:
    """All rows. In the world, whose steps are short, one core is left for HTTP and the load generator."""
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads - 1) if run.scale.world else threads)
    try:
        return list(Bench(run).rows())
    finally:
        torch.set_num_threads(threads)


class Bench:
    """A run's checkpoint, its questions, and its servers, which start when they are needed."""

    def __init__(self, run: Run) -> None:
        self.run, self.effort = run, effort_at(run.scale)
        self.path = Checkpoints(run).path(TrainedStage.of(run.scale.stage, run.scale.block_size))
        self.loaded = load(self.path)
        names = [name for name in run.scale.benchmarks if run.scale.world or name in _ASKED]
        self.questions = ask(names, self.effort.questions, self.loaded.tokenizer, run.data_dir)
        room = int(self.loaded.model.config.max_position_embeddings) - self.effort.max_new_tokens
        self.prompts = self.questions.prompts(self.loaded.tokenizer, room).ids
        self.targets = Targets()
        self._servers: dict[bool, str] = {}

    def rows(self) -> Iterator[Row]:
        self._others = others_cores()
        self.run.reporter.say_once(warning(self._others))
        self.run.reporter.say(f"serving under load: about {self.effort.minutes():.0f} min, less what is measured")
        alone = Cell(AR, "together", 1.0, 0)
        carried: list[float] = []  # requests per second, by `ar` on a full server
        with ExitStack() as self._open:
            self._generator = self._open.enter_context(ProcessPoolExecutor(1, get_context("spawn")))
            first = self._row(alone)
            yield first
            token = first.per_token[0]
            self.targets = Targets(round(policies.FIRST_TOKEN * token, 4), round(policies.PER_TOKEN * token, 5))
            for cell in self.effort.cells():
                if cell != alone:
                    row = self._row(cell, median(carried) if carried else 0.0)
                    if (cell.policy, cell.shape, cell.load) == (AR, "together", self.effort.full):
                        carried.append(row.answered / max(row.took, 1e-9))
                    yield row

    # ---- one cell ----

    def _row(self, cell: Cell, carried: float = 0.0) -> ServingRow:
        policy, effort, targets = cell.policy, self.effort, self.targets
        shots, asked = self._shots(cell, carried)

        def lap() -> dict[str, Any]:
            self.run.reporter.say(f"{policy.name}, {cell.shape} at {cell.load:g}, repeat {cell.repeat + 1}")
            heard = self._fired(cell, shots)
            texts = _texts(heard, asked, len(self.prompts))
            hashes = [hashlib.sha256(repr(some).encode()).hexdigest()[:8] if some else "" for some in texts]
            return {
                "stage": self.run.scale.stage, "policy": policy.name, "shape": cell.shape, "load": cell.load,
                "repeat": cell.repeat, "rows": effort.rows, "queue": QUEUE,
                "seconds": effort.seconds if cell.shape == "steady" else 0.0,
                "max_new_tokens": effort.max_new_tokens, "target_first_token": targets.first_token,
                "target_per_token": targets.per_token, **summed(heard, targets),
                "right": self._right(heard, asked, texts) if effort.scored else None,
                "answers": hashes if policy.asks["method"] != "mars" else [],  # the others give those of `ar`
                "checkpoint": self.loaded.weights, "threads": torch.get_num_threads(),
                "provenance": {"others_cores": self._others},
            }  # fmt: skip

        origin = provenance(seed=self.run.seed)
        content = {
            "kind": "serving", "policy": [policy.name, policy.asks, policy.adapts],
            "cell": [cell.shape, cell.load, cell.repeat], "targets": targets, "times": [shot.at for shot in shots],
            "limits": [effort.rows, QUEUE, effort.max_new_tokens], "questions": self.questions.fingerprint(),
            "weights": self.loaded.weights, "versions": versions("decoding", "timing"),
            "machine": [origin["hardware"], origin["threads"], origin["versions"]["torch"]],
        }  # fmt: skip
        return made_once(self.run, ServingRow, content, lap)

    def _fired(self, cell: Cell, shots: list[Shot]) -> list[Heard]:
        if cell.shape == "engine":
            return self._without_http(cell.policy, [shot.body["prompt"] for shot in shots])
        url = self._server(cell.policy.adapts)
        at_once = int(cell.load) if cell.shape == "together" else None
        heard = self._generator.submit(fire, url, shots, at_once).result()
        if not any(answer.status == 200 for answer in heard):
            raise UserError("the server no longer answers", where=url, fix="give the same command again")
        return heard

    def _without_http(self, policy: Policy, prompts: list[list[int]]) -> list[Heard]:
        """The outcomes of prompts from the engine alone, as many at once as of a server."""
        loaded, chosen = self.loaded, fit(policy.asks["method"], self.loaded)
        eos_id, pad_id = default_ids(loaded)
        requests = [Request(prompt, self.effort.max_new_tokens) for prompt in prompts]
        started = time.perf_counter()
        generations = decode(loaded.model, chosen, requests, eos_id=eos_id, pad_id=pad_id, batch_size=AT_ONCE)
        seconds = time.perf_counter() - started
        heard = []
        for made in generations:
            usage = {"completion_tokens": made.emitted, "marsbench": {"forwards": made.forwards}}
            text = str(loaded.tokenizer.decode(made.tokens, skip_special_tokens=True))
            heard.append(Heard(0.0, 0.0, 200, seconds, seconds, text, usage))
        return heard

    def _shots(self, cell: Cell, carried: float) -> tuple[list[Shot], list[int]]:
        """The requests of a cell, the same ones at the same times for every policy, and which questions they ask."""
        asks_alike, every = "together" if cell.shape == "engine" else cell.shape, range(len(self.prompts))
        drawn = random.Random(f"{asks_alike} {cell.load} {cell.repeat}")
        due = arrivals(drawn, cell, carried, self.effort)
        rounds = [drawn.sample(every, len(every)) for _ in range(0, len(due), len(every))]
        asked = list(chain.from_iterable(rounds))[: len(due)]
        bodies = [self._body(cell.policy, self.prompts[question]) for question in asked]
        return [Shot(at, body) for at, body in zip(due, bodies, strict=True)], asked

    def _body(self, policy: Policy, prompt: list[int]) -> dict[str, Any]:
        return {"prompt": prompt, "max_tokens": self.effort.max_new_tokens, **policy.asks}

    def _right(self, heard: list[Heard], asked: list[int], texts: list[list[str]]) -> int:
        """How many answers are right; of each question, every text is scored once."""
        right: dict[tuple[int, str], float] = {}
        for turn in range(max(map(len, texts))):
            now = [some[turn] if turn < len(some) else "" for some in texts]
            right |= zip(enumerate(now), self.questions.score(now), strict=True)
        answered = zip(heard, asked, strict=True)
        return sum(int(right[question, answer.text]) for answer, question in answered if answer.is_whole)

    # ---- the servers ----

    def _server(self, adapts: bool) -> str:
        """The server with `--adapt`, or the one without; started and warmed up when it is first needed."""
        if adapts not in self._servers:
            options = ["--max-rows", str(self.effort.rows), *["--adapt"][:adapts]]
            url = self._servers[adapts] = self._open.enter_context(_serving(self.path, options))
            for policy in self.effort.policies:
                if policy.adapts == adapts:
                    shots = [Shot(0.0, self._body(policy, prompt)) for prompt in self.prompts[: self.effort.rows]]
                    self._generator.submit(fire, url, shots).result()
        return self._servers[adapts]


@contextmanager
def _serving(checkpoint: str, options: list[str]) -> Iterator[str]:
    """Starts `marsbench serve` as its own process; yields its address."""
    command = [sys.executable, "-m", "marsbench", "serve", "--checkpoint", checkpoint, "--port", "0"]
    limits = ["--max-queue", str(QUEUE), "--max-connections", str(QUEUE), "--threads", str(torch.get_num_threads())]
    with subprocess.Popen([*command, *limits, *options], stdout=subprocess.PIPE, text=True) as process:
        try:
            line = next((line for line in process.stdout or () if "http://" in line), "")
            if not line:
                raise UserError("the server has not started", where=checkpoint, fix="see its message above")
            yield line[line.index("http://") :].strip()
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def arrivals(drawn: random.Random, cell: Cell, carried: float, effort: Effort) -> list[float]:
    """When the requests of a cell are due, in seconds: Poisson arrivals, or 0 where the next follows an answer."""
    if cell.shape in ("together", "engine"):
        return [0.0] * effort.requests[int(cell.load)]
    times, at = [], drawn.expovariate(cell.load * carried)
    while at < effort.seconds:
        times.append(round(at, 5))
        at += drawn.expovariate(cell.load * carried)
    return times or [0.0]


def summed(heard: Sequence[Heard], targets: Targets) -> dict[str, Any]:
    whole = [answer for answer in heard if answer.is_whole]
    emitted = [answer.usage["completion_tokens"] for answer in whole]
    own = [answer.usage["marsbench"] for answer in whole]
    first = [answer.first - answer.due for answer in whole]
    last = [answer.last - answer.due for answer in whole]
    each = [(answer.last - answer.first) / max(count - 1, 1) for answer, count in zip(whole, emitted, strict=True)]
    longer = [seconds for seconds, count in zip(each, emitted, strict=True) if count > 1]
    good = [a <= targets.first_token and b <= targets.per_token for a, b in zip(first, each, strict=True)]
    lowest = [1.0 if said.get("lossless", True) else said["threshold"][0] for said in own]
    return {
        "requests": len(heard), "answered": len(whole), "good": sum(good),
        "took": round(max((answer.last for answer in whole), default=0.0), 5),
        "waited": round(sum(last), 5), "emitted": sum(emitted), "forwards": sum(said["forwards"] for said in own),
        "tau": round(fmean(lowest), 5) if lowest else 1.0, "first_token": _percentiles(first),
        "per_token": _percentiles(longer), "whole": _percentiles(last),
        "lag": _percentiles([answer.lag for answer in heard]),
    }  # fmt: skip


def _percentiles(values: Sequence[float]) -> list[float]:
    return [round(float(value), 6) for value in np.quantile(values, _PERCENTILES)] if values else []


def _texts(heard: Sequence[Heard], asked: Sequence[int], questions: int) -> list[list[str]]:
    """Of each question, the different texts that it was answered by."""
    known = {(question, answer.text) for answer, question in zip(heard, asked, strict=True) if answer.is_whole}
    return [sorted(text for of, text in known if of == question) for question in range(questions)]
