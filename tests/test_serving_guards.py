"""What guards the server's routes, with clients that no socket can make behave so badly at will."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, MutableMapping
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from marsbench.serving.engine_client import Stream
from marsbench.serving.guards import EventStream, until_gone
from marsbench.serving.messages import Ending, Job
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

    asyncio.run(asyncio.wait_for(EventStream(events())({"type": "http"}, gone, send), 5))
    assert events.closed
    with pytest.raises(ClientDisconnect):
        asyncio.run(until_gone(gone, work()))
    assert worked == ["ended"]


def job(number: int = 1) -> Job:
    return Job([5], 99, id=number, method="ar")


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


@pytest.mark.parametrize("after", [False, True])
def test_an_error_has_a_status_of_its_own_until_something_is_sent(after: bool) -> None:
    """Guards against a status of 200 before an error, and a stream that breaks off without a word."""
    sent = list[Message]()

    async def events() -> AsyncGenerator[bytes, None]:
        if after:
            yield b"data: {}\n\n"
        raise ApiError(503, "gone")

    async def send(message: Message) -> None:
        sent.append(message)

    work = EventStream(events())({"type": "http"}, silent, send)
    if after:
        asyncio.run(work)
        assert b"gone" in sent[-2]["body"] and sent[-1]["more_body"] is False
    else:
        with pytest.raises(ApiError, match="gone"):
            asyncio.run(work)
        assert sent == []
