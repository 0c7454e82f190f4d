"""The routes: OpenAI's, and a few of our own."""

import time
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from marsbench.serving.answers import Answers, Completion
from marsbench.serving.engine_client import EngineClient
from marsbench.serving.guards import EventStream, Guard, answer, is_local, until_gone
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
    return Starlette(
        routes=[
            Route("/v1/chat/completions", routes.chat_completions, methods=["POST"]),
            Route("/v1/completions", routes.completions, methods=["POST"]),
            Route("/v1/models", routes.models),
            Route("/v1/models/{name:path}", routes.one_model),
            Route("/v1/speed", routes.speed),
            Route("/v1/speed", routes.set_speed, methods=["PUT"]),
            Route("/health", routes.health),
            Route("/metrics", routes.metrics),
            Route("/", routes.look),
        ],
        middleware=[*doors, Middleware(Guard, settings)],
        exception_handlers=dict.fromkeys((ApiError, HTTPException, ClientDisconnect, Exception), _explained),
    )


async def _explained(_: Request, error: Exception) -> Response:
    """Every error in one envelope."""
    match error:
        case ApiError():
            return answer(error)
        case HTTPException():
            response = answer(ApiError(error.status_code, str(error.detail)))
            response.headers.update(error.headers or {})
            return response
        case ClientDisconnect():
            return Response(status_code=499)  # the client is gone
    return answer(ApiError(500, "the server has made a mistake; its log has the traceback"))


class Routes:
    def __init__(self, engine: EngineClient) -> None:
        self._engine, self._answers, self._name = engine, Answers(engine), engine.settings.name
        self._made, self._page = int(time.time()), (Path(__file__).parent / "page.html").read_bytes()

    async def chat_completions(self, request: Request) -> Response:
        return await self._answered(read(await request.body(), ChatRequest), request)

    async def completions(self, request: Request) -> Response:
        return await self._answered(read(await request.body(), CompletionRequest), request)

    async def _answered(self, body: ChatRequest | CompletionRequest, request: Request) -> Response:
        self._check_model(body.model)
        body.check()
        completion = Completion(self._answers, body)
        if body.stream:
            return EventStream(completion.events())
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
        """200 where requests are taken."""
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
        """A chat with the knob beside it."""
        return Response(self._page, media_type="text/html", headers={"Content-Security-Policy": _ALONE})


# The page is whole in itself, and its browser holds it to that.
_ALONE = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
