"""Turn every failure, in routes, middleware and streams, into the body of `RagserveError.body`."""

from __future__ import annotations

import errno
import logging
import re
import sqlite3
from collections.abc import Sequence
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from ragserve.errors import (
    InvalidRequest,
    NotFound,
    RagserveError,
    StorageFull,
    TooManyRequests,
    Unauthorized,
    Unavailable,
    explained,
)

log = logging.getLogger(__name__)
_SHOWN = 5
_SAID_CHARS = 400  # about one field; names of fields may be the client's
_PATH_CHARS = 160
_ALTERNATIVE = re.compile(
    r"[\[\]()]|^(constrained-|function-|json-or-python|nullable)|^(str|int|float|bool)$"
)
M = TypeVar("M", bound=BaseModel)


class MethodNotAllowed(RagserveError):
    status = 405
    default_code = "method_not_allowed"


class UnsupportedMediaType(RagserveError):
    status = 415
    default_code = "unsupported_media_type"


def as_error(error: BaseException, request_id: str) -> RagserveError:
    """Translate any error for the client. Unknown errors are logged with traceback and become a bare 500."""
    if isinstance(error, RagserveError):
        return error
    if isinstance(error, RequestValidationError):
        return invalid(error.errors())
    if isinstance(error, HTTPException):
        return _http_error(error)
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    if full or (isinstance(error, sqlite3.OperationalError) and "disk is full" in str(error)):
        return StorageFull(
            "The server's disk is full.", hint="Free space on the disk of data_dir, then retry."
        )
    if isinstance(error, OSError) and (said := explained(error)) is not None:
        log.error("request %s failed: %s", request_id, error)
        return Unavailable(f"The server cannot use a file: {error.strerror}.", hint=said.hint)
    log.error("request %s failed", request_id, exc_info=error)
    return RagserveError(
        "Something went wrong in the server.", hint=f"See its log, under request id {request_id}."
    )


def invalid(errors: Sequence[Any]) -> InvalidRequest:
    """Merge validation errors into one that names every field, ``param`` the first. Never echoes input."""
    described = [
        _shortened(f"{_path(error['loc']) or 'body'}: {_what(error)}", _SAID_CHARS)
        for error in errors[:_SHOWN]
    ]
    if len(errors) > _SHOWN:
        described.append(f"and {len(errors) - _SHOWN} more")
    unknown = any(error["type"] == "extra_forbidden" for error in errors)
    hint = (
        "Remove the unknown field or correct its name; /docs lists them."
        if unknown
        else "See /docs for the fields and their limits."
    )
    return InvalidRequest("; ".join(described) + ".", hint=hint, param=_path(errors[0]["loc"]) or None)


def validated(model: type[M], data: Any) -> M:
    """Validate data that FastAPI has not. Raises InvalidRequest."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise invalid(error.errors(include_input=False, include_url=False)) from None


def response(error: RagserveError, request_id: str) -> Response:
    """Build the HTTP answer, with the headers of its status."""
    headers = {}
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, (TooManyRequests, Unavailable)):
        headers["Retry-After"] = str(getattr(error, "retry_after_s", 1))
    return JSONResponse(error.body(request_id), error.status, headers)


def install(app: FastAPI) -> None:
    """Register one handler for the errors of routes; the outermost middleware catches all others."""

    async def handle(request: Request, error: Exception) -> Response:
        request_id = request.state.request_id
        answer = response(as_error(error, request_id), request_id)
        if isinstance(error, HTTPException) and error.headers:  # Allow, of 405
            answer.headers.update(error.headers)
        return answer

    for kind in (RagserveError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, handle)


def _http_error(error: HTTPException) -> RagserveError:
    detail = str(error.detail)
    if error.status_code == 404:
        return NotFound(detail, hint="See /docs for the routes.")
    if error.status_code == 405:
        return MethodNotAllowed("This route does not take that method.", hint="See /docs for the routes.")
    return InvalidRequest(detail)  # FastAPI raises no others


def _path(location: Sequence[str | int]) -> str:
    """``("body", "history", 0, "role")`` as ``history[0].role``, without pydantic's names for alternatives of
    a field (``constrained-str``, ``list[TextPart]``)."""
    location = tuple(part for part in location if isinstance(part, int) or not _ALTERNATIVE.search(part))
    if location[:1] and location[0] in ("body", "query", "path", "header") and len(location) > 1:
        location = location[1:]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return _shortened(path.removeprefix("."), _PATH_CHARS) if location != ("body",) else ""


def _shortened(text: str, chars: int) -> str:
    return text if len(text) <= chars else f"{text[: chars - 1]}…"


def _what(error: Any) -> str:
    if error["type"] == "missing":
        return "is required"
    if error["type"] == "extra_forbidden":
        return "is not a known field"
    return str(error["msg"]).removeprefix("Value error, ").rstrip(".")
