"""The event loop's end of the pipe to the engine: threads wait for messages, and for room to write."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any


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
