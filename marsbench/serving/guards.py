"""What stands before every route: the key, the size of a body and the time it takes; and who is still listening."""

from __future__ import annotations

import asyncio
import base64
import hmac
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, MutableMapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

import anyio
from starlette.responses import Response

from marsbench.serving.errors import ApiError
from marsbench.serving.wire import dumps

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
T = TypeVar("T")
_SHORTEST_S = 0.01  # of anybody's patience


class ClientGone(Exception):
    """Nobody is there any more to be answered."""


async def until_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What the work comes to; it is cancelled as soon as the client goes away (`ClientGone`)."""
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Json(Response):
    """A body in JSON, in ASCII."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return dumps(content).encode("ascii")


def answer(error: ApiError) -> Json:
    """An error as a response."""
    return Json(error.envelope, status_code=error.status, headers=error.headers)


class Patience:
    """Calls off what takes too long, of many things one after the other, with one timer for all of them.

    A timer for each would cost more than most of what it times.
    """

    def __init__(self, seconds: float, give_up: Callable[[], object]) -> None:
        self._seconds, self._give_up = max(seconds, _SHORTEST_S), give_up
        self._loop = asyncio.get_running_loop()
        self._began: float | None = None  # when what goes on now did
        self._timer = self._loop.call_later(self._seconds, self._look)

    def __enter__(self) -> None:
        self._began = self._loop.time()

    def __exit__(self, *_: object) -> None:
        self._began = None

    def close(self) -> None:
        """Nothing more will be waited for."""
        self._timer.cancel()

    def _look(self) -> None:
        left = self._seconds if self._began is None else self._began + self._seconds - self._loop.time()
        if left <= 0:
            self._give_up()
        else:
            self._timer = self._loop.call_later(left, self._look)


class EventStream(Response):
    """Server-sent events, written as they come.

    Nothing goes out before the first event: until then, an error still has a status of its own. A reader that takes
    nothing for `stall_s` seconds is let go.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], stall_s: float) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._stall_s = events, stall_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_gone(receive, self._write(send))
        except ClientGone:
            return  # an answer that is not complete: the connection is closed

    async def _write(self, send: Send) -> None:
        with anyio.CancelScope() as scope:
            patience = Patience(self._stall_s, scope.cancel)
            try:
                await self._write_all(send, patience)
            finally:
                patience.close()

    async def _write_all(self, send: Send, patience: Patience) -> None:
        async with aclosing(self._events) as events:
            started = False
            async for body in events:
                if not started:
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    started = True
                with patience:
                    await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


@dataclass(frozen=True)
class Gate:
    """ASGI middleware: who has no key, or sends too much or too slowly, gets no further."""

    app: Any
    key: str | None
    most_bytes: int
    read_s: float

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            headers = {name: value for name, value in scope["headers"]}
            if self.key is not None and scope["path"] != "/health" and not _knows(headers, self.key):
                raise ApiError(401, "a valid API key is missing: Authorization: Bearer KEY", code="invalid_api_key")
            body = await self._body(headers, receive)
        except ApiError as error:
            await answer(error)(scope, receive, send)
            return
        except ClientGone:
            return
        await self.app(scope, _replayed(body, receive), send)

    async def _body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        """The whole body."""
        announced = headers.get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > self.most_bytes:
            raise self._too_large()
        body = bytearray()
        try:
            with anyio.fail_after(self.read_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    body += message.get("body", b"")
                    if len(body) > self.most_bytes:
                        raise self._too_large()
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError as error:
            raise ApiError(408, f"the body did not come within {self.read_s:g} seconds", code="timeout") from error

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body has more than {self.most_bytes:,} bytes", code="body_too_large")


def _knows(headers: dict[bytes, bytes], key: str) -> bool:
    """Whether a request brings the key: as a bearer, as OpenAI's clients do, or as a password, as a browser does."""
    way, _, given = headers.get(b"authorization", b"").partition(b" ")
    if way.lower() == b"basic":
        try:
            given = base64.b64decode(given, validate=True).partition(b":")[2]
        except ValueError:
            return False
    return hmac.compare_digest(given, key.encode())


def _replayed(body: bytes, receive: Receive) -> Receive:
    """The body once more, and then whatever the client does next."""
    read = False

    async def again() -> MutableMapping[str, Any]:
        nonlocal read
        if read:
            return await receive()
        read = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
