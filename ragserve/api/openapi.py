"""The OpenAPI document: every route with examples, its errors and, where it streams, its events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from ragserve import __version__
from ragserve.api.schemas import ErrorBody

# FastAPI drops every null of the document, examples included: this stands in for null until it has.
_NULL = "\ue000null\ue001"
_REF = "#/components/schemas/{model}"
_ERRORS: dict[int, tuple[str, str, str]] = {
    # status: (meaning, code of the example, message of the example)
    400: (
        "The request is malformed or out of range",
        "invalid_request",
        "k: Input should be greater than or equal to 1.",
    ),
    401: ("The API key is missing or wrong", "invalid_api_key", "The API key is wrong."),
    404: (
        "There is no such namespace, document or job",
        "namespace_not_found",
        "There is no namespace 'nowhere'.",
    ),
    409: (
        "The request does not fit what is stored",
        "embedder_mismatch",
        "Namespace 'docs' was embedded with another model.",
    ),
    413: ("The body or a file is over its limit", "too_large", "The request's body is over 4,194,304 bytes."),
    415: (
        "The body has the wrong Content-Type",
        "unsupported_media_type",
        "This route takes JSON, not text/plain.",
    ),
    429: (
        "Too many queries are in flight; see Retry-After",
        "too_many_requests",
        "256 queries are already being answered.",
    ),
    500: ("Something went wrong in the server", "internal_error", "Something went wrong in the server."),
    502: ("The engine answered with an error", "engine_error", "The engine failed."),
    503: (
        "Not ready, shutting down, or the engine is gone; see Retry-After",
        "unavailable",
        "The server is starting or stopping.",
    ),
    507: ("The server's disk is full", "storage_full", "The server's disk is full."),
}


def documented(
    example: Any,
    *statuses: int,
    success: int = 200,
    description: str,
    sse: tuple[str, Mapping[str, type[BaseModel]]] | None = None,
) -> dict[int | str, dict[str, Any]]:
    """``responses`` of a route.

    Args:
        example: body of a success; None for none. statuses: the route's errors, besides 401 and 500, which
        every route has. sse: an example of the stream, and the model of each event's data by event name (""
        for unnamed events)."""
    content: dict[str, Any] = (
        {} if example is None else {"application/json": {"example": _swap(example, None, _NULL)}}
    )
    if sse is not None:
        stream, events = sse
        content["text/event-stream"] = {
            "schema": {"type": "string", "description": "Server-sent events; the data of each is JSON."},
            "itemSchema": {"oneOf": [_event(name, model) for name, model in events.items()]},  # OpenAPI 3.2
            "example": stream,
        }
    responses: dict[int | str, dict[str, Any]] = {success: {"description": description}}
    if content:
        responses[success]["content"] = content
    for status in sorted({*statuses, 401, 500}):
        meaning, code, message = _ERRORS[status]
        kind = "invalid_request_error" if status < 500 else "server_error"
        detail = {
            "message": message,
            "type": kind,
            "code": code,
            "param": None,
            "hint": None,
            "request_id": "4f1c9a",
        }
        responses[status] = {
            "model": ErrorBody,
            "description": meaning,
            "content": {"application/json": {"example": _swap({"error": detail}, None, _NULL)}},
        }
    return responses


def _swap(value: Any, old: Any, new: Any) -> Any:
    """A JSON value with ``new`` in place of every ``old``."""
    if isinstance(value, dict):
        return {key: _swap(one, old, new) for key, one in value.items()}
    if isinstance(value, list):
        return [_swap(one, old, new) for one in value]
    return new if value == old else value


def _event(name: str, model: type[BaseModel]) -> dict[str, Any]:
    data = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"$ref": _REF.format(model=model.__name__)},
    }
    named = {"event": {"const": name}} if name else {}
    return {
        "type": "object",
        "required": [*named, "data"],
        "properties": {**named, "data": data},
        "description": model.__doc__ or name,
    }


def install(app: FastAPI, models: Sequence[type[BaseModel]]) -> None:
    """Give ``app`` its OpenAPI document, built on first use: FastAPI's, with the API key's scheme and
    without 422, which we never send.

    ``models`` are referenced by routes, but unknown to FastAPI."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(
                title=app.title,
                version=__version__,
                description=app.description,
                routes=app.routes,
                tags=_TAGS,
            )
            schema.setdefault("components", {})["securitySchemes"] = {
                "key": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "The server's API key, if it has one.",
                }
            }
            schema["security"] = [{"key": []}]
            for path in schema["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
            schemas = schema["components"]["schemas"]
            _, referenced = models_json_schema([(model, "validation") for model in models], ref_template=_REF)
            for name, definition in referenced["$defs"].items():
                schemas.setdefault(name, definition)
            for unused in ("HTTPValidationError", "ValidationError"):
                schemas.pop(unused, None)
            app.openapi_schema = _swap(schema, _NULL, None)
        return dict(app.openapi_schema)

    app.openapi = openapi  # type: ignore[method-assign]


DESCRIPTION = """Answers questions over your documents with SGLang.

If the server has an API key, every route but `/health` requires it. Every answer carries `X-Request-Id`; an
id that you send is kept. SGLang's own routes (`/generate`, `/v1/completions`, `/metrics`, ...) are served on
the same address and documented by SGLang."""

_TAGS = [
    {"name": "query", "description": "Ask a question, or search only."},
    {"name": "ingest", "description": "Add documents, and follow the jobs that index them."},
    {"name": "documents", "description": "Indexed documents, chunks and namespaces."},
    {"name": "cache", "description": "The document cache: contents and tiers."},
    {"name": "openai", "description": "The same answers in OpenAI's format."},
    {"name": "system", "description": "Server information, readiness and metrics."},
]
