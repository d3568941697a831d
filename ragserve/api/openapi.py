"""The OpenAPI document: every route with examples, its errors and, where it streams, its events."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from ragserve import __version__
from ragserve.api.schemas import ErrorBody

_ERRORS: dict[int, tuple[str, str, str]] = {
    # status: (what it means, code of the example, message of the example)
    400: ("The request is malformed or out of range", "invalid_request", "k: Input should be greater than or equal to 1."),
    401: ("The API key is missing or wrong", "invalid_api_key", "The API key is wrong."),
    404: ("There is no such namespace, document or job", "namespace_not_found", "There is no namespace 'nowhere'."),
    409: ("The request does not fit what is stored", "embedder_mismatch", "Namespace 'docs' was embedded with another model."),
    413: ("The body or a file is over its limit", "too_large", "The request's body is over 4,194,304 bytes."),
    415: ("The body has the wrong Content-Type", "unsupported_media_type", "This route takes JSON, not text/plain."),
    429: ("Too many queries are in flight; see Retry-After", "too_many_requests", "256 queries are already being answered."),
    500: ("Something went wrong in the server", "internal_error", "Something went wrong in the server."),
    502: ("The engine answered with an error", "engine_error", "The engine failed."),
    503: ("Not ready, shutting down, or the engine is gone; see Retry-After", "unavailable", "The server is starting or stopping."),
    507: ("The server's disk is full", "storage_full", "The server's disk is full."),
}


def documented(
    example: Any, *statuses: int, success: int = 200, description: str, sse: str | None = None
) -> dict[int | str, dict[str, Any]]:
    """``responses`` of a route: what success looks like, and the errors it can give beside 401 and 500, which all can."""
    content: dict[str, Any] = {} if example is None else {"application/json": {"example": example}}
    if sse is not None:
        content["text/event-stream"] = {
            "schema": {"type": "string", "description": "Server-sent events; the data of each is JSON."},
            "example": sse,
        }
    responses: dict[int | str, dict[str, Any]] = {success: {"description": description}}
    if content:
        responses[success]["content"] = content
    for status in sorted({*statuses, 401, 500}):
        meaning, code, message = _ERRORS[status]
        kind = "invalid_request_error" if status < 500 else "server_error"
        detail = {"message": message, "type": kind, "code": code, "param": None, "hint": None, "request_id": "4f1c9a"}
        responses[status] = {
            "model": ErrorBody,
            "description": meaning,
            "content": {"application/json": {"example": {"error": detail}}},
        }
    return responses


def install(app: FastAPI) -> None:
    """Our own document, built on first use: what FastAPI says, with the key's scheme and without the 422 that we never send."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=__version__, description=app.description, routes=app.routes, tags=_TAGS)
            schema.setdefault("components", {})["securitySchemes"] = {
                "key": {"type": "http", "scheme": "bearer", "description": "The server's API key, where it was started with one."}
            }
            schema["security"] = [{"key": []}]
            for path in schema["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
            for unused in ("HTTPValidationError", "ValidationError"):
                schema["components"]["schemas"].pop(unused, None)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


DESCRIPTION = """Answers questions over your documents with SGLang.

Every route but `/health` wants the API key, where the server has one. Every answer carries `X-Request-Id`; send your own and it is used.
All routes of SGLang (`/generate`, `/v1/completions`, `/metrics`, ...) are served on this address too and are documented by SGLang."""

_TAGS = [
    {"name": "query", "description": "Ask, or only search."},
    {"name": "ingest", "description": "Give documents; watch the jobs that index them."},
    {"name": "documents", "description": "What is indexed."},
    {"name": "openai", "description": "The same answers for OpenAI clients."},
    {"name": "system", "description": "What is serving, and whether it is ready."},
]
