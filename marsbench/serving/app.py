"""The routes: OpenAI's, and a few of our own."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from marsbench import __version__
from marsbench.serving.answers import Answers, Defaults, Shape, chat_choice, completion_choice
from marsbench.serving.desk import Desk
from marsbench.serving.errors import ApiError, wrong
from marsbench.serving.guards import ClientGone, EventStream, Gate, Json, answer, until_gone
from marsbench.serving.wire import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    SpeedRequest,
    TokenizeRequest,
)


@dataclass(frozen=True)
class Doors:
    """How the server guards itself."""

    key: str | None = None
    most_bytes: int = 4 * 2**20  # of a body
    read_s: float = 20.0  # that a body may take to come
    stall_s: float = 60.0  # that a reader may take nothing


_ERROR = {"description": "An error in OpenAI's envelope."}


def build(desk: Desk, defaults: Defaults, doors: Doors) -> Gate:
    """The application."""
    app = FastAPI(
        title="marsbench", version=__version__, docs_url=None, redoc_url=None,
        responses={code: _ERROR for code in (400, 401, 404, 408, 413, 422, 429, 500, 503)},
    )  # fmt: skip
    answers = Answers(desk, defaults)
    _explain_errors(app)
    _complete(app, desk, answers, doors)
    _describe(app, desk, answers)
    _steer(app, desk, answers)
    _show(app)
    return Gate(app, doors.key, doors.most_bytes, doors.read_s)


def _explain_errors(app: FastAPI) -> None:
    """Every error in one envelope."""

    @app.exception_handler(ApiError)
    async def known(_: Request, error: ApiError) -> Response:
        return answer(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        place = [str(part) for part in first["loc"] if part != "body"]
        return answer(wrong(f"{'.'.join(place) or 'the body'}: {first['msg']}", place[0] if place else None))

    @app.exception_handler(HTTPException)
    async def refused(_: Request, error: HTTPException) -> Response:
        found = answer(ApiError(error.status_code, str(error.detail)))
        found.headers.update(error.headers or {})
        return found

    @app.exception_handler(ClientGone)
    async def gone(_: Request, error: ClientGone) -> Response:
        return Response(status_code=499)  # which nobody reads

    @app.exception_handler(Exception)
    async def bug(_: Request, error: Exception) -> Response:
        return answer(ApiError(500, "the server has made a mistake; its log has the traceback"))


def _complete(app: FastAPI, desk: Desk, answers: Answers, doors: Doors) -> None:
    """Chat and plain completions."""

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        answers.check_model(body.model)
        body.check()
        shape = Shape(answers.defaults.model, chat=True, with_usage=_with_usage(body))
        if body.stream:
            return EventStream(answers.events(body, shape), doors.stall_s)
        found = await until_gone(request.receive, answers.collect(body))
        return Json(shape.whole(found, [chat_choice(found[0], _token_text(answers))]))

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue one prompt or several, given as text or as token ids."""
        answers.check_model(body.model)
        body.check()
        if body.stream and len(body.prompts) > 1:
            raise wrong("a stream takes one prompt", "prompt")
        shape = Shape(answers.defaults.model, chat=False, with_usage=_with_usage(body))
        if body.stream:
            return EventStream(answers.events(body, shape), doors.stall_s)
        found = await until_gone(request.receive, answers.collect(body))
        echoed = [_echo(body, prompt, answers) for prompt in body.prompts]
        token = _token_text(answers)
        choices = [completion_choice(number, *one, token) for number, one in enumerate(zip(found, echoed, strict=True))]
        return Json(shape.whole(found, choices))


def _with_usage(body: ChatRequest | CompletionRequest) -> bool:
    return body.stream_options is not None and body.stream_options.include_usage


def _echo(body: CompletionRequest, prompt: str | list[int], answers: Answers) -> str | None:
    """The prompt's text where it is to be repeated."""
    if not body.echo:
        return None
    return prompt if isinstance(prompt, str) else answers.decode(prompt)


def _token_text(answers: Answers) -> Callable[[int], str]:
    """How a token looks by itself."""
    return lambda token: answers.decode_all([token])


def _describe(app: FastAPI, desk: Desk, answers: Answers) -> None:
    """What there is, and how it is."""

    @app.get("/v1/models")
    async def models() -> Response:
        """The one model."""
        one = {"id": answers.defaults.model, "object": "model", "created": made, "owned_by": "marsbench"}
        about = {"root": answers.defaults.model, "max_model_len": answers.ready.context}
        return Json({"object": "list", "data": [one | about]})

    @app.get("/health")
    async def health() -> Response:
        """200 where requests are taken."""
        desk.check_open()
        return Json({"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        """Prometheus' exposition format."""
        return Response(desk.metrics.page(), media_type="text/plain; version=0.0.4")

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        """A text's token ids."""
        if (body.prompt is None) == (body.messages is None):
            raise wrong("give either 'prompt' or 'messages'", "prompt")
        if body.messages is not None:
            ids = await answers.aside(answers.chat_ids, body.messages)
        else:
            ids = await answers.aside(answers.text_ids, body.prompt, body.add_special_tokens)
        return Json({"count": len(ids), "max_model_len": answers.ready.context, "tokens": ids})

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Response:
        """Token ids as text, special ones too."""
        if body.tokens and max(body.tokens) >= answers.ready.vocabulary:
            raise wrong(f"a token id lies outside the vocabulary of {answers.ready.vocabulary}", "tokens")
        return Json({"prompt": await answers.aside(answers.decode_all, body.tokens)})

    made = int(time.time())


def _steer(app: FastAPI, desk: Desk, answers: Answers) -> None:
    """The knob."""

    def described() -> dict[str, Any]:
        speed = desk.speed
        knobs = {"threshold": speed.threshold, "draft_threshold": speed.draft_threshold, "block_size": speed.window}
        state = desk.state._asdict() | {"queued": desk.queued}
        return knobs | {"methods": list(answers.ready.methods), "state": state}

    @app.get("/v1/speed")
    async def speed() -> Response:
        """The default knobs, and how the engine is doing."""
        return Json(described())

    @app.put("/v1/speed")
    async def set_speed(body: SpeedRequest) -> Response:
        """Turn the default knobs, for everybody who fixed none of their own, from the next forward on."""
        desk.check_open()
        given = body.model_dump(exclude_none=True)
        window = given.pop("block_size", desk.speed.window)
        desk.turn(replace(desk.speed, window=window, **given))
        return Json(described())


# The page is whole in itself, and its browser holds it to that.
_ALONE = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)


def _show(app: FastAPI) -> None:
    """The page to look at."""
    page = (Path(__file__).parent / "page.html").read_bytes()

    @app.get("/", include_in_schema=False)
    async def look() -> Response:
        """A chat with the knob beside it."""
        return Response(page, media_type="text/html", headers={"Content-Security-Policy": _ALONE})
