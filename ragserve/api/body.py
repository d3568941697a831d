"""JSON bodies: strict UTF-8, bounded depth, no NaN, and errors with the place and the reason."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from typing import Annotated, Any

import pydantic_core
from fastapi import Request, Response
from pydantic import AfterValidator, BaseModel, ConfigDict
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragserve.errors import InvalidRequest

# Larger bodies are parsed in a thread.
_INLINE_BYTES = 2**20
MAX_NAMES = 20_000  # of a body's objects: each unknown one is an error of its own, made in the event loop
# A client that is refused while still sending would see a connection reset instead of our answer: read on.
_DRAIN_BYTES = 8 * 2**20
_DRAIN_S = 5.0


class RequestModel(BaseModel):
    """Base of all request bodies. Unknown fields are errors."""

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


async def parse_json(raw: bytes, most: int | None = None) -> Any:
    """Parse a body. Raises InvalidRequest with reason and place, and for objects with more than ``most``
    names together; the parser bounds depth at 200 levels."""
    if not raw:
        raise InvalidRequest("The request has no body.", hint="Send a JSON object.", code="invalid_json")
    try:
        return _parse(raw, most) if len(raw) < _INLINE_BYTES else await asyncio.to_thread(_parse, raw, most)
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"The body is not UTF-8: byte {error.object[error.start]:#04x} at position {error.start}.",
            hint="Encode the JSON as UTF-8.",
            code="invalid_encoding",
        ) from None
    except ValueError as error:
        raise InvalidRequest(
            f"The body is not valid JSON: {error}.", hint="Send one JSON object.", code="invalid_json"
        ) from None


def _check_names(data: Any, most: int) -> None:
    """Raise InvalidRequest for objects with more than ``most`` names together."""
    names, values = 0, [data]
    while values:
        value = values.pop()
        if isinstance(value, dict):
            names += len(value)
            value = value.values()
        if isinstance(value, str) or not isinstance(value, Iterable):
            continue
        if names > most:
            raise InvalidRequest(
                f"The objects of the body have more than {most:,} names.", hint="See /docs for the fields."
            )
        values += (one for one in value if isinstance(one, (dict, list)))


def _parse(raw: bytes, most: int | None) -> Any:
    raw.decode("utf-8")  # the JSON parser's own error would not name the byte
    data = pydantic_core.from_json(raw, allow_inf_nan=False)
    if most is not None:
        _check_names(data, most)
    return data


async def drain(receive: Receive) -> None:
    """Discard what the client still sends, within limits. Only for an incomplete body."""
    drained = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_S):
            while drained < _DRAIN_BYTES:
                message = await receive()
                drained += len(message.get("body", b""))
                if message["type"] != "http.request" or not message.get("more_body"):
                    return


def media_type(request: Request) -> str:
    """The Content-Type without its parameters; empty without one."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


class Replayed(Response):
    """Another app's answer to a request whose body has been read."""

    def __init__(self, app: ASGIApp, body: bytes) -> None:
        super().__init__()
        self._app = app
        self._replayed = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, received(self._replayed, receive), send)


def received(body: bytes, receive: Receive) -> Receive:
    """The way by which another app receives a body that has been read."""
    given = False

    async def receive_again() -> Message:
        nonlocal given
        if given:
            return await receive()  # only a disconnect can follow
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_again
