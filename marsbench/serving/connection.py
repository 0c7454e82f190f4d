"""What one connection may hold up, and for how long: uvicorn by itself waits for ever.

A peer has so long for the head of a request, and may take nothing of an answer for so long. Where there are as many
connections as there may be, a newcomer takes the place of the one that has asked for nothing the longest.
"""

from __future__ import annotations

import fcntl
import resource
import sys
import termios
from contextlib import suppress
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from marsbench.serving.settings import Settings

_SPARE_FILES = 64  # of the process, that are no connections
_MOST_AHEAD = 2**16  # bytes of requests that come before the one at hand is answered


class _Counting:
    """A transport that knows how many bytes it was given."""

    def __init__(self, transport: Any) -> None:
        self._transport, self._given = transport, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        self._given += len(data)
        self._transport.write(data)

    @property
    def taken(self) -> int:
        """How many of them the peer's system has taken, or, where that cannot be asked, ours."""
        left = int(self._transport.get_write_buffer_size())
        with suppress(OSError, ValueError):
            own = self._transport.get_extra_info("socket").fileno()
            left += int.from_bytes(fcntl.ioctl(own, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
        return self._given - left


class Connection(H11Protocol):
    """One connection, looked at now and then."""

    def __init__(self, settings: Settings, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._settings, self._most = settings, max(1, min(settings.max_connections, files - _SPARE_FILES))
        self._taken, self._took_at = 0, self.loop.time()
        self._since: float | None = self.loop.time()  # the peer has begun something that is not all here

    @property
    def is_answering(self) -> bool:
        """Whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: Any) -> None:
        """Take the newcomer in, in another's place where need be."""
        others = cast("set[Connection]", self.connections if len(self.connections) >= self._most else set())
        open_ones = [connection for connection in others if not connection.transport.is_closing()]
        self._counting = _Counting(transport)
        super().connection_made(cast(Any, self._counting))
        if len(open_ones) >= self._most:
            idle = [connection for connection in open_ones if not connection.is_answering]
            min(idle, key=lambda connection: connection._took_at, default=self).transport.abort()
        self._look()

    def data_received(self, data: bytes) -> None:
        """Read on, though nothing that comes is wanted yet: else nobody would hear that the peer goes away."""
        if self.conn.their_state is h11.MUST_CLOSE:  # it has said that nothing comes behind its request
            return
        super().data_received(data)
        ahead, _ = self.conn.trailing_data
        if self.is_answering:
            self._since = None
            if self.conn.their_state is h11.DONE and len(ahead) <= _MOST_AHEAD:
                self.flow.resume_reading()
            elif self.conn.their_state is h11.DONE:
                self.transport.abort()
        elif self.conn.their_state is h11.IDLE and not ahead:
            self._since = None
        elif self._since is None:
            self._since = self.loop.time()

    def _look(self) -> None:
        """Let a peer go that has kept this connection waiting for too long."""
        if self not in self.connections:
            return
        now, settings = self.loop.time(), self._settings
        if self._counting.taken != self._taken or not self.transport.get_write_buffer_size():
            self._taken, self._took_at = self._counting.taken, now
        is_late = self._since is not None and now - self._since > settings.read_timeout
        if is_late or now - self._took_at > settings.stall_timeout:
            self.transport.abort()
        else:
            often = min(settings.read_timeout, settings.stall_timeout) / 4
            self.loop.call_later(min(max(often, 0.02), 5.0), self._look)
