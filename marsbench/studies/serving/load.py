"""A load generator that runs as its own process: it sends requests when they are due, without waiting for answers.

Times count from when a request was due, so that a slow server cannot hide behind a client that waits for it (an open
loop). Where as many requests as wanted are always in flight (a closed loop), each is due when it is sent. It shares the
machine with the server, so what comes is kept with its time, and read as HTTP, events and JSON when all is over.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

_LEAD_S = 0.05  # before the first request is due
_GIVE_UP_S = 120.0  # on one answer
Came = list[tuple[float, bytes]]  # what came, and when by `time.perf_counter`


@dataclass(frozen=True)
class Shot:
    at: float  # when the request is due: seconds after the first
    body: dict[str, Any]


@dataclass
class Heard:
    """The outcome of a request; times are seconds after the first request was due, 0 for no answer."""

    due: float = 0.0
    lag: float = 0.0  # by how much it was sent late
    status: int = 0
    first: float = 0.0
    last: float = 0.0
    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        return self.status == 200 and bool(self.usage.get("completion_tokens"))


def fire(url: str, shots: Sequence[Shot], at_once: int | None = None) -> list[Heard]:
    """The outcomes of all requests of a measurement, in order; `at_once` in flight, or each sent when due."""
    return asyncio.run(_fired(url, shots, at_once))


async def _fired(url: str, shots: Sequence[Shot], at_once: int | None) -> list[Heard]:
    started = time.perf_counter() + _LEAD_S
    seats = asyncio.Semaphore(at_once or len(shots))
    tasks: list[asyncio.Task[Came]] = []
    for shot in shots:
        await asyncio.sleep(max(0.0, started + shot.at - time.perf_counter()))
        await seats.acquire()
        body = shot.body | {"stream": True, "stream_options": {"include_usage": True}}
        tasks.append(asyncio.create_task(_exchanged(url, body)))
        tasks[-1].add_done_callback(lambda _: seats.release())
    answers = zip(await asyncio.gather(*tasks), shots, strict=True)
    return [_heard(came, started, None if at_once else shot.at) for came, shot in answers]


async def _exchanged(url: str, body: Any) -> Came:
    """Sends a request on its own connection, which the server closes after its answer: when sent, what came."""
    address, data = urlsplit(url), json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    came = [(time.perf_counter(), b"")]
    with suppress(OSError, TimeoutError):  # the parts so far show that the answer is incomplete
        async with asyncio.timeout(_GIVE_UP_S):
            reader, writer = await asyncio.open_connection(address.hostname, address.port)
            try:
                writer.write(head.encode() + data)
                while piece := await reader.read(2**16):
                    came.append((time.perf_counter(), piece))
            finally:
                writer.transport.abort()
    return came


def read_answer(came: Came) -> tuple[int, Came]:
    """Status and body of an HTTP answer, its parts with their times; a status of 0 where it is not complete."""
    import h11

    client, status, body, complete = h11.Connection(h11.CLIENT), 0, [], False
    client.send(h11.Request(method="GET", target="/", headers=[("Host", "x")]))  # whatever it was: it has been sent
    client.send(h11.EndOfMessage())
    with suppress(h11.RemoteProtocolError):
        for at, data in [*came, (0.0, b"")]:
            client.receive_data(data)
            while True:
                match event := client.next_event():
                    case h11.Response():
                        status = event.status_code
                    case h11.Data():
                        body.append((at, bytes(event.data)))
                    case h11.EndOfMessage():
                        complete = True
                    case _:  # it wants more, or has no more
                        break
    return (status if complete else 0), body


def _heard(came: Came, since: float, due: float | None) -> Heard:
    """The outcome of a request that was due then, or (None) when it was sent."""
    (sent, _), *parts = came
    status, body = read_answer(parts)
    due = sent - since if due is None else due
    heard, rest = Heard(due, max(0.0, sent - since - due), status), b""
    for at, data in body:
        *lines, rest = (rest + data).split(b"\n")  # a line came when its end did
        for line in lines:
            event = json.loads(line[6:]) if line.startswith(b"data: {") else {}
            if "error" in event:
                heard.status = 500
            heard.usage = event.get("usage") or heard.usage
            if text := "".join(choice["text"] for choice in event.get("choices", ())):
                heard.text += text
                heard.first, heard.last = heard.first or at - since, at - since
    return heard
