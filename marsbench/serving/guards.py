"""What stands before every route: whose names and pages are ours, the key, the body; and who is still listening."""

from __future__ import annotations

import asyncio
import base64
import hmac
import ipaddress
import re
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar
from urllib.parse import urlsplit

import anyio
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from marsbench.serving.logs import Log
from marsbench.serving.settings import Settings
from marsbench.serving.wire import ApiError, dumps, event

T = TypeVar("T")
_OPEN = ("/health", "/ping")  # routes that ask for no key
_MOST_PARTS = 2**17  # lists, objects and fields of a body: each costs the parser far more than its bytes
_QUOTED = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)  # whatever it begins with, it matches: never twice


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


class Json(Response):
    """A body in JSON, in ASCII."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return content if isinstance(content, bytes) else dumps(content).encode("ascii")


def answer(error: ApiError) -> Json:
    """An error as a response."""
    return Json(error.envelope, status_code=error.status, headers=error.headers)


class EventStream(StreamingResponse):
    """Server-sent events, written as they come.

    Nothing goes out before the first event: until then, an error still has a status of its own. After `ping_s` seconds
    without an event a comment says that the stream is alive, whose status is then 200 too.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], ping_s: float) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events, self._ping_s = events, ping_s
        self._begun, self._wrote_at, self._writing = False, time.monotonic(), asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pings = asyncio.ensure_future(self._ping(send))
        try:
            await until_gone(receive, self._write_all(send))
        except ClientDisconnect:
            return  # an answer that is not complete: the connection is closed
        finally:
            pings.cancel()

    async def _write_all(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            try:
                async for body in events:
                    await self._write(send, body)
            except ApiError as error:
                if not self._begun:
                    raise
                await self._write(send, event(error.envelope))
        async with self._writing:  # no ping comes behind the end
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, send: Send, body: bytes) -> None:
        async with self._writing:
            if not self._begun:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                self._begun = True
            await send({"type": "http.response.body", "body": body, "more_body": True})
        self._wrote_at = time.monotonic()

    async def _ping(self, send: Send) -> None:
        while self._ping_s:
            await asyncio.sleep(max(0.0, self._wrote_at + self._ping_s - time.monotonic()))
            if time.monotonic() >= self._wrote_at + self._ping_s:
                await self._write(send, b": ping\n\n")


class Gate:
    """ASGI middleware: who comes by a name or a page that is not ours, has no key, or sends too much or too slowly,
    gets no further. Every answer has its number, the client's own if it has given one.
    """

    def __init__(
        self, app: Any, settings: Settings, say: Callable[[str], object] = print,
        check_room: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """`check_room` raises `ApiError` where nobody more may wait for an answer."""
        self._app, self._settings, self._check_room = app, settings, check_room
        self._turn = asyncio.Lock()
        self._names = {"localhost", settings.host.lower(), *(name.lower() for name in settings.allowed_host)}
        self._log = Log(settings.request_log, say)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        number = headers.get("x-request-id", "")
        scope["id"] = number = number if re.fullmatch(r"[\w.:-]{1,128}", number, re.ASCII) else uuid.uuid4().hex
        scope["log"] = entry = {"at": time.time(), "id": number, "route": f"{scope['method']} {scope['path']}"}
        added = [(b"x-request-id", number.encode()), (b"x-content-type-options", b"nosniff"), *self._cors(headers)]
        began = time.perf_counter()

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
            self._log.write(entry | {"seconds": round(time.perf_counter() - began, 4)})

    async def _let_in(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        prefix = self._settings.root_path.rstrip("/")
        if prefix and scope["path"] == prefix:  # the page asks for what lies beside it
            await RedirectResponse(f"{prefix}/")(scope, receive, send)
            return
        if prefix and scope["path"].startswith(f"{prefix}/"):  # else a proxy has taken it away
            scope["path"] = scope["path"].removeprefix(prefix)
        self._check_name(headers)
        if scope["method"] == "OPTIONS" and "access-control-request-method" in headers and self._cors(headers):
            await Response(status_code=204)(scope, receive, send)
            return
        self._check_key(scope, headers)
        left = [await self._body(headers, receive)]
        if scope["method"] == "POST":
            await self._take_turn(scope["path"])
        if _parts(left[0]) > _MOST_PARTS and _parts(_QUOTED.sub(b"", left[0])) > _MOST_PARTS:
            # It would keep the event loop busy merely by being parsed.
            raise ApiError.wrong(f"the body has more than {_MOST_PARTS:,} lists, objects and fields")

        async def again() -> Message:
            """The body once more, and then whatever the client does next."""
            return {"type": "http.request", "body": left.pop(), "more_body": False} if left else await receive()

        await self._app(scope, again, send)

    async def _take_turn(self, path: str) -> None:
        """Wait for a turn of the event loop in which no other body is read, and be refused early where need be.

        To read a body takes milliseconds: if all that come at once did so in one turn, whoever asks for /health, and
        all who stream, would stand behind them.
        """
        async with self._turn:
            await asyncio.sleep(0)
        if path.endswith("/completions"):
            self._check_room()

    def _check_name(self, headers: Headers) -> None:
        """Refuse names and pages of others: one that leads a browser here acts for whoever sits before it."""
        given = headers.get("host", "localhost").lower()
        if "*" not in self._names and not (_is_address(given) or _host(given) in self._names):
            raise ApiError(403, f"this server is not called {given!r}: see --allowed-host", code="foreign_host")
        origin = headers.get("origin", "").lower()
        netloc = origin.partition("://")[2]
        ours = netloc == given or _host(netloc) in self._settings.allowed_host
        if origin and not ours and not self._cors(headers):
            raise ApiError(403, f"pages of {origin} may not ask this server: see --cors-origin", code="foreign_origin")

    def _cors(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        """What tells a browser that the page may read the answer."""
        origin = headers.get("origin")
        if origin is None or not {"*", origin} & {*self._settings.cors_origin}:
            return []
        return Headers({
            "access-control-allow-origin": origin, "vary": "Origin", "access-control-max-age": "600",
            "access-control-allow-methods": "GET, POST, PUT",
            "access-control-allow-headers": headers.get("access-control-request-headers", "*"),
            "access-control-expose-headers": "X-Request-Id, Retry-After",
        }).raw  # fmt: skip

    def _check_key(self, scope: Scope, headers: Headers) -> None:
        """Refuse who has no key: as a bearer, as OpenAI's clients have it, or as a password, as a browser does."""
        settings, keys = self._settings, list(self._settings.api_key)
        if (scope["method"], scope["path"]) == ("PUT", "/v1/speed"):
            if settings.lock_speed:
                raise ApiError(403, "the knobs of this server are locked", code="locked")
            keys = keys if settings.speed_key is None else [settings.speed_key]
        elif keys and settings.speed_key is not None:
            keys.append(settings.speed_key)
        if not keys or scope["path"] in _OPEN:
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
        """The whole body."""
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


def _parts(body: bytes) -> int:
    return sum(map(body.count, (b"[", b"{", b":")))


def is_open_to_all(settings: Settings) -> bool:
    """Whether whoever reaches the server from another machine may use it."""
    host = settings.host.lower()
    return not (settings.api_key or host in ("localhost", "::1") or host.startswith("127."))


def _host(netloc: str) -> str:
    """The host of `host:port`."""
    try:
        return urlsplit(f"//{netloc}").hostname or ""
    except ValueError:
        return ""


def _is_address(netloc: str) -> bool:
    """Whether a host is an address: nobody can make such a name lead elsewhere."""
    try:
        return bool(ipaddress.ip_address(_host(netloc)))
    except ValueError:
        return False
