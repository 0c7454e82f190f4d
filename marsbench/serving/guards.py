"""What stands before every route: the key and the body; and whether the client is still listening."""

import asyncio
import base64
import hmac
import json
import re
import time
import uuid
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, suppress
from logging import makeLogRecord
from logging.handlers import RotatingFileHandler
from typing import Any, TypeVar

import anyio
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, RedirectResponse, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from marsbench.serving.messages import Settings
from marsbench.serving.wire import ApiError, event

T = TypeVar("T")
_LOG_BYTES = 64 * 2**20  # of a log of requests, which is then moved aside


async def until_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What the work comes to; it is cancelled as soon as the client goes away (`ClientDisconnect`)."""
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def answer(error: ApiError) -> JSONResponse:
    return JSONResponse(error.envelope, status_code=error.status, headers=error.headers)


class EventStream(StreamingResponse):
    """Server-sent events, written as they come; before anything is, an error still has a status of its own.

    After `ping_s` seconds of silence a comment goes out, because proxies cut silent streams.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], ping_s: float) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events, self._ping_s, self._writing = events, ping_s, asyncio.Lock()
        self._begun, self._wrote_at = False, time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pings = asyncio.ensure_future(self._ping(send))
        try:
            with suppress(ClientDisconnect):  # an answer that is not complete: the connection is closed
                await until_gone(receive, self._write_all(scope, send))
        finally:
            pings.cancel()

    async def _write_all(self, scope: Scope, send: Send) -> None:
        async with aclosing(self._events) as events:
            try:
                async for body in events:
                    await self._write(send, body)
            except ApiError as error:
                if not self._begun:
                    raise
                scope["log"]["error"] = error.code
                await self._write(send, event(error.envelope))
        await self._write(send, b"", more=False)

    async def _write(self, send: Send, body: bytes, *, more: bool = True) -> None:
        async with self._writing:
            begun, self._begun, self._wrote_at = self._begun, True, time.monotonic()
            if not begun:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": body, "more_body": more})

    async def _ping(self, send: Send) -> None:
        while self._ping_s:
            await asyncio.sleep(max(0.0, self._wrote_at + self._ping_s - time.monotonic()))
            if time.monotonic() >= self._wrote_at + self._ping_s:
                await self._write(send, b": ping\n\n")


class Guard:
    """ASGI middleware: a request from a foreign page, without a key, or with a body that is too large or too slow, gets
    no further. Every answer has its number, the client's own if it has given one.
    """

    def __init__(self, app: Any, settings: Settings) -> None:
        self._app, self._settings, file = app, settings, settings.request_log
        self._log = RotatingFileHandler(file, maxBytes=_LOG_BYTES, backupCount=1) if file else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        number = headers.get("x-request-id", "")
        number = number if re.fullmatch(r"[\w.:-]{1,128}", number, re.ASCII) else uuid.uuid4().hex
        began = time.time()
        scope["log"] = entry = {"at": began, "id": number, "route": f"{scope['method']} {scope['path']}"}
        added = [(b"x-request-id", number.encode()), (b"x-content-type-options", b"nosniff")]

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                entry["status"] = message["status"]
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        try:
            await self._let_in(scope, headers, receive, sent)
        except ClientDisconnect:
            return
        except ApiError as error:
            await answer(error)(scope, receive, sent)
        finally:
            if self._log is not None:  # what cannot be written is said on the terminal, and ends nothing
                entry["seconds"] = round(time.time() - began, 4)
                self._log.handle(makeLogRecord({"msg": json.dumps(entry)}))

    async def _let_in(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        prefix = self._settings.root_path.rstrip("/")
        if prefix and scope["path"] == prefix:  # the page asks for what lies beside it
            await RedirectResponse(f"{prefix}/")(scope, receive, send)
            return
        if prefix and scope["path"].startswith(f"{prefix}/"):  # else a proxy has taken it away
            scope["path"] = scope["path"].removeprefix(prefix)
        origin, known = headers.get("origin", "").lower(), {*self._settings.cors_origin}
        is_ours = origin.partition("://")[2] in (headers.get("host", "").lower(), *self._settings.allowed_host)
        if origin and not is_ours and not known & {"*", origin}:  # in a browser here it could turn the knobs
            raise ApiError(403, f"pages of {origin} may not ask this server: see --cors-origin", code="foreign_origin")
        self._check_key(scope, headers)
        left = [await self._body(headers, receive)]

        async def again() -> Message:
            """The body once more, then what the client does next."""
            return {"type": "http.request", "body": left.pop(), "more_body": False} if left else await receive()

        await self._app(scope, again, send)

    def _check_key(self, scope: Scope, headers: Headers) -> None:
        settings, keys = self._settings, list(self._settings.api_key)
        if (scope["method"], scope["path"]) == ("PUT", "/v1/speed"):
            if settings.lock_speed:
                raise ApiError(403, "the speed settings of this server are locked", code="locked")
            keys = keys if settings.speed_key is None else [settings.speed_key]
        elif keys and settings.speed_key is not None:
            keys.append(settings.speed_key)
        if not keys or scope["path"] in ("/health", "/ping"):
            return
        way, _, given = headers.get("authorization", "").encode("latin-1").partition(b" ")
        if way.lower() == b"basic":
            try:
                given = base64.b64decode(given, validate=True).partition(b":")[2]
            except ValueError:
                given = b""
        if not any([hmac.compare_digest(given, key.encode()) for key in keys]):  # all of them: it takes as long
            raise ApiError(401, "a valid API key is missing: Authorization: Bearer KEY", code="invalid_api_key")

    async def _body(self, headers: Headers, receive: Receive) -> bytes:
        most, read_s = self._settings.max_body, self._settings.read_timeout
        too_large = ApiError(413, f"the body has more than {most:,} bytes", code="body_too_large")
        announced = headers.get("content-length", "0")
        if announced.isdecimal() and int(announced) > most:
            raise too_large
        body = bytearray()
        try:
            with anyio.fail_after(read_s):
                async for part in Request({"type": "http"}, receive).stream():
                    body += part
                    if len(body) > most:
                        raise too_large
                return bytes(body)
        except TimeoutError as error:
            raise ApiError(408, f"the body did not come within {read_s:g} seconds", code="timeout") from error


def is_local(host: str) -> bool:
    """Whether an address can only be reached from this machine."""
    return host.lower() in ("localhost", "::1") or host.startswith("127.")
