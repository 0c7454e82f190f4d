"""Where HTTP meets the engine: who may come in, whose tokens are whose, and what to do when the engine is gone.

Everything here runs on the event loop, save for one thread that writes to the engine's pipe, which may be full.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

from marsbench.errors import UserError
from marsbench.serving.errors import ApiError, engine_lost, not_ready
from marsbench.serving.messages import Cancel, Ending, Failed, Job, Ready, Report, Speed, State
from marsbench.serving.metrics import Metrics
from marsbench.serving.process import Setup, run

_RESTARTS, _WITHIN_S = 3, 60.0  # an engine that dies more often than this is not started again


class Stream:
    """What one request gets. Whoever reads slowly finds more at once; what waits is bounded by the request's limit."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._pieces: list[list[int]] = []
        self._ending: Ending | ApiError | None = None
        self._news = asyncio.Event()
        self.stopped = False  # whether it came to a stop string, which the engine knows nothing of
        self.last: float | None = None  # `time.perf_counter()` of the latest token

    def put(self, tokens: list[int]) -> None:
        """The tokens of one forward."""
        self._pieces.append(tokens)
        self._news.set()

    def end(self, ending: Ending | ApiError) -> None:
        """Nothing more will come; of several endings the first counts."""
        self._ending = self._ending or ending
        self._news.set()

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""
        return self._ending is not None

    async def read(self) -> AsyncIterator[list[list[int]] | Ending]:
        """What has come since the last time, a list of tokens for each forward; the ending last.

        Raises:
            ApiError: the engine could not answer, or is gone.
        """
        while True:
            await self._news.wait()
            self._news.clear()
            pieces, self._pieces = self._pieces, []
            if pieces:
                yield pieces
            if isinstance(self._ending, ApiError):
                raise self._ending
            if self._ending is not None and not self._pieces:
                yield self._ending
                return


@dataclass
class Limits:
    """How much is taken in."""

    queue: int = 64  # requests that wait, those that are being read and tokenised included
    drain_s: float = 30.0  # that requests in flight have to end when the server is told to


@dataclass
class Desk:
    """One engine process and those whom it answers."""

    setup: Setup
    limits: Limits
    name: str  # of the model, in metrics
    log: Callable[[str], None] = print
    metrics: Metrics = field(init=False)
    ready: Ready | None = None
    state: State = field(default_factory=State)
    draining: bool = False
    fatal: UserError | None = None  # why no engine will be started any more

    def __post_init__(self) -> None:
        self.speed = self.setup.speed
        self.metrics = Metrics(self.name)
        self.started = asyncio.Event()  # an engine is ready, or none ever will be
        self.over = asyncio.Event()  # the server should end
        self._streams: dict[int, Stream] = {}
        self._outside = 0  # requests that have been let in and have not reached the engine yet
        self._queued: set[int] = set()
        self._numbers = iter(range(1, 1 << 62))
        self._deaths: list[float] = []
        self._process: Any = None
        self._pipe: Connection | None = None
        self._letters: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._idle = asyncio.Event()
        self._idle.set()

    # ---- the engine process ----

    def start(self) -> None:
        """Start an engine process; `started` says when it is ready."""
        context = multiprocessing.get_context("spawn")
        pipe, theirs = context.Pipe()
        self._process = context.Process(target=run, args=(theirs, self.setup), daemon=True, name="marsbench engine")
        self._process.start()
        theirs.close()
        self._pipe, self._letters = pipe, queue.SimpleQueue()
        threading.Thread(target=_post, args=(pipe, self._letters), daemon=True).start()
        asyncio.get_running_loop().add_reader(pipe.fileno(), self._hear, pipe)

    def close(self) -> None:
        """End the engine process."""
        if self._pipe is not None:
            self._hang_up(self._pipe)
        if self._process is not None:
            self._process.kill()
            self._process.join(5)

    def _hear(self, pipe: Connection) -> None:
        """Read one message of the engine."""
        try:
            message = pipe.recv()
        except (EOFError, OSError):
            self._lost(pipe)
            return
        match message:
            case Report():
                self._take(message)
            case Ready():
                self.ready = message
                self.metrics.slots = message.slots
                self.started.set()
            case Failed():
                self._give_up(UserError(message.what, where=message.where, fix=message.fix))

    def _hang_up(self, pipe: Connection) -> None:
        asyncio.get_running_loop().remove_reader(pipe.fileno())
        self._letters.put(None)
        pipe.close()
        self._pipe = None

    def _lost(self, pipe: Connection) -> None:
        """The engine is gone: tell everybody, and start another unless that has not helped before."""
        self._hang_up(pipe)
        self.ready, self.state = None, State()
        self.metrics.lost()
        for stream in list(self._streams.values()):
            stream.end(engine_lost())
        self._queued.clear()
        if self.fatal or self.draining:
            self.over.set()
            return
        now = time.monotonic()
        self._deaths = [*(death for death in self._deaths if now - death < _WITHIN_S), now]
        if len(self._deaths) > _RESTARTS:
            self._give_up(UserError(
                f"the engine process has ended {len(self._deaths)} times within a minute",
                fix="see its messages above; with less memory, give --max-rows or --kv-slots less",
            ))  # fmt: skip
            return
        self.log("the engine process has ended; starting another")
        self.start()

    def _give_up(self, why: UserError) -> None:
        self.fatal = why
        self.started.set()
        self.over.set()

    # ---- who may come in ----

    def check_open(self) -> None:
        """Raise `ApiError` where nobody is let in."""
        if self.draining:
            raise not_ready("the server is shutting down")
        if self.ready is None:
            raise not_ready("the engine is not ready")

    @property
    def queued(self) -> int:
        """Requests that wait, in the engine's queue or on their way to it."""
        return self._outside + len(self._queued)

    @contextlib.contextmanager
    def let_in(self, count: int) -> Iterator[None]:
        """Count requests as waiting while they are read; `ApiError` 429 where the queue has no room."""
        self.check_open()
        if self.queued + count > self.limits.queue:
            self.metrics.rejected.inc(count)
            raise ApiError(
                429, f"{self.queued} requests wait already, of {self.limits.queue} at most", code="queue_full",
                retry_after=1,
            )  # fmt: skip
        self._outside += count
        try:
            yield
        finally:
            self._outside -= count

    @contextlib.contextmanager
    def submitted(self, jobs: list[Job]) -> Iterator[list[Stream]]:
        """Hand jobs to the engine for the time of a `with` block; whatever has not ended by then is cancelled."""
        self.check_open()
        streams = [Stream(job) for job in jobs]
        for stream in streams:
            self._streams[stream.job.id] = stream
            self._queued.add(stream.job.id)
            self.metrics.prompt_tokens.inc(len(stream.job.prompt_ids))
            self._send(stream.job)
        self._idle.clear()
        try:
            yield streams
        finally:
            for stream in streams:
                if not stream.ended:
                    self.metrics.cancelled.inc()
                    self._send(Cancel(stream.job.id))
                del self._streams[stream.job.id]
            if not self._streams:
                self._idle.set()

    def stop(self, stream: Stream) -> None:
        """A stop string has come: no more tokens are wanted, only the ending."""
        if not stream.stopped and not stream.ended:
            stream.stopped = True
            self._send(Cancel(stream.job.id))

    def number(self) -> int:
        """A number for a job."""
        return next(self._numbers)

    def turn(self, speed: Speed) -> None:
        """Set the default knobs, from the next forward on."""
        self.speed = speed
        self.setup = replace(self.setup, speed=speed)  # for an engine that takes this one's place
        self._send(speed)

    def _send(self, message: Any) -> None:
        self._letters.put(message)

    def _take(self, report: Report) -> None:
        """Bring what a forward brought to those whom it is for."""
        now = time.perf_counter()
        self.state = report.state
        self.metrics.take(report.state)
        self._queued.difference_update(report.started)
        self.metrics.tokens.inc(sum(len(tokens) for _, tokens in report.tokens))
        for number, tokens in report.tokens:
            stream = self._streams.get(number)
            if stream is not None:
                self._note_times(stream, now, len(tokens))
                stream.put(tokens)
        for number, ending in report.ended:
            self._queued.discard(number)
            stream = self._streams.get(number)
            if stream is not None:
                self._note_end(stream, ending, now)
                stream.end(ApiError(500, ending.failure, code="engine_failure") if ending.failure else ending)

    def _note_times(self, stream: Stream, now: float, count: int) -> None:
        if stream.last is None:
            self.metrics.first_token.observe(now - stream.job.arrived)
        else:
            for _ in range(count):
                self.metrics.per_token.observe((now - stream.last) / count)
        stream.last = now

    def _note_end(self, stream: Stream, ending: Ending, now: float) -> None:
        self.metrics.whole.observe(now - stream.job.arrived)
        self.metrics.ended("error" if ending.failure else "length" if ending.finish == "length" else "stop")

    # ---- the end ----

    async def drain(self) -> None:
        """Let nobody in any more, and wait until all have their answers, or the time is up and they are told."""
        self.draining = True
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._idle.wait(), self.limits.drain_s)
        for stream in list(self._streams.values()):
            stream.end(ApiError(503, "the server is shutting down; this answer is not complete", code="shutting_down"))
        if self._streams:
            await asyncio.sleep(0.5)  # for those words to go out
        self.over.set()


def _post(pipe: Connection, letters: queue.SimpleQueue[Any]) -> None:
    """Write what is to be sent to the engine, until there is nothing more or nobody to read it."""
    with contextlib.suppress(OSError, BrokenPipeError):
        while (letter := letters.get()) is not None:
            pipe.send(letter)
