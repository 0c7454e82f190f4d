"""What guards the server's routes, with clients that no socket can make behave so badly at will."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, MutableMapping
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from marsbench.serving.desk import Stream
from marsbench.serving.guards import EventStream, until_gone
from marsbench.serving.messages import Ending, Job, Wishes
from marsbench.serving.wire import ApiError

Message = MutableMapping[str, Any]


class Events:
    """A stream of events that notes when it is closed."""

    def __init__(self) -> None:
        self.closed = False

    async def __call__(self) -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield b"data: {}\n\n"
        finally:
            self.closed = True


async def silent() -> Message:
    """A client that stays and says nothing."""
    await asyncio.Event().wait()
    raise AssertionError


async def gone() -> Message:
    return {"type": "http.disconnect"}


def test_a_client_that_goes_away_ends_the_work() -> None:
    """Guards against work that goes on for nobody, and generators that are never closed."""
    events, worked = Events(), list[str]()

    async def send(message: Message) -> None:
        await asyncio.sleep(0)

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            worked.append("ended")

    asyncio.run(asyncio.wait_for(EventStream(events(), 9.0)({"type": "http"}, gone, send), 5))
    assert events.closed
    with pytest.raises(ClientDisconnect):
        asyncio.run(until_gone(gone, work()))
    assert worked == ["ended"]


def job(number: int = 1) -> Job:
    return Job([5], 99, id=number, wishes=Wishes("ar"))


def test_what_waits_for_a_slow_reader_comes_at_once() -> None:
    """Guards against tokens that are lost or reordered where the reader is slower than the engine."""
    news = asyncio.Event()
    stream = Stream(job(), news)
    for number in range(50):
        stream.put([([number], None)])
    assert news.is_set() and stream.take() == [([number], None) for number in range(50)]
    stream.put([([50], None)])
    stream.end(Ending("eos", 52, 52, None, (1, 1)))
    assert stream.take() == [([50], None)] and isinstance(stream.ending, Ending)


def test_an_answer_that_has_ended_stays_one() -> None:
    """Guards against answers that nobody has read yet, and that become errors when the engine goes."""
    stream = Stream(job(), asyncio.Event())
    stream.end(Ending("eos", 2, 2, None, (1, 1)))
    stream.end(ApiError(500, "gone"))
    assert isinstance(stream.ending, Ending)


def test_a_stream_says_that_it_is_alive() -> None:
    """Guards against proxies that cut a stream which waits, and pings before an error that has a status of its own."""

    async def events(*, fails: bool, after: float) -> AsyncGenerator[bytes, None]:
        await asyncio.sleep(after)
        if fails:
            raise ApiError(503, "gone")
        yield b"data: {}\n\n"

    async def sent(*, fails: bool, after: float) -> list[Message]:
        found = list[Message]()

        async def send(message: Message) -> None:
            found.append(message)

        await EventStream(events(fails=fails, after=after), 0.05)({"type": "http"}, silent, send)
        return found

    alive = asyncio.run(sent(fails=False, after=0.18))
    bodies = [one["body"] for one in alive[1:]]
    assert alive[0]["status"] == 200 and 1 <= bodies.count(b": ping\n\n") <= 3 and bodies[-2:] == [b"data: {}\n\n", b""]
    late = asyncio.run(sent(fails=True, after=0.08))
    assert b"gone" in late[-2]["body"] and late[-1]["more_body"] is False
    with pytest.raises(ApiError, match="gone"):
        asyncio.run(sent(fails=True, after=0.0))
