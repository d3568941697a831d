"""JSON bodies: strict UTF-8, bounded depth, no NaN, and an error that says what is wrong and where."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

import pydantic_core
from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import AfterValidator, BaseModel, ConfigDict
from starlette.types import Receive

from ragserve.api.errors import UnsupportedMediaType
from ragserve.errors import InvalidRequest

# Larger bodies are parsed in a thread.
_INLINE_BYTES = 2**20


# A client that is still sending when it is refused would see its connection reset instead of our answer: read
# on for a while.
_DRAIN_BYTES = 8 * 2**20
_DRAIN_S = 5.0


class RequestModel(BaseModel):
    """Base of all request bodies: a field that we do not know is an error, not ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)


def _without_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError("contains a NUL character (U+0000); remove it")
    return text


def _not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("is empty")
    return text


Text = Annotated[str, AfterValidator(_without_nul)]
NonBlank = Annotated[Text, AfterValidator(_not_blank)]


async def parse_json(raw: bytes) -> Any:
    """Raises InvalidRequest with the reason and the place. Depth is bounded by the parser, at 200 levels."""
    if not raw:
        raise InvalidRequest("The request has no body.", hint="Send a JSON object.", code="invalid_json")
    try:
        raw.decode("utf-8") if len(raw) < _INLINE_BYTES else await asyncio.to_thread(raw.decode, "utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"The body is not UTF-8: byte {error.object[error.start]:#04x} at position {error.start}.",
            hint="Encode the JSON as UTF-8.",
            code="invalid_encoding",
        ) from None
    try:
        if len(raw) < _INLINE_BYTES:
            return pydantic_core.from_json(raw, allow_inf_nan=False)
        return await asyncio.to_thread(pydantic_core.from_json, raw, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(
            f"The body is not valid JSON: {error}.", hint="Send one JSON object.", code="invalid_json"
        ) from None


async def drain(receive: Receive) -> None:
    """Read and forget what the client still sends, for a while. The body must not have come to its end."""
    drained = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_S):
            while drained < _DRAIN_BYTES:
                message = await receive()
                drained += len(message.get("body", b""))
                if message["type"] != "http.request" or not message.get("more_body"):
                    return


class JsonRoute(APIRoute):
    """Parses the body with :func:`parse_json` before FastAPI validates it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def parsed(request: Request) -> Response:
            if request.method in ("POST", "PUT", "PATCH"):
                kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
                if kind != "application/json":
                    raise UnsupportedMediaType(
                        f"This route takes JSON, not {kind or 'a body without Content-Type'}.",
                        hint="Set Content-Type: application/json.",
                    )
                # Request.json() answers from here, so the body is parsed once
                request._json = await parse_json(await request.body())
            return await handler(request)

        return parsed
