"""Errors as OpenAI's API words them: an envelope that its clients know how to raise."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None,
        retry_after: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after = retry_after

    @property
    def envelope(self) -> dict[str, Any]:
        """The body."""
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """What goes with it."""
        found = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return found | ({"WWW-Authenticate": 'Basic realm="marsbench"'} if self.status == 401 else {})


def wrong(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that can never be answered."""
    return ApiError(400, message, param=param, code=code)


def engine_lost() -> ApiError:
    """The engine process has died under a request."""
    return ApiError(500, "the engine process has ended; nothing of this request is left", code="engine_lost")


def not_ready(why: str) -> ApiError:
    """Nobody can be served at the moment."""
    return ApiError(503, why, code="unavailable", retry_after=1)
