"""The OpenAPI document: every route with examples, its errors and, where it streams, its events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from ragserve import __version__, errors
from ragserve.api.errors import UnsupportedMediaType
from ragserve.api.views import ErrorBody, SglangError

# FastAPI drops every null of the document, examples included: this stands in for null until it has.
_NULL = "\ue000null\ue001"
ALWAYS = (401, 403, 429, 500)
_REF = "#/components/schemas/{model}"
_ERRORS: tuple[tuple[str, errors.RagserveError], ...] = (  # meaning and example
    (
        "The request is malformed or out of range",
        errors.InvalidRequest("k: Input should be greater than or equal to 1."),
    ),
    ("The API key is missing or wrong", errors.Unauthorized("The API key is wrong.")),
    (
        "A right that the API key lacks; without one, a web page of another origin or another host name",
        errors.Forbidden("Pages of 'https://example.com' may not call this server."),
    ),
    (
        "There is no such namespace, document, job or session that the API key covers",
        errors.NotFound("There is no namespace 'nowhere'.", code="namespace_not_found"),
    ),
    (
        "The request's body stopped coming",
        errors.RequestTimeout("No byte of the request's body came for 60 s."),
    ),
    (
        "The request does not fit what is stored, or a session has lost a document",
        errors.Conflict("Namespace 'docs' was embedded with another model.", code="embedder_mismatch"),
    ),
    ("The body or a file is over its limit", errors.TooLarge("The request's body is over 4,194,304 bytes.")),
    ("The body has the wrong Content-Type", UnsupportedMediaType("This route takes JSON, not text/plain.")),
    (
        "Too many queries are in flight, or too many requests of the API key; see Retry-After",
        errors.TooManyRequests("256 queries are already being answered."),
    ),
    ("Something went wrong in the server", errors.RagserveError("Something went wrong in the server.")),
    ("The engine answered with an error", errors.EngineError("The engine failed.")),
    (
        "Not ready, shutting down, or the engine is gone; see Retry-After",
        errors.Unavailable("The server is starting or stopping."),
    ),
    ("The server's disk is full", errors.StorageFull("The server's disk is full.")),
)


def documented(
    example: Any,
    statuses: Sequence[int] = (),
    *,
    success: int = 200,
    description: str,
    sse: tuple[str, Mapping[str, type[BaseModel]]] | None = None,
    sse_end: str | None = None,
    passes_on: bool = False,
) -> dict[int | str, dict[str, Any]]:
    """``responses`` of a route.

    Args:
        example: body of a success. statuses: the route's errors, besides `ALWAYS`, which every route has,
        and 408, which every route with a body has. sse: an example of the stream, and the model of each
        event's data by event name ("" for unnamed events). sse_end: data of the last event, which is no
        JSON. passes_on: some answers are SGLang's, with errors of its own."""
    content: dict[str, Any] = {"application/json": {"example": _swap(example, None, _NULL)}}
    if sse is not None:
        stream, events = sse
        items = [_event(name, model, sse_end) for name, model in events.items()]
        if sse_end is not None:
            end = {"type": "object", "required": ["data"], "properties": {"data": {"const": sse_end}}}
            items.append({**end, "description": "The end of the stream."})
        content["text/event-stream"] = {
            "schema": {
                "type": "string",
                "description": "Server-sent events; the data of each is JSON"
                + (f", that of the last is {sse_end}." if sse_end else "."),
            },
            "itemSchema": {"oneOf": items},  # OpenAPI 3.2
            "example": stream,
        }
    failed = failures(statuses, ErrorBody | SglangError if passes_on else ErrorBody)
    return {success: {"description": description, "content": content}, **failed}


def failures(statuses: Sequence[int] = (), body: Any = ErrorBody) -> dict[int | str, dict[str, Any]]:
    """``responses`` for a route's errors, with this model of their body."""
    return {
        error.status: {
            "model": body,
            "description": meaning,
            "content": {"application/json": {"example": _swap(error.body("4f1c9a"), None, _NULL)}},
        }
        for meaning, error in _ERRORS
        if error.status in (*statuses, *ALWAYS) or (error.status == 408 and 413 in statuses)
    }


def _swap(value: Any, old: Any, new: Any) -> Any:
    """A JSON value with ``new`` in place of every ``old``."""
    if isinstance(value, dict):
        return {key: _swap(one, old, new) for key, one in value.items()}
    if isinstance(value, list):
        return [_swap(one, old, new) for one in value]
    return new if value == old else value


def _event(name: str, model: type[BaseModel], not_data: str | None) -> dict[str, Any]:
    data = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"$ref": _REF.format(model=model.__name__)},
        **({} if not_data is None else {"not": {"const": not_data}}),
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
            key = {"type": "http", "scheme": "bearer", "description": "An API key, if the server has any."}
            schema.setdefault("components", {})["securitySchemes"] = {"key": key}
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

If the server has API keys, every route but `/health`, `/docs` and `/playground` requires one; without any,
web pages of other origins are refused. A key may be limited to namespaces, to rights (read, ingest, delete,
metrics, admin), to requests and to tokens a minute. What belongs to others is answered as if it did not
exist. Every answer carries `X-Request-Id`; an id that you send is kept. SGLang's own routes (`/generate`,
`/tokenize`, `/metrics`, ...) are served on the same address and documented by SGLang."""

_TAGS = [
    {"name": "query", "description": "Ask a question, or search only."},
    {"name": "sessions", "description": "Dialogues that the server keeps."},
    {"name": "ingest", "description": "Add documents, and follow the jobs that index them."},
    {"name": "documents", "description": "Indexed documents, chunks and namespaces."},
    {"name": "cache", "description": "The document cache: contents and tiers."},
    {"name": "openai", "description": "The same answers in OpenAI's format."},
    {"name": "system", "description": "Server information, readiness and metrics."},
]
