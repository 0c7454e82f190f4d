"""The client with engine processes that die, hang, or cannot be started."""

import asyncio
import itertools
import multiprocessing
import os
import signal
import time
import types
from collections.abc import AsyncGenerator, Callable, MutableMapping
from multiprocessing.connection import Connection
from typing import Any
from unittest.mock import Mock

import pytest
from starlette.requests import ClientDisconnect

from marsbench.serving import engine_client
from marsbench.serving.engine_client import Channel, EngineClient, Stream
from marsbench.serving.guards import EventStream, until_gone
from marsbench.serving.messages import Ending, Job, Ready, Report, Settings, State
from marsbench.serving.wire import ApiError

READY = Ready(None, 100, 100, ("ar",), 100)


def dies(pipe: Connection, _: Settings) -> None:
    """An engine that ends as soon as it is ready."""
    pipe.send(READY)


def answers(pipe: Connection, _: Settings) -> None:
    """An engine that answers a job with nothing, and dies of one without a prompt."""
    pipe.send(READY)
    while True:
        job = pipe.recv()
        if isinstance(job, Job):
            if not job.prompt_ids:
                return
            pipe.send(Report(State(), [job.id], {}, [(job.id, Ending("eos", 1, 1, None, (1, 1)))]))


def hangs(pipe: Connection, _: Settings) -> None:
    pipe.send(READY)
    signal.pause()


def halts(pipe: Connection, _: Settings) -> None:
    """An engine that stands still in the middle of a report."""
    pipe.send(READY)
    pipe.recv()
    ours, theirs = multiprocessing.Pipe()
    ours.send(Report(State(), [1]))
    os.write(pipe.fileno(), os.read(theirs.fileno(), 10_000)[:-1])
    time.sleep(10)


def widest(pipe: Connection, settings: Settings) -> None:
    """An engine whose slots tell the window that it was started with."""
    pipe.send(Ready(None, 100, 100, ("ar",), settings.block_size))
    signal.pause()


def job(number: int, *prompt: int) -> Job:
    return Job(list(prompt), 9, id=number, method="ar", arrived=time.perf_counter())


async def until(holds: Callable[[], Any], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


async def answer(client: EngineClient, job: Job) -> Ending | ApiError:
    await until(lambda: client.ready)
    stream = Stream(job, asyncio.Event())
    with client.submitted([stream]):
        await until(lambda: stream.ending)
        assert stream.ending is not None
        return stream.ending


def lines(run: Any, monkeypatch: pytest.MonkeyPatch, work: Callable[[EngineClient], Any], **settings: Any) -> list[str]:
    """The lines that a client logs during some work."""
    monkeypatch.setattr(engine_client, "run", run)
    monkeypatch.setattr(engine_client, "_FIRST_WAIT_S", 0.05)
    logged = list[str]()

    async def run_work() -> None:
        client = EngineClient(Settings("", "micro", **settings), logged.append)
        client.start()
        try:
            await work(client)
        finally:
            client.close()

    asyncio.run(run_work())
    return logged


def test_an_engine_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an engine that is started again for ever, since it lives for a while before it dies."""
    clock = itertools.count()
    slow = types.SimpleNamespace(monotonic=lambda: 100.0 * next(clock), perf_counter=time.perf_counter)
    monkeypatch.setattr(engine_client, "time", slow)  # however long they live

    async def work(client: EngineClient) -> None:
        await until(client.over.is_set)
        assert client.fatal is not None and "4 times without an answer" in client.fatal.what

    assert sum("starting another" in line for line in lines(dies, monkeypatch, work)) == 3


def test_deaths_between_answers_are_got_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a server that ends after several engines have died in a long time."""

    async def work(client: EngineClient) -> None:
        for number in range(0, 12, 2):
            assert isinstance(await answer(client, job(number, 5)), Ending)
            assert isinstance(await answer(client, job(number + 1)), ApiError)
            await until(lambda: client.ready is None)
        assert not client.over.is_set()

    lines(answers, monkeypatch, work)


def test_an_engine_that_says_nothing_is_started_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against clients that wait for ever for an engine that was stopped, behind a health of 200."""

    async def work(client: EngineClient) -> None:
        await until(lambda: client.ready)
        first = client._process.pid
        os.kill(first, signal.SIGSTOP)
        error = await answer(client, job(1, 5))
        assert isinstance(error, ApiError) and error.code == "engine_lost"
        with pytest.raises(ApiError, match="not ready"):
            client.check_open()
        await until(lambda: client.ready)
        assert client._process.pid != first and client.queued == 0

    assert "said nothing" in "".join(lines(hangs, monkeypatch, work, hang_timeout=0.5))


def test_a_window_that_was_turned_does_not_bound_the_next_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against compiled steps that stay narrow for good, because an engine died while the window was 1."""

    async def work(client: EngineClient) -> None:
        for _ in range(2):
            await until(lambda: client.ready)
            assert client.ready is not None and client.ready.slots == 4
            client.turn(block_size=1)
            client._process.kill()
            await until(lambda: client.ready is None)

    lines(widest, monkeypatch, work, block_size=4)


def test_a_second_signal_ends_answers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against clients that hear no reason, and an answer lost that is not counted as an error."""

    async def work(client: EngineClient) -> None:
        await until(lambda: client.ready)
        stream = Stream(job(1, 5), asyncio.Event())
        with client.submitted([stream]):
            draining = asyncio.create_task(client.drain())
            await asyncio.sleep(0.1)
            assert stream.ending is None
            client.turn(drain=0.0)
            await until(lambda: stream.ending, 2)
            assert isinstance(stream.ending, ApiError) and stream.ending.code == "shutting_down"
        await draining
        (error,) = (each for each in client.metrics.ended.collect()[0].samples if each.name.endswith("_total"))
        assert error.labels["finished_reason"] == "error" and error.value == 1

    lines(hangs, monkeypatch, work)


def test_half_a_report_stops_no_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an event loop that waits for the rest of a report, and never ends the engine that stands still."""

    async def work(client: EngineClient) -> None:
        error = await answer(client, job(1, 5))
        assert isinstance(error, ApiError) and error.code == "engine_lost"

    assert "said nothing" in "".join(lines(halts, monkeypatch, work, hang_timeout=0.5))


def test_an_engine_that_does_not_read_delays_no_client() -> None:
    """Guards against an event loop that waits for room in a pipe, and messages that are cut where it has none."""

    async def sent() -> None:
        own, other = multiprocessing.Pipe()
        channel = Channel(own, lambda _: None, lambda: None)
        messages = [job(number, *range(99)) for number in range(2000)]  # more than the pipe holds
        for message in messages:
            channel.send(message)
        received = [await asyncio.to_thread(other.recv) for _ in messages]
        assert received == messages
        channel.close()

    asyncio.run(sent())


def test_an_answer_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against one request that is decoded, or waits, for ever."""

    async def work(client: EngineClient) -> None:
        error = await answer(client, job(1, 5))
        assert isinstance(error, ApiError) and error.status == 504

    lines(hangs, monkeypatch, work, deadline=0.3)


def test_an_engine_is_started_as_soon_as_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an engine that dies while no file can be opened, and is never started again."""

    async def work(client: EngineClient) -> None:
        await until(lambda: client.ready)
        context: Any = engine_client.multiprocessing.get_context("spawn")
        with monkeypatch.context() as patch:
            patch.setattr(type(context), "Pipe", Mock(side_effect=OSError(24, "Too many open files")))
            client._process.kill()
            await until(lambda: client._deaths == 2)
        assert isinstance(await answer(client, job(1, 5)), Ending) and not client.over.is_set()

    assert "Too many open files" in "".join(lines(answers, monkeypatch, work))


Message = MutableMapping[str, Any]


class Events:
    """A stream of events that notes when it is closed."""

    closed = False

    async def __call__(self) -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield b"data: {}\n\n"
        finally:
            self.closed = True


async def silent() -> Message:
    """A client that stays and sends nothing."""
    await asyncio.Event().wait()
    raise AssertionError


async def gone() -> Message:
    return {"type": "http.disconnect"}


def test_a_client_that_goes_away_ends_the_work() -> None:
    """Guards against work that goes on after its client has gone, and generators that are never closed."""
    events, worked = Events(), list[str]()

    async def send(message: Message) -> None:
        await asyncio.sleep(0)

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            worked.append("ended")

    asyncio.run(asyncio.wait_for(EventStream(events(), 0)({"type": "http", "log": {}}, gone, send), 5))
    assert events.closed
    with pytest.raises(ClientDisconnect):
        asyncio.run(until_gone(gone, work()))
    assert worked == ["ended"]


def test_streams_lose_nothing_and_end_once() -> None:
    """Guards against tokens lost or reordered for a slow reader, and an error in place of an answer that has ended."""
    news = asyncio.Event()
    stream = Stream(job(1, 5), news)
    for number in range(50):
        stream.put([[number]])
    assert news.is_set() and stream.take() == [[number] for number in range(50)]
    stream.put([[50]])
    stream.end(Ending("eos", 52, 52, None, (1, 1)))
    assert stream.take() == [[50]] and isinstance(stream.ending, Ending)
    stream = Stream(job(1, 5), asyncio.Event())
    stream.end(Ending("eos", 2, 2, None, (1, 1)))
    stream.end(ApiError(500, "gone"))
    assert isinstance(stream.ending, Ending)


@pytest.mark.parametrize("after", [False, True])
def test_an_error_has_a_status_of_its_own_until_something_is_sent(after: bool) -> None:
    """Guards against a status of 200 before an error, and a stream that breaks off without an error."""
    sent = list[Message]()

    async def events() -> AsyncGenerator[bytes, None]:
        if after:
            yield b"data: {}\n\n"
        raise ApiError(503, "gone")

    async def send(message: Message) -> None:
        sent.append(message)

    work = EventStream(events(), 0)({"type": "http", "log": {}}, silent, send)
    if after:
        asyncio.run(work)
        assert b"gone" in sent[-2]["body"] and sent[-1]["more_body"] is False
    else:
        with pytest.raises(ApiError, match="gone"):
            asyncio.run(work)
        assert sent == []


def test_a_silent_stream_says_that_it_is_alive() -> None:
    """Guards against streams that a proxy cuts, a second head, and pings inside an event or after the end."""
    sent, data = list[Message](), [b"data: 1\n\n", b"data: 2\n\n"]

    async def events() -> AsyncGenerator[bytes, None]:
        for body in data:
            await asyncio.sleep(0.2)
            yield body

    async def send(message: Message) -> None:
        await asyncio.sleep(0)
        sent.append(message)

    async def streamed() -> None:
        await EventStream(events(), 0.05)({"type": "http", "log": {}}, silent, send)
        await asyncio.sleep(0.1)

    asyncio.run(streamed())
    assert [message["type"].rpartition(".")[2] for message in sent] == ["start", *["body"] * (len(sent) - 1)]
    bodies = [message["body"] for message in sent[1:]]
    assert bodies[0] == b": ping\n\n" and [*filter(bodies[0].__ne__, bodies)] == [*data, b""]
    assert sent[-2]["more_body"] and not sent[-1]["more_body"]
