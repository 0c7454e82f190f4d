"""The routes, OpenAI's and a few of our own, and a server from its first line to its last."""

import asyncio
import contextlib
import gc
import signal
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from marsbench import __version__
from marsbench.errors import UserError
from marsbench.serving.answers import Answers, Completion
from marsbench.serving.engine_client import EngineClient
from marsbench.serving.guards import EventStream, Guard, answer, is_local, until_gone
from marsbench.serving.messages import Settings
from marsbench.serving.openapi import description
from marsbench.serving.wire import ApiError, ChatRequest, CompletionRequest, SpeedRequest, read


def build(engine: EngineClient) -> Starlette:
    routes, settings = Routes(engine), engine.settings
    names = ["localhost", "127.0.0.1", "::1", "[::1]", settings.host, *settings.allowed_host]
    if not is_local(settings.host) and not settings.allowed_host:
        names = ["*"]
    doors = [Middleware(TrustedHostMiddleware, allowed_hosts=names, www_redirect=False)]
    if settings.cors_origin:
        doors.append(Middleware(
            CORSMiddleware, allow_origins=settings.cors_origin, allow_methods=["GET", "POST", "PUT"],
            allow_headers=["*"], expose_headers=["X-Request-Id", "Retry-After"],
        ))  # fmt: skip
    paths = [
        Route("/v1/chat/completions", partial(routes.completed, ChatRequest), methods=["POST"], name="answer a chat"),
        Route("/v1/completions", partial(routes.completed, CompletionRequest), methods=["POST"], name="extend a text"),
        Route("/v1/models", routes.models, name="the models"),
        Route("/v1/models/{name:path}", routes.one_model, name="one model"),
        Route("/v1/speed", routes.speed, name="the default settings, and the engine's state"),
        Route("/v1/speed", routes.set_speed, methods=["PUT"], name="change the default settings"),
        *[Route(path, routes.health, name="whether requests are taken") for path in ("/health", "/ping")],
        Route("/version", lambda _: JSONResponse({"version": __version__}), name="the version of marsbench"),
        Route("/metrics", routes.metrics, name="metrics in the format of Prometheus"),
    ]
    described = description(paths)
    return Starlette(
        routes=[*paths, Route("/openapi.json", lambda _: JSONResponse(described)), Route("/", routes.look)],
        middleware=[*doors, Middleware(Guard, settings)],
        exception_handlers=dict.fromkeys((ApiError, HTTPException, ClientDisconnect, Exception), _explained),
    )


async def _explained(_: Request, error: Exception) -> Response:
    """Every error in one envelope."""
    match error:
        case ApiError():
            return answer(error)
        case HTTPException():
            said = ApiError(error.status_code, str(error.detail))
            return JSONResponse(said.envelope, said.status, error.headers)
        case ClientDisconnect():
            return Response(status_code=499)  # the client is gone
    return answer(ApiError(500, "the server has made a mistake; its log has the traceback"))


class Routes:
    def __init__(self, engine: EngineClient) -> None:
        self._engine, self._answers, self._name = engine, Answers(engine), engine.settings.name
        self._made, self._page = int(time.time()), (Path(__file__).parent / "page.html").read_bytes()

    async def completed(self, kind: type[ChatRequest | CompletionRequest], request: Request) -> Response:
        body = read(await request.body(), kind)
        self._check_model(body.model)
        body.check()
        completion = Completion(self._answers, body, request.scope["log"])
        if body.stream:
            return EventStream(completion.events(), self._engine.settings.ping)
        return JSONResponse(await until_gone(request.receive, completion.whole()))

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self._name, self._engine.settings.checkpoint):
            raise ApiError(404, f"there is no model {name!r}; this server has {self._name!r}", param="model",
                           code="model_not_found")  # fmt: skip

    def _model(self) -> dict[str, Any]:
        return {"id": self._name, "object": "model", "created": self._made, "owned_by": "marsbench",
                "root": self._name, "max_model_len": self._answers.ready.context}  # fmt: skip

    async def models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def one_model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(self._model())

    async def health(self, _: Request) -> Response:
        self._engine.check_open()
        return JSONResponse({"status": "ok"})

    async def metrics(self, _: Request) -> Response:
        return Response(generate_latest(self._engine.metrics.registry), media_type="text/plain; version=0.0.4")

    async def speed(self, _: Request) -> Response:
        engine = self._engine
        knobs = {name: getattr(engine.settings, name) for name in SpeedRequest.__struct_fields__}
        said = knobs | {"methods": list(self._answers.ready.methods)}
        return JSONResponse(said | {"state": engine.state._asdict() | {"queued": engine.queued}})

    async def set_speed(self, request: Request) -> Response:
        """Turn the default knobs, for all requests that fixed none of their own, from the next forward on."""
        self._engine.check_open()
        body = msgspec.structs.asdict(read(await request.body(), SpeedRequest))
        self._engine.turn(**{name: value for name, value in body.items() if value is not None})
        return await self.speed(request)

    async def look(self, _: Request) -> Response:
        return Response(self._page, media_type="text/html", headers={"Content-Security-Policy": _ALONE})


# The page is whole in itself, and its browser holds it to that.
_ALONE = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)


_WAITING = 2048  # connections that the system keeps for us


class Server(uvicorn.Server):
    """uvicorn that leaves signals to us: it would close its socket at once, and newcomers would get no word."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to an address; port 0 is any that is free. `UserError` where it cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except OSError as error:
        fix = "give another --host or --port"
        raise UserError(f"cannot listen: {error.strerror}", where=f"{host}:{port}", fix=fix) from error
    return listening


def serve(settings: Settings, say: Callable[[str], None]) -> None:
    if any(key is not None and not key.strip() for key in (*settings.api_key, settings.speed_key)):
        raise UserError("an API key is empty, so every request would have it", fix="give a key, or none at all")
    own = listen(settings.host, settings.port)

    def said(text: str) -> None:
        with contextlib.suppress(OSError):  # the reader of this output may be gone: that ends nothing
            say(text)

    asyncio.run(_serve(settings, own, said))


async def _serve(settings: Settings, own: socket.socket, say: Callable[[str], None]) -> None:
    engine = EngineClient(settings, say)
    engine.start()
    draining: list[asyncio.Task[None]] = []

    def heed() -> None:
        """The first signal to end lets answers be finished, the second does not."""
        if draining:
            engine.turn(drain=0.0)
        elif not engine.started.is_set():
            engine.started.set()
            engine.over.set()
        else:
            say("ending: no request is let in any more; a second signal ends at once")
            draining.append(asyncio.create_task(engine.drain()))

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, heed)
    try:
        await engine.started.wait()
        if engine.fatal is not None:
            raise engine.fatal
        if engine.ready is None:  # a signal came first
            return
        if settings.method not in (None, *engine.ready.methods):
            what = f"method {settings.method!r} needs a checkpoint trained with masks"
            fix = "use a MARS checkpoint, --method ar, or --untrained-masks to try it anyway"
            raise UserError(what, where=settings.checkpoint, fix=fix)
        server = Server(uvicorn.Config(
            build(engine), log_level="warning", access_log=False, timeout_graceful_shutdown=5, lifespan="off",
            backlog=_WAITING, limit_concurrency=settings.max_connections + 1, ws="none",
        ))  # fmt: skip
        gc.freeze()  # what is there to stay need not be looked through whenever a large body is read
        own.listen(_WAITING)  # from now on no connection is refused
        serving = asyncio.create_task(server.serve(sockets=[own]))
        shown, number = own.getsockname()[:2]
        if not settings.api_key and not is_local(settings.host):
            say("warning: all who reach this address may use the server: see --api-key")
        say(f"serving {settings.name} on http://{f'[{shown}]' if ':' in shown else shown}:{number}")
        over = asyncio.create_task(engine.over.wait())
        await asyncio.wait({serving, over}, return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        await serving
        over.cancel()
        if engine.fatal is not None:
            raise engine.fatal
    finally:
        engine.close()
        own.close()
