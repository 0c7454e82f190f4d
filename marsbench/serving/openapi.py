"""The server's routes, and the bodies that they take, as OpenAPI describes them."""

from collections.abc import Iterable
from typing import Any

import msgspec
from starlette.routing import Route

from marsbench import __version__
from marsbench.serving.wire import ChatRequest, CompletionRequest, Message, SpeedRequest, StreamOptions, TextPart

_TAKEN = {
    ("POST", "/v1/chat/completions"): ChatRequest, ("POST", "/v1/completions"): CompletionRequest,
    ("PUT", "/v1/speed"): SpeedRequest,
}  # fmt: skip
_TEXTS = {"type": ["string", "null"]}
_ERROR = {"message": {"type": "string"}, "type": {"type": "string"}, "param": _TEXTS, "code": _TEXTS}


def description(routes: Iterable[Route]) -> dict[str, Any]:
    """A document in OpenAPI 3.1; a route's name is its summary."""
    kinds = [*_TAKEN.values(), Message, StreamOptions, TextPart]
    schemas, parts = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    bodies = dict(zip(_TAKEN, schemas, strict=False))
    parts["Error"] = {"type": "object", "properties": {"error": {"type": "object", "properties": _ERROR}}}
    error = {"description": "an error", "content": _json({"$ref": "#/components/schemas/Error"})}
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path, names = route.path_format, route.param_convertors
        places = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
        for method in sorted((route.methods or set()) - {"HEAD"}):
            said: dict[str, Any] = {"summary": route.name, "parameters": places}
            said["responses"] = {"200": {"description": "done"}, "default": error}
            if body := bodies.get((method, path)):
                said["requestBody"] = {"required": True, "content": _json(body)}
            paths.setdefault(path, {})[method.lower()] = said
    return {
        "openapi": "3.1.0", "info": {"title": "marsbench", "version": __version__}, "paths": paths,
        "components": {"schemas": parts, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }  # fmt: skip


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
