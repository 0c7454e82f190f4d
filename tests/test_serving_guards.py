"""What guards the server's routes, with clients that no socket can make behave so badly at will."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, MutableMapping
from typing import Any

import pytest

from marsbench.serving.desk import Stream
from marsbench.serving.errors import ApiError
from marsbench.serving.guards import ClientGone, EventStream, Patience, until_gone
from marsbench.serving.messages import Ending, Job, Wishes

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


def test_a_reader_that_takes_nothing_is_let_go() -> None:
    """Guards against a stream that waits for its reader for ever, with all that it holds."""
    events, sent = Events(), list[Message]()

    async def send(message: Message) -> None:
        sent.append(message)
        if len(sent) > 3:
            await asyncio.Event().wait()

    asyncio.run(asyncio.wait_for(EventStream(events(), 0.05)({"type": "http"}, silent, send), 5))
    assert len(sent) == 4 and events.closed


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
    with pytest.raises(ClientGone):
        asyncio.run(until_gone(gone, work()))
    assert worked == ["ended"]


def test_what_waits_for_a_slow_reader_comes_at_once() -> None:
    """Guards against tokens that are lost or reordered where the reader is slower than the engine."""

    async def read() -> list[Any]:
        stream = Stream(Job(1, [5], 99, Wishes("ar")))
        found = []
        reader = stream.read()
        for number in range(50):
            stream.put([number])
        found.append(await anext(reader))
        stream.put([50])
        stream.end(Ending("eos", 52, 52, None, (1, 1)))
        found += [one async for one in reader]
        return found

    first, second, ending = asyncio.run(read())
    assert first == [[number] for number in range(50)] and second == [[50]] and ending.finish == "eos"


def test_an_answer_that_has_ended_stays_one() -> None:
    """Guards against answers that nobody has read yet, and that become errors when the engine goes."""

    async def read() -> list[Any]:
        stream = Stream(Job(1, [5], 99, Wishes("ar")))
        stream.put([7])
        stream.end(Ending("eos", 2, 2, None, (1, 1)))
        stream.end(ApiError(500, "gone"))
        return [one async for one in stream.read()]

    pieces, ending = asyncio.run(read())
    assert pieces == [[7]] and ending.finish == "eos"


def test_an_engine_that_is_lost_is_told() -> None:
    """Guards against a reader that waits for ever for an engine which is gone."""

    async def read() -> None:
        stream = Stream(Job(1, [5], 99, Wishes("ar")))
        stream.end(ApiError(500, "gone"))
        async for _ in stream.read():
            pass

    with pytest.raises(ApiError, match="gone"):
        asyncio.run(asyncio.wait_for(read(), 5))


def test_patience_ends_with_what_takes_too_long_and_with_nothing_else() -> None:
    """Guards against a reader that is let go because of what it did not wait for, and one that is never let go."""

    async def tried() -> tuple[int, float]:
        given_up = list[float]()
        patience = Patience(0.2, lambda: given_up.append(time.monotonic()))
        for _ in range(30):  # longer than its patience in all
            with patience:
                await asyncio.sleep(0)
            await asyncio.sleep(0.01)
        early, began = len(given_up), time.monotonic()
        with patience:
            while not given_up:
                await asyncio.sleep(0.01)
        patience.close()
        return early, given_up[0] - began

    early, waited = asyncio.run(tried())
    assert early == 0 and waited >= 0.19
