"""Errors as OpenAI's API words them: an envelope that its clients know how to raise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(eq=False)
class ApiError(Exception):
    """An answer that is an error."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None

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


def not_ready(why: str) -> ApiError:
    """Nobody can be served at the moment."""
    return ApiError(503, why, code="unavailable", retry_after=1)


def too_many(why: str) -> ApiError:
    """Nobody more can be served at the moment."""
    return ApiError(429, why, code="queue_full", retry_after=1)
