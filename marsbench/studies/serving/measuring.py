"""All rows of the page of serving: servers in processes of their own, and requests sent to them when they are due."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from marsbench.decoding.engine import decode
from marsbench.decoding.generation import Request
from marsbench.errors import UserError
from marsbench.keys import content_hash, versions
from marsbench.methods.fitting import default_ids, fit
from marsbench.neighbours import Watch, cores, read_clocks_of_all, warning
from marsbench.provenance import provenance
from marsbench.racing.questions import Questions, ask
from marsbench.rows.kinds import Row, ServingRow
from marsbench.running.checkpoints import Checkpoints
from marsbench.running.run import Run
from marsbench.studies.serving.findings import per_token, requests_per_second
from marsbench.studies.serving.load import Generator, Heard, Outcome, Shot, Volley
from marsbench.studies.serving.policies import (
    AR,
    AT_ONCE,
    BARE,
    FIRST_TOKEN,
    HIGH,
    LOW,
    PER_TOKEN,
    POLICIES,
    QUEUE,
    ROWS,
    STAGE,
    STEPPED,
    Effort,
    Policy,
    effort_at,
)
from marsbench.training.checkpoints import Loaded, load

_WATCH_S = 0.1  # between two looks at the server's state, in a step


class Cell(NamedTuple):
    """One policy under one load, once."""

    policy: Policy
    shape: str
    load: float
    repeat: int


class Targets(NamedTuple):
    """What a user waits for gladly, in seconds."""

    first_token: float = 0.0
    per_token: float = 0.0


def serving_rows(run: Run) -> list[Row]:
    with _cores_left():
        return list(Bench(run).rows())


@contextmanager
def _cores_left() -> Iterator[None]:
    """Leave a core to HTTP and the load generator, where there are several.

    The engine alone and the one behind HTTP get as many threads: they wait for one another, and all of them stand still
    where one has to share its core.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads - 1))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Bench:
    """A run's checkpoint, its questions, and the servers that are started as far as they are needed."""

    def __init__(self, run: Run) -> None:
        self.run, self.effort = run, effort_at(run.scale)
        self.path = Checkpoints(run).path(STAGE, 4)
        self._servers: dict[bool, _Server] = {}

    @cached_property
    def loaded(self) -> Loaded:
        return load(self.path)

    @cached_property
    def questions(self) -> Questions:
        return ask(self.run.scale.benchmarks, self.effort.questions, self.loaded.tokenizer, self.run.data_dir)

    @cached_property
    def prompts(self) -> list[list[int]]:
        room = int(self.loaded.model.config.max_position_embeddings) - self.effort.max_new_tokens
        return self.questions.prompts(self.loaded.tokenizer, room).ids

    def rows(self) -> Iterator[Row]:
        """Cell by cell; what is on disk already is not measured again."""
        effort = self.effort
        self.run.reporter.say_once(warning())
        self.run.reporter.say(f"serving under load: about {effort.minutes():.0f} min, less what is there already")
        with Generator() as generator, self._serving():
            alone = self._row(generator, Cell(AR, "alone", 0.0, 0), Targets())
            yield alone
            token = median(per_token(alone))
            targets = Targets(round(FIRST_TOKEN * token, 4), round(PER_TOKEN * token, 5))
            bursts = [
                self._row(generator, Cell(policy, "burst", 0.0, repeat), targets)
                for repeat in range(effort.repeats)
                for policy in self._in_some_order(POLICIES, "burst", repeat)
            ]
            yield from bursts
            for repeat in range(effort.repeats):
                for policy in BARE:  # in turn, with and without HTTP
                    yield self._row(generator, Cell(policy, "http", 0.0, repeat), targets)
                    yield self._row(generator, Cell(policy, "engine", 0.0, repeat), targets)
            carried = median(requests_per_second(row) for row in bursts if row.policy == AR.name)
            for repeat in range(effort.repeats):
                for load_ in effort.loads:
                    for policy in self._in_some_order(POLICIES, load_, repeat):
                        yield self._row(generator, Cell(policy, "steady", load_, repeat), targets, carried)
            for policy in STEPPED:
                yield self._row(generator, Cell(policy, "step", HIGH, 0), targets, carried)

    @staticmethod
    def _in_some_order(policies: tuple[Policy, ...], *of: Any) -> list[Policy]:
        """All policies, in an order that changes from place to place, so that no one always follows the same other."""
        return random.Random(str(of)).sample(policies, len(policies))

    # ---- one cell ----

    def _row(self, generator: Generator, cell: Cell, targets: Targets, carried: float = 0.0) -> ServingRow:
        shots, asked = self._shots(cell, carried)
        key = self._key(cell, targets, [shot.at for shot in shots])
        what = f"{cell.policy.name}, {cell.shape} at load {cell.load:g}"
        known = self.run.existing_row(key, ServingRow, what)
        if known is not None:
            return known
        self.run.reporter.say(f"{what}, repeat {cell.repeat + 1}")
        watch = Watch(read_clocks_of_all)
        if cell.shape == "engine":
            outcome = Outcome(self._without_http(cell.policy, [shot.body["prompt"] for shot in shots]), [])
        else:
            server = self._server(generator, cell.policy.adapts, targets)
            every = _WATCH_S if cell.shape == "step" else None
            at_once = AT_ONCE if cell.shape == "http" else None
            outcome = generator.fire(Volley(server.url, shots, cell.shape == "alone", at_once, every))
            if not any(heard.status == 200 for heard in outcome.heard):
                raise UserError("the server answers nobody any more", where=server.url, fix="measure what is left anew")
        others = cores([watch.used()])
        row = ServingRow(
            key=key, status="done", reason="", scale=self.run.scale.scale, stage=STAGE, policy=cell.policy.name,
            shape=cell.shape, load=cell.load, repeat=cell.repeat, rows=ROWS, queue=QUEUE,
            seconds=self._seconds(cell), max_new_tokens=self.effort.max_new_tokens,
            target_first_token=targets.first_token, target_per_token=targets.per_token, questions=asked,
            **self._heard(shots, outcome, asked), timeline=_timeline(outcome),
            checkpoint=self.loaded.weights, provenance=provenance(seed=self.run.seed),
            others_cores=[] if others is None else [others], threads=torch.get_num_threads(),
        )  # fmt: skip
        self.run.keep(row)
        return row

    def _without_http(self, policy: Policy, prompts: list[list[int]]) -> list[Heard]:
        """What comes of prompts when nothing but the engine is asked, as many at once as of a server."""
        loaded, limit = self.loaded, self.effort.max_new_tokens
        eos_id, pad_id = default_ids(loaded)
        threshold = policy.asks.get("threshold")
        chosen = fit(policy.asks["method"], loaded, block_size=policy.asks.get("block_size", 4))
        requests = [Request(prompt, limit, threshold) for prompt in prompts]
        started = time.perf_counter()
        found = decode(loaded.model, chosen, requests, eos_id=eos_id, pad_id=pad_id, batch_size=AT_ONCE)
        seconds = time.perf_counter() - started
        texts = loaded.tokenizer.batch_decode([one.tokens for one in found], skip_special_tokens=True)
        return [
            Heard(0.0, 200, seconds, seconds, text, {
                "completion_tokens": one.emitted,
                "marsbench": {"forwards": one.forwards, "lossless": threshold is None, "threshold": [threshold]},
            })
            for one, text in zip(found, texts, strict=True)
        ]  # fmt: skip

    def _seconds(self, cell: Cell) -> float:
        return {"steady": 1.0, "step": 3.0}.get(cell.shape, 0.0) * self.effort.seconds

    def _shots(self, cell: Cell, carried: float) -> tuple[list[Shot], list[int]]:
        """The requests of a cell, the same ones at the same times for every policy, and which questions they ask."""
        asks_alike = "http" if cell.shape == "engine" else cell.shape
        drawn = random.Random(f"{asks_alike} {cell.load} {cell.repeat}")
        times = _times(drawn, cell, carried, self.effort)
        asked = [drawn.randrange(len(self.prompts)) for _ in times]
        bodies = [self._body(cell.policy, self.prompts[one]) for one in asked]
        return [Shot(at, body) for at, body in zip(times, bodies, strict=True)], asked

    def _body(self, policy: Policy, prompt: list[int]) -> dict[str, Any]:
        return {"prompt": prompt, "max_tokens": self.effort.max_new_tokens, **policy.asks}

    def _key(self, cell: Cell, targets: Targets, times: list[float]) -> str:
        origin = provenance(seed=self.run.seed)
        machine = [origin["hardware"], origin["threads"], origin["versions"]["torch"]]
        return content_hash({
            "kind": "serving", "policy": [cell.policy.name, cell.policy.asks, cell.policy.adapts],
            "cell": [cell.shape, cell.load, cell.repeat], "targets": targets, "times": times,
            "limits": [ROWS, QUEUE, self.effort.max_new_tokens], "questions": self.questions.fingerprint(),
            "weights": self.loaded.weights, "machine": machine, "versions": versions("decoding", "timing"),
        })  # fmt: skip

    def _heard(self, shots: list[Shot], outcome: Outcome, asked: list[int]) -> dict[str, Any]:
        heard = outcome.heard
        own = [one.usage.get("marsbench", {}) for one in heard]
        return {
            "intended": [round(shot.at, 4) for shot in shots],
            "lag": [round(one.lag, 5) for one in heard],
            "status_codes": [one.status for one in heard],
            "first": [round(one.first, 5) for one in heard],
            "last": [round(one.last, 5) for one in heard],
            "emitted": [one.usage.get("completion_tokens", 0) for one in heard],
            "forwards": [one.get("forwards", 0) for one in own],
            "lowest": [1.0 if one.get("lossless", True) else one["threshold"][0] for one in own],
            "correct": self._scores(heard, asked),
        }

    def _scores(self, heard: list[Heard], asked: list[int]) -> list[float]:
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
        return [right[question, one.text] for one, question in zip(heard, asked, strict=True)]

    # ---- the servers ----

    @contextmanager
    def _serving(self) -> Iterator[None]:
        try:
            yield
        finally:
            for server in self._servers.values():
                server.end()

    def _server(self, generator: Generator, adapts: bool, targets: Targets) -> _Server:
        """The server of policies that adapt, or of those that do not; started and warmed up when it is first needed."""
        if adapts not in self._servers:
            options = []
            if adapts:
                log = self.run.workspace.runs / "serving" / "decisions.jsonl"
                log.parent.mkdir(parents=True, exist_ok=True)
                options = ["--adapt", "--decision-log", str(log)]
                options += ["--target-ms-per-token", f"{1000 * targets.per_token:g}"]
                options += ["--target-first-token-ms", f"{1000 * targets.first_token:g}"]
            server = self._servers[adapts] = _Server(self.path, options)
            for policy in POLICIES:
                if policy.adapts == adapts:
                    shots = [Shot(0.0, self._body(policy, prompt)) for prompt in self.prompts[:ROWS]]
                    generator.fire(Volley(server.url, shots))
        return self._servers[adapts]


class _Server:
    """`marsbench serve` in a process of its own."""

    def __init__(self, checkpoint: str, options: list[str]) -> None:
        command = [sys.executable, "-m", "marsbench", "serve", "--checkpoint", checkpoint, "--port", "0"]
        limits = ["--max-rows", str(ROWS), "--max-queue", str(QUEUE), "--threads", str(torch.get_num_threads())]
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


def _times(drawn: random.Random, cell: Cell, carried: float, effort: Effort) -> list[float]:
    """When the requests of a cell are due: Poisson arrivals, or all at once, or as the one before is answered."""
    if cell.shape == "burst":
        return [0.0] * effort.burst
    if cell.shape == "alone":
        return [0.0] * effort.alone
    if cell.shape in ("http", "engine"):
        return [0.0] * effort.bare
    loads = [LOW, cell.load, LOW] if cell.shape == "step" else [cell.load]
    times = []
    for number, load_ in enumerate(loads):
        at = drawn.expovariate(load_ * carried)
        while at < effort.seconds:
            times.append(round(number * effort.seconds + at, 5))
            at += drawn.expovariate(load_ * carried)
    return times or [0.0]


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
