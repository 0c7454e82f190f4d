"""The event loop's end of the pipe to the engine: it waits neither for the rest of a message nor for room to write."""

from __future__ import annotations

import asyncio
import os
import pickle
import struct
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

_AT_ONCE = 2**16  # bytes that are read before others have their turn
_SIZE = struct.Struct("!i")  # stands before each message; it would be another before one of more than 2 GiB


class Line:
    """Messages both ways, framed as `multiprocessing` does at the other end.

    `pipe.recv` would wait for the rest of a message, which never comes of an engine that stands still in the middle of
    it, and `pipe.send` for such an engine to read on.
    """

    def __init__(self, pipe: Connection, heed: Callable[[Any], None], lost: Callable[[], None]) -> None:
        """`heed` gets every message, and `lost` is called when no more can come."""
        self._pipe, self._heed, self._lost = pipe, heed, lost
        self._came, self._left = bytearray(), bytearray()
        self._loop = asyncio.get_running_loop()
        os.set_blocking(pipe.fileno(), False)
        self._loop.add_reader(pipe.fileno(), self._read)

    def send(self, message: Any) -> None:
        """Have a message written as soon as there is room."""
        data = pickle.dumps(message)
        is_first = not self._left
        self._left += _SIZE.pack(len(data)) + data
        if is_first:
            self._write()

    def close(self) -> None:
        """Nothing more is to be said or heard."""
        self._loop.remove_reader(self._pipe.fileno())
        self._loop.remove_writer(self._pipe.fileno())
        self._pipe.close()

    def _write(self) -> None:
        try:
            with suppress(BlockingIOError):
                del self._left[: os.write(self._pipe.fileno(), self._left)]
        except OSError:  # nobody reads any more: whoever reads here is told so
            self._left.clear()
        if self._left:
            self._loop.add_writer(self._pipe.fileno(), self._write)
        else:
            self._loop.remove_writer(self._pipe.fileno())

    def _read(self) -> None:
        try:
            data = os.read(self._pipe.fileno(), _AT_ONCE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lost()
            return
        self._came += data
        while not self._pipe.closed and len(self._came) >= _SIZE.size:
            end = _SIZE.size + _SIZE.unpack_from(self._came)[0]
            if len(self._came) < end:
                return
            message = pickle.loads(self._came[_SIZE.size : end])
            del self._came[:end]
            self._heed(message)
