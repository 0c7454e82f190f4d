"""The routes: OpenAI's, and a few of our own."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from marsbench import __version__
from marsbench.serving.answers import Answers, Completion
from marsbench.serving.desk import Desk
from marsbench.serving.guards import EventStream, Gate, Json, answer, until_gone
from marsbench.serving.wire import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    SpeedRequest,
    TokenizeRequest,
)

_ERROR = {"description": "An error in OpenAI's envelope."}


def build(desk: Desk, say: Callable[[str], object] = print) -> Gate:
    """The application."""
    answers = Answers(desk)
    app = FastAPI(
        title="marsbench", version=__version__, docs_url=None, redoc_url=None,
        responses={code: _ERROR for code in (400, 401, 403, 404, 408, 413, 422, 429, 500, 503, 504)},
        exception_handlers=dict.fromkeys((ApiError, RequestValidationError, HTTPException, ClientDisconnect, Exception),
                                         _explained),
    )  # fmt: skip
    for routes in (_complete, _describe, _read, _steer):
        routes(app, answers)
    return Gate(app, desk.settings, say, desk.check_room)


async def _explained(_: Request, error: Exception) -> Response:
    """Every error in one envelope."""
    match error:
        case ApiError():
            return answer(error)
        case RequestValidationError():
            first = error.errors()[0]
            place = [str(part) for part in first["loc"] if part != "body"]
            what = f"{'.'.join(place) or 'the body'}: {first['msg']}"
            return answer(ApiError.wrong(what, place[0] if place else None))
        case HTTPException():
            found = answer(ApiError(error.status_code, str(error.detail)))
            found.headers.update(error.headers or {})
            return found
        case ClientDisconnect():
            return Response(status_code=499)  # which nobody reads
    return answer(ApiError(500, "the server has made a mistake; its log has the traceback"))


def _complete(app: FastAPI, answers: Answers) -> None:
    """Chat and plain completions."""

    async def answered(body: ChatRequest | CompletionRequest, request: Request) -> Response:
        _check_model(answers, body.model)
        body.check()
        found = Completion(answers, body, request.scope["log"])
        if body.stream:
            return EventStream(found.events(), answers.settings.ping)
        return Json(await until_gone(request.receive, found.whole()))

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        return await answered(body, request)

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue one prompt or several, given as text or as token ids."""
        return await answered(body, request)


def _check_model(answers: Answers, name: str | None) -> None:
    """Refuse a name that is not our checkpoint's."""
    own = answers.settings.name
    if name not in (None, own, answers.settings.checkpoint):
        raise ApiError(404, f"there is no model {name!r}; this server has {own!r}", param="model",
                       code="model_not_found")  # fmt: skip


def _describe(app: FastAPI, answers: Answers) -> None:
    """What there is, and how it is."""
    desk, name, made = answers.desk, answers.settings.name, int(time.time())
    page = (Path(__file__).parent / "page.html").read_bytes()

    def model() -> dict[str, Any]:
        return {"id": name, "object": "model", "created": made, "owned_by": "marsbench", "root": name,
                "max_model_len": answers.ready.context}  # fmt: skip

    @app.get("/v1/models")
    async def models() -> Response:
        """The one model."""
        return Json({"object": "list", "data": [model()]})

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        """The one model by its name."""
        _check_model(answers, name)
        return Json(model())

    @app.get("/ping")
    @app.get("/health")
    async def health() -> Response:
        """200 where requests are taken."""
        desk.check_open()
        return Json({"status": "ok"})

    @app.get("/version")
    async def version() -> Response:
        """The version of marsbench."""
        return Json({"version": __version__})

    @app.get("/metrics")
    async def metrics() -> Response:
        """Prometheus' exposition format."""
        return Response(desk.metrics.page(), media_type="text/plain; version=0.0.4")

    @app.get("/", include_in_schema=False)
    async def look() -> Response:
        """A chat with the knob beside it."""
        return Response(page, media_type="text/html", headers={"Content-Security-Policy": _ALONE})


def _read(app: FastAPI, answers: Answers) -> None:
    """What the tokenizer says."""

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        """A text's token ids."""
        body.check()
        with answers.desk.let_in():
            if body.messages is not None:
                ids = await answers.chat_ids(body.messages)
            else:
                ids = await answers.text_ids(body.prompt or "", body.add_special_tokens)
        return Json({"count": len(ids), "max_model_len": answers.ready.context, "tokens": ids})

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Response:
        """Token ids as text, special ones too."""
        body.check()
        with answers.desk.let_in():
            if len(body.tokens) > answers.ready.context:
                raise ApiError.wrong(f"more tokens than this model's context, {answers.ready.context}", "tokens")
            if body.tokens and max(body.tokens) >= answers.ready.vocabulary:
                raise ApiError.wrong(f"a token id lies outside the vocabulary of {answers.ready.vocabulary}", "tokens")
            return Json({"prompt": await answers.aside(len(body.tokens), answers.decode_all, body.tokens)})


def _steer(app: FastAPI, answers: Answers) -> None:
    """The knob."""
    desk = answers.desk

    def described() -> Response:
        knobs = {name: getattr(desk.settings, name) for name in SpeedRequest.model_fields}
        found = knobs | {"methods": list(answers.ready.methods)}
        return Json(found | {"state": desk.state._asdict() | {"queued": desk.queued}})

    @app.get("/v1/speed")
    async def speed() -> Response:
        """The default knobs, and how the engine is doing."""
        return described()

    @app.put("/v1/speed")
    async def set_speed(body: SpeedRequest) -> Response:
        """Turn the default knobs, for everybody who fixed none of their own, from the next forward on."""
        desk.check_open()
        desk.turn(**body.model_dump(exclude_none=True))
        return described()


# The page is whole in itself, and its browser holds it to that.
_ALONE = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
