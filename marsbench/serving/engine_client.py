"""Where HTTP meets the engine, on the event loop: what is let in, which tokens are whose, what if the engine dies."""

import asyncio
import itertools
import multiprocessing
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from marsbench.errors import UserError
from marsbench.serving.messages import Cancel, Ending, Job, Ready, Report, Settings, State
from marsbench.serving.metrics import Metrics
from marsbench.serving.process import run
from marsbench.serving.wire import ApiError

_DEATHS = 4  # of engines in a row, none of which has answered a request: then no other is started
_FIRST_WAIT_S = 1.0  # before the second start; then twice as long each time
_LOOK_S = 0.25  # how often it is looked after what waits too long


class Channel:
    """Messages both ways; an engine that stands still in the middle of one keeps a thread waiting, and nothing else."""

    def __init__(self, pipe: Connection, receive: Callable[[Any], None], lost: Callable[[], None]) -> None:
        """`receive` gets every message, and `lost` is called when no more can come; both on the event loop."""
        self._pipe, self._receive, self._lost = pipe, receive, lost
        self._out: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._loop, self._closed = asyncio.get_running_loop(), False
        for work in (self._read, self._write):
            threading.Thread(target=work, daemon=True).start()

    def send(self, message: Any) -> None:
        self._out.put(message)

    def close(self) -> None:
        self._closed = True
        self._out.put(None)

    def _call(self, work: Callable[..., None], *arguments: Any) -> None:
        if not self._closed:
            work(*arguments)

    def _read(self) -> None:
        with suppress(RuntimeError):  # the event loop is gone
            try:
                while not self._closed:
                    self._loop.call_soon_threadsafe(self._call, self._receive, self._pipe.recv())
            except (OSError, EOFError):
                self._loop.call_soon_threadsafe(self._call, self._lost)

    def _write(self) -> None:
        with suppress(OSError):  # no process reads any more: the other thread hears so
            while (message := self._out.get()) is not None:
                self._pipe.send(message)


class Stream:
    """What one request gets. A slow reader finds more at once; what waits is bounded by the request's limit."""

    def __init__(self, job: Job, changed: asyncio.Event) -> None:
        self.job, self._changed = job, changed
        self._pieces: list[list[int]] = []
        self.ending: Ending | ApiError | None = None  # nothing more will come
        self.last: float | None = None  # `time.perf_counter()` of the latest token

    def put(self, pieces: list[list[int]]) -> None:
        self._pieces += pieces
        self._changed.set()

    def end(self, ending: Ending | ApiError) -> None:
        """Nothing more will come; of several endings the first counts."""
        self.ending = self.ending or ending
        self._changed.set()

    def take(self) -> list[list[int]]:
        """The tokens of each forward since the last time; before an ending is heeded, nothing must be left of it."""
        pieces, self._pieces = self._pieces, []
        return pieces


class EngineClient:
    def __init__(self, settings: Settings, say: Callable[[str], None] = print) -> None:
        self.settings, self._say = settings, say
        self._widest = settings.block_size  # steps that are compiled hold no more, whatever is turned later
        self.metrics = Metrics(settings.name)
        self.ready: Ready | None = None
        self.state = State()
        self.draining = False
        self.fatal: UserError | None = None  # why no engine will be started any more
        self.started = asyncio.Event()  # an engine is ready, or none ever will be
        self.over = asyncio.Event()  # the server should end
        self._streams: dict[int, Stream] = {}
        self._outside = 0  # requests that have been let in and have not reached the engine yet
        self._queued: set[int] = set()
        self.numbers = itertools.count(1)  # of jobs
        self._deaths = 0  # since an engine last answered
        self._heard = time.monotonic()  # when the engine last said something, or had nothing to say
        self._process: Any = None
        self._channel: Channel | None = None
        self._timers: dict[str, asyncio.TimerHandle] = {}

    # ---- the engine process ----

    def start(self) -> None:
        try:
            settings = replace(self.settings, block_size=self._widest)
            context = multiprocessing.get_context("spawn")
            pipe, theirs = context.Pipe()
            self._process = context.Process(target=run, args=(theirs, settings), daemon=True, name="engine")
            self._process.start()
        except OSError as error:  # no file or no process can be had at the moment
            self._say(f"the engine process cannot be started: {error.strerror}")
            self._died()
            return
        theirs.close()
        self._channel = Channel(pipe, self._receive, self._lost)
        self._look()

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        if self._process is not None and self._process.pid is not None:
            self._process.kill()
            self._process.join(5)
        self._hang_up()

    def _receive(self, message: Any) -> None:
        self._heard = time.monotonic()
        match message:
            case Report():
                self._take(message)
            case Ready():
                self.ready = message
                self._send(self.settings)
                self.metrics.slots = message.slots
                if message.warning:
                    self._say(f"warning: {message.warning}")
                self.started.set()
            case UserError():  # by which it could not start
                self._give_up(message)

    def _hang_up(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._channel = None

    def _lost(self) -> None:
        """The engine is gone: tell every client, and start another unless that has not helped before."""
        self._hang_up()
        self.ready, self.state = None, State()
        self.metrics.take(Report(self.state))
        self.metrics.counters["marsbench:engine_restarts"].inc()
        for stream in self._streams.values():
            stream.end(ApiError(500, "the engine process has ended; this request is lost", code="engine_lost"))
        self._queued.clear()
        if self.fatal or self.draining:
            self.over.set()
        else:
            self._died()

    def _died(self) -> None:
        self._deaths += 1
        if self._deaths >= _DEATHS:
            self._give_up(UserError(
                f"the engine process has ended {self._deaths} times without an answer in between",
                fix="see its messages above; with less memory, give --max-rows or --kv-slots less",
            ))  # fmt: skip
            return
        self._say("the engine process has ended; starting another")
        wait = 0.0 if self._deaths == 1 else _FIRST_WAIT_S * 2 ** (self._deaths - 2)
        self._timers["start"] = asyncio.get_running_loop().call_later(wait, self.start)

    def _give_up(self, why: UserError) -> None:
        self.fatal = why
        self.started.set()
        self.over.set()

    def _look(self) -> None:
        """End an engine that has work and says nothing, and requests that take too long."""
        if timer := self._timers.get("look"):
            timer.cancel()
        self._timers["look"] = asyncio.get_running_loop().call_later(_LOOK_S, self._look)
        waiting = [stream for stream in self._streams.values() if stream.ending is None]
        if not (waiting and self.ready):  # one that loads says nothing, however long that takes
            self._heard = time.monotonic()
        elif time.monotonic() - self._heard > self.settings.hang_timeout:
            self._say(f"the engine process has said nothing for {self.settings.hang_timeout:g} seconds; it is ended")
            self._heard = time.monotonic()
            self._process.kill()
        now = time.perf_counter()
        for stream in waiting:
            if now - stream.job.arrived > self.settings.deadline:
                self._send(Cancel(stream.job.id))
                stream.end(ApiError(504, f"no answer within {self.settings.deadline:g} seconds", code="deadline"))

    # ---- what is let in ----

    def check_open(self) -> Ready:
        """The engine's account of itself, where requests are taken; else `ApiError`."""
        if self.draining or self.ready is None:
            why = "the server is shutting down" if self.draining else "the engine is not ready"
            raise ApiError(503, why, code="unavailable", retry_after=1)
        return self.ready

    @property
    def queued(self) -> int:
        return self._outside + len(self._queued)

    @contextmanager
    def let_in(self, count: int = 1) -> Iterator[None]:
        """Count requests as waiting while they are read; `ApiError` 429 where the queue has no room."""
        self.check_open()
        most = self.settings.max_queue
        if count > most:
            raise ApiError.wrong(f"{count} answers are asked for at once, of {most} at most", "prompt")
        if self.queued + count > most:
            self.metrics.counters["marsbench:requests_rejected"].inc(count)
            raise ApiError(429, f"{self.queued} requests wait, of {most} at most", code="queue_full", retry_after=1)
        self._outside += count
        try:
            yield
        finally:
            self._outside -= count

    @contextmanager
    def submitted(self, streams: Sequence[Stream]) -> Iterator[None]:
        """Hand jobs to the engine for the time of a `with` block; what has not ended by then is cancelled."""
        self.check_open()
        for stream in streams:
            self._streams[stream.job.id] = stream
            self._queued.add(stream.job.id)
            self.metrics.counters["vllm:prompt_tokens"].inc(len(stream.job.prompt_ids))
            self._send(stream.job)
        try:
            yield
        finally:
            for stream in streams:
                if stream.ending is None:
                    self.metrics.counters["marsbench:requests_cancelled"].inc()
                    self._send(Cancel(stream.job.id))
                elif isinstance(stream.ending, ApiError):
                    self.metrics.ended.labels(self.settings.name, "error").inc()
                del self._streams[stream.job.id]

    def stop(self, stream: Stream) -> None:
        if stream.ending is None:
            self._send(Cancel(stream.job.id))

    def turn(self, **knobs: Any) -> None:
        """Set the default knobs, from the next forward on, and for an engine that takes this one's place."""
        self.settings = replace(self.settings, **knobs)
        self._send(self.settings)

    def _send(self, message: Any) -> None:
        if self._channel is not None:
            self._channel.send(message)

    def _take(self, report: Report) -> None:
        now, times = time.perf_counter(), self.metrics.times
        self.state = report.state
        self.metrics.take(report)
        self._queued.difference_update(report.started)
        for number in report.started:
            if stream := self._streams.get(number):
                times["vllm:request_queue_time_seconds"].observe(now - stream.job.arrived)
        for number, pieces in report.tokens.items():
            count = sum(map(len, pieces))
            if stream := self._streams.get(number):
                if stream.last is None:
                    times["vllm:time_to_first_token_seconds"].observe(now - stream.job.arrived)
                else:
                    for _ in range(count):
                        times["vllm:inter_token_latency_seconds"].observe((now - stream.last) / count)
                stream.last = now
                stream.put(pieces)
        for number, ending in report.ended:
            self._queued.discard(number)
            if stream := self._streams.get(number):
                self._deaths = self._deaths if ending.failure else 0
                times["vllm:e2e_request_latency_seconds"].observe(now - stream.job.arrived)
                if ending.failure:
                    stream.end(ApiError(500, ending.failure, code="engine_failure"))
                elif stream.ending is None:
                    stream.end(ending)
                    why = "length" if ending.finish == "length" else "stop"
                    self.metrics.ended.labels(self.settings.name, why).inc()

    # ---- the end ----

    async def drain(self) -> None:
        """Take no more requests, and wait until all have their answers, or the time is up and they are told."""
        self.draining = True
        began = time.monotonic()
        while self._streams and time.monotonic() < began + self.settings.drain:  # a second signal makes it 0
            await asyncio.sleep(_LOOK_S / 10)
        for stream in self._streams.values():
            stream.end(ApiError(503, "the server is shutting down; this answer is not complete", code="shutting_down"))
        if self._streams:
            await asyncio.sleep(0.5)  # for those words to go out
        self.over.set()
