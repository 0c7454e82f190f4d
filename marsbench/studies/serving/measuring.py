"""All rows of the page of serving: servers in processes of their own, and requests sent to them when they are due."""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np
import torch

from marsbench.decoding.engine import decode
from marsbench.decoding.generation import Request
from marsbench.errors import UserError
from marsbench.keys import content_hash, versions
from marsbench.methods.fitting import default_ids, fit
from marsbench.neighbours import Watch, cores, read_clocks_of_all, warning
from marsbench.presets import Preset
from marsbench.provenance import provenance
from marsbench.racing.questions import Questions, ask
from marsbench.rows.kinds import Row, ServingRow
from marsbench.running.checkpoints import Checkpoints
from marsbench.running.plans import TrainedStage
from marsbench.running.run import Run
from marsbench.studies.serving.findings import requests_per_second
from marsbench.studies.serving.load import Generator, Heard, Outcome, Shot, Volley
from marsbench.studies.serving.policies import (
    AR,
    AT_ONCE,
    FIRST_TOKEN,
    LOW,
    PER_TOKEN,
    QUEUE,
    Cell,
    Effort,
    Policy,
    effort_at,
)
from marsbench.training.checkpoints import Loaded, load

_WATCH_S = 0.1  # between two looks at the server's state, in a step
_PERCENTILES = (0.5, 0.9, 0.99)
_ASKED = ("gsm8k", "humaneval")  # of a model that people use, as on its own page


class Targets(NamedTuple):
    """What a user waits for gladly, in seconds."""

    first_token: float = 0.0
    per_token: float = 0.0


def serving_rows(run: Run) -> list[Row]:
    with _cores_left(run.scale):
        return list(Bench(run).rows())


@contextmanager
def _cores_left(scale: Preset) -> Iterator[None]:
    """Leave a core to HTTP and the load generator, where there are several and a step is over in no time.

    The engine alone and the one behind HTTP get as many threads: they wait for one another, and all of them stand still
    where one has to share its core. A step of a model that people use takes so long that what HTTP does beside it is
    little.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads - 1) if scale.world else threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Bench:
    """A run's checkpoint, its questions, and the servers that are started as far as they are needed."""

    def __init__(self, run: Run) -> None:
        self.run, self.effort = run, effort_at(run.scale)
        self.path = Checkpoints(run).path(TrainedStage.of(run.scale.stage))
        self.targets = Targets()
        self._servers: dict[bool, _Server] = {}

    @cached_property
    def loaded(self) -> Loaded:
        return load(self.path)

    @cached_property
    def questions(self) -> Questions:
        names = [name for name in self.run.scale.benchmarks if self.run.scale.world or name in _ASKED]
        return ask(names, self.effort.questions, self.loaded.tokenizer, self.run.data_dir)

    @cached_property
    def prompts(self) -> list[list[int]]:
        room = int(self.loaded.model.config.max_position_embeddings) - self.effort.max_new_tokens
        return self.questions.prompts(self.loaded.tokenizer, room).ids

    def rows(self) -> Iterator[Row]:
        """Cell by cell; what is on disk already is not measured again."""
        self.run.reporter.say_once(warning())
        minutes = self.effort.minutes()
        self.run.reporter.say(f"serving under load: about {minutes:.0f} min, less what is there already")
        alone = Cell(AR, "together", 1.0, 0)
        carried: list[float] = []  # requests per second, by `ar` on a full server
        with Generator() as generator, self._serving():
            first = self._row(generator, alone)
            yield first
            token = first.per_token[0]
            self.targets = Targets(round(FIRST_TOKEN * token, 4), round(PER_TOKEN * token, 5))
            for cell in self.effort.cells():
                if cell == alone:
                    continue
                row = self._row(generator, cell, median(carried) if carried else 0.0)
                if (cell.policy, cell.shape, cell.load) == (AR, "together", self.effort.full):
                    carried.append(requests_per_second(row))
                yield row

    # ---- one cell ----

    def _row(self, generator: Generator, cell: Cell, carried: float = 0.0) -> ServingRow:
        shots, asked = self._shots(cell, carried)
        key = self._key(cell, [shot.at for shot in shots])
        what = f"{cell.policy.name}, {cell.shape} at {cell.load:g}"
        known = self.run.existing_row(key, ServingRow, what)
        if known is not None:
            return known
        self.run.reporter.say(f"{what}, repeat {cell.repeat + 1}")
        watch = Watch(read_clocks_of_all)
        if cell.shape == "engine":
            outcome = Outcome(self._without_http(cell.policy, [shot.body["prompt"] for shot in shots]), [])
        else:
            server = self._server(generator, cell.policy.adapts)
            every = _WATCH_S if cell.shape == "step" else None
            at_once = int(cell.load) if cell.shape == "together" else None
            outcome = generator.fire(Volley(server.url, shots, at_once, every))
            if not any(heard.status == 200 for heard in outcome.heard):
                raise UserError("the server answers nobody any more", where=server.url, fix="measure what is left anew")
        others = cores([watch.used()])
        row = ServingRow(
            key=key, status="done", reason="", scale=self.run.scale.scale, stage=self.run.scale.stage,
            policy=cell.policy.name, shape=cell.shape, load=cell.load, repeat=cell.repeat, rows=self.effort.rows,
            queue=QUEUE, seconds={"steady": 1.0, "step": 3.0}.get(cell.shape, 0.0) * self.effort.seconds,
            max_new_tokens=self.effort.max_new_tokens, target_first_token=self.targets.first_token,
            target_per_token=self.targets.per_token, **summed(outcome.heard, self.targets),
            right=sum(self._scores(outcome.heard, asked)) if self.effort.scored else None,
            answers=_answers(outcome.heard, asked, len(self.prompts)) if cell.policy.lossless else [],
            timeline=_timeline(outcome), checkpoint=self.loaded.weights, provenance=provenance(seed=self.run.seed),
            others_cores=[] if others is None else [others], threads=torch.get_num_threads(),
        )  # fmt: skip
        self.run.keep(row)
        return row

    def _without_http(self, policy: Policy, prompts: list[list[int]]) -> list[Heard]:
        """What comes of prompts when nothing but the engine is asked, as many at once as of a server."""
        loaded, limit = self.loaded, self.effort.max_new_tokens
        eos_id, pad_id = default_ids(loaded)
        chosen = fit(policy.asks["method"], loaded)
        started = time.perf_counter()
        found = decode(
            loaded.model, chosen, [Request(prompt, limit) for prompt in prompts], eos_id=eos_id, pad_id=pad_id,
            batch_size=AT_ONCE,
        )  # fmt: skip
        seconds = time.perf_counter() - started
        texts = loaded.tokenizer.batch_decode([one.tokens for one in found], skip_special_tokens=True)
        return [
            Heard(0.0, 0.0, 200, seconds, seconds, text, {
                "completion_tokens": one.emitted, "marsbench": {"forwards": one.forwards},
            })
            for one, text in zip(found, texts, strict=True)
        ]  # fmt: skip

    def _shots(self, cell: Cell, carried: float) -> tuple[list[Shot], list[int]]:
        """The requests of a cell, the same ones at the same times for every policy, and which questions they ask."""
        asks_alike = "together" if cell.shape == "engine" else cell.shape
        drawn = random.Random(f"{asks_alike} {cell.load} {cell.repeat}")
        due = arrivals(drawn, cell, carried, self.effort)
        every = range(len(self.prompts))
        asked = [one for _ in range(0, len(due), len(every)) for one in drawn.sample(every, len(every))][: len(due)]
        bodies = [self._body(cell.policy, self.prompts[one]) for one in asked]
        return [Shot(at, body) for at, body in zip(due, bodies, strict=True)], asked

    def _body(self, policy: Policy, prompt: list[int]) -> dict[str, Any]:
        return {"prompt": prompt, "max_tokens": self.effort.max_new_tokens, **policy.asks}

    def _key(self, cell: Cell, due: list[float]) -> str:
        origin = provenance(seed=self.run.seed)
        machine = [origin["hardware"], origin["threads"], origin["versions"]["torch"]]
        return content_hash({
            "kind": "serving", "policy": [cell.policy.name, cell.policy.asks, cell.policy.adapts],
            "cell": [cell.shape, cell.load, cell.repeat], "targets": self.targets, "times": due,
            "limits": [self.effort.rows, QUEUE, self.effort.max_new_tokens], "questions": self.questions.fingerprint(),
            "weights": self.loaded.weights, "machine": machine, "versions": versions("decoding", "timing"),
        })  # fmt: skip

    def _scores(self, heard: list[Heard], asked: list[int]) -> list[int]:
        """Which answers are right; of each question, every answer that differs from the others is scored once."""
        texts: dict[int, list[str]] = {}
        for one, question in zip(heard, asked, strict=True):
            known = texts.setdefault(question, [""])
            if one.text not in known:
                known.append(one.text)
        right: dict[tuple[int, str], float] = {}
        for turn in range(max(map(len, texts.values()), default=0)):
            now = [texts.get(question, [""])[turn:][:1] or [""] for question in range(len(self.prompts))]
            for question, score in enumerate(self.questions.score([text for (text,) in now])):
                right[question, now[question][0]] = score
        return [int(right[question, one.text]) for one, question in zip(heard, asked, strict=True) if is_whole(one)]

    # ---- the servers ----

    @contextmanager
    def _serving(self) -> Iterator[None]:
        try:
            yield
        finally:
            for server in self._servers.values():
                server.end()

    def _server(self, generator: Generator, adapts: bool) -> _Server:
        """The server of policies that adapt, or of those that do not; started and warmed up when it is first needed."""
        if adapts not in self._servers:
            options, targets = ["--max-rows", str(self.effort.rows)], self.targets
            if adapts:
                log = self.run.workspace.runs / "serving" / "decisions.jsonl"
                log.parent.mkdir(parents=True, exist_ok=True)
                options += ["--adapt", "--decision-log", str(log)]
                options += ["--target-ms-per-token", f"{1000 * targets.per_token:g}"]
                options += ["--target-first-token-ms", f"{1000 * targets.first_token:g}"]
            server = self._servers[adapts] = _Server(self.path, options)
            for policy in self.effort.policies:
                if policy.adapts == adapts:
                    shots = [Shot(0.0, self._body(policy, prompt)) for prompt in self.prompts[: self.effort.rows]]
                    generator.fire(Volley(server.url, shots))
        return self._servers[adapts]


class _Server:
    """`marsbench serve` in a process of its own."""

    def __init__(self, checkpoint: str, options: list[str]) -> None:
        command = [sys.executable, "-m", "marsbench", "serve", "--checkpoint", checkpoint, "--port", "0"]
        limits = ["--max-queue", str(QUEUE), "--max-connections", str(QUEUE)]
        limits += ["--threads", str(torch.get_num_threads())]
        self._process = subprocess.Popen([*command, *limits, *options], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if "http://" in line:
                self.url = line[line.index("http://") :].strip()
                return
        raise UserError("the server has not started", where=str(Path(checkpoint)), fix="see its message above")

    def end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()


def arrivals(drawn: random.Random, cell: Cell, carried: float, effort: Effort) -> list[float]:
    """When the requests of a cell are due, in seconds: Poisson arrivals, or 0 where the next follows an answer."""
    if cell.shape in ("together", "engine"):
        return [0.0] * effort.requests[int(cell.load)]
    loads = [LOW, cell.load, LOW] if cell.shape == "step" else [cell.load]
    found = []
    for number, load_ in enumerate(loads):
        at = drawn.expovariate(load_ * carried)
        while at < effort.seconds:
            found.append(round(number * effort.seconds + at, 5))
            at += drawn.expovariate(load_ * carried)
    return found or [0.0]


def is_whole(one: Heard) -> bool:
    """Whether a request was answered to the end."""
    return one.status == 200 and bool(one.usage.get("completion_tokens"))


def summed(heard: Sequence[Heard], targets: Targets) -> dict[str, Any]:
    """What a row keeps of a lap."""
    whole = [one for one in heard if is_whole(one)]
    emitted = [one.usage["completion_tokens"] for one in whole]
    own = [one.usage["marsbench"] for one in whole]
    first = [one.first - one.due for one in whole]
    last = [one.last - one.due for one in whole]
    each = [(one.last - one.first) / max(count - 1, 1) for one, count in zip(whole, emitted, strict=True)]
    longer = [seconds for seconds, count in zip(each, emitted, strict=True) if count > 1]
    good = [a <= targets.first_token and b <= targets.per_token for a, b in zip(first, each, strict=True)]
    lowest = [1.0 if one.get("lossless", True) else one["threshold"][0] for one in own]
    return {
        "requests": len(heard), "answered": len(whole), "good": sum(good), "took": round(max(
            (one.last for one in whole), default=0.0), 5),
        "waited": round(sum(last), 5), "emitted": sum(emitted), "forwards": sum(one["forwards"] for one in own),
        "tau": round(fmean(lowest), 5) if lowest else 1.0, "first_token": _percentiles(first),
        "per_token": _percentiles(longer), "whole": _percentiles(last), "lag": _percentiles([one.lag for one in heard]),
    }  # fmt: skip


def _percentiles(values: Sequence[float]) -> list[float]:
    return [round(float(one), 6) for one in np.quantile(values, _PERCENTILES)] if values else []


def _answers(heard: Sequence[Heard], asked: Sequence[int], questions: int) -> list[str]:
    """Of each question, a hash of the different texts that it was answered by; empty where it was not."""
    texts: list[set[str]] = [set() for _ in range(questions)]
    for one, question in zip(heard, asked, strict=True):
        if is_whole(one):
            texts[question].add(one.text)
    return [hashlib.sha256(repr(sorted(some)).encode()).hexdigest()[:8] if some else "" for some in texts]


def _timeline(outcome: Outcome) -> dict[str, list[float]]:
    if not outcome.states:
        return {}
    states = [(at, found["state"]) for at, found in outcome.states]
    return {
        "at": [round(at, 3) for at, _ in states],
        "running": [state["running"] for _, state in states],
        "waiting": [state["queued"] for _, state in states],
        "tau": [1.0 if state["threshold"] is None else round(state["threshold"], 4) for _, state in states],
        "window": [round(state["window"], 3) for _, state in states],
        "relief": [state["relief"] for _, state in states],
    }
