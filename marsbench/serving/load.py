"""A load generator in a process of its own: requests go out when they are due, whatever became of earlier ones.

Times count from when a request was due, so that a slow server cannot hide behind a client that waits for it (an open
loop); how late each was sent is the generator's own lag, and said beside the server's times.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

_LEAD_S = 0.05  # before the first request is due
_GIVE_UP_S = 120.0  # on one answer


@dataclass(frozen=True)
class Shot:
    """A request, and when it is due: seconds after the first."""

    at: float
    body: dict[str, Any]


@dataclass
class Heard:
    """What came of it; times are seconds after the first request was due, 0 where nothing came."""

    lag: float = 0.0
    status: int = 0
    first: float = 0.0
    last: float = 0.0
    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Volley:
    """All requests of one measurement."""

    url: str
    shots: Sequence[Shot]
    one_by_one: bool = False  # wait for every answer before the next request goes out; times are then each one's own
    at_once: int | None = None  # requests in flight at most; the others wait, which is no lag
    watch_every: float | None = None  # how often the server's state is asked for meanwhile, in seconds


@dataclass
class Outcome:
    """What came of them, in their order, and the server's states: seconds, and the body of `GET /v1/speed`."""

    heard: list[Heard]
    states: list[tuple[float, dict[str, Any]]]


class Generator:
    """The process, for the time of a `with` block."""

    def __enter__(self) -> Generator:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True, name="marsbench load")
        self._process.start()
        theirs.close()
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.join(10)
        self._process.kill()

    def fire(self, volley: Volley) -> Outcome:
        """Send all requests, and wait for what comes of them."""
        self._pipe.send(volley)
        found: Outcome = self._pipe.recv()
        return found


def _serve(pipe: Connection) -> None:
    try:
        while True:
            pipe.send(asyncio.run(_fire(pipe.recv())))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        return


async def _fire(volley: Volley) -> Outcome:
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=_GIVE_UP_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(volley.url, timeout=timeout, connector=connector) as session:
        started = time.perf_counter() + _LEAD_S
        outcome = Outcome([Heard() for _ in volley.shots], [])
        watch = asyncio.create_task(_watch(session, volley.watch_every, started, outcome.states))
        seats = asyncio.Semaphore(volley.at_once or len(volley.shots))
        tasks = []
        for shot, heard in zip(volley.shots, outcome.heard, strict=True):
            due = started if volley.one_by_one else started + shot.at
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            await seats.acquire()
            tasks.append(asyncio.create_task(_ask(session, shot, heard, started, wait=not volley.one_by_one)))
            tasks[-1].add_done_callback(lambda _: seats.release())
            if volley.one_by_one:
                await tasks[-1]
        await asyncio.gather(*tasks)
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
    return outcome


async def _ask(session: Any, shot: Shot, heard: Heard, started: float, *, wait: bool) -> None:
    """One request and its stream."""
    import aiohttp

    now = time.perf_counter() - started
    heard.lag = now - shot.at if wait else 0.0
    body = shot.body | {"stream": True, "stream_options": {"include_usage": True}}
    try:
        async with session.post("/v1/completions", json=body) as answer:
            heard.status = answer.status
            async for line in answer.content:
                if answer.status == 200 and line.startswith(b"data: {"):
                    _hear(json.loads(line[6:]), heard, time.perf_counter() - started)
    except (aiohttp.ClientError, asyncio.TimeoutError):
        heard.status = 0
    if not wait:  # one after the other: the next is due as soon as this one is over
        heard.first, heard.last = heard.first - now, heard.last - now


def _hear(event: dict[str, Any], heard: Heard, now: float) -> None:
    if "error" in event:
        heard.status = 500
        return
    heard.usage = event.get("usage") or heard.usage
    if event["choices"] and event["choices"][0]["text"]:
        heard.text += event["choices"][0]["text"]
        heard.first, heard.last = heard.first or now, now


async def _watch(session: Any, every: float | None, started: float, states: list[tuple[float, dict[str, Any]]]) -> None:
    if every is None:
        return
    while True:
        async with session.get("/v1/speed") as answer:
            states.append((time.perf_counter() - started, await answer.json()))
        await asyncio.sleep(every)
