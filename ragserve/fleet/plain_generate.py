"""SGLang's ``/generate`` for the requests of servers in front, without SGLang's web layer: that takes
half a millisecond of every answer's time to its first token, on one core."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from typing import Any

import orjson
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from ragserve.api.body import Replayed
from ragserve.disconnects import until_left

PATH = "/generate"
_TYPES: dict[str, type | tuple[type, ...]] = {
    "rid": str,
    "input_ids": list,
    "sampling_params": dict,
    "extra_key": (str, type(None)),
}
_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8")]
_JSON = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY
_END = b"data: [DONE]\n\n"

Outputs = Callable[[dict[str, Any]], AsyncGenerator[dict[str, Any], None]]


class PlainGenerate:
    """ASGI app that streams the answer to one prompt of tokens as SGLang's route does. Other requests go to
    ``app``, SGLang's own; so do those with a trace's headers, which it reads."""

    def __init__(self, app: ASGIApp, outputs: Outputs) -> None:
        """``outputs`` runs the fields of a request, raises what is wrong with it, and aborts it when it is
        closed."""
        self._app = app
        self._outputs = outputs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != PATH or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        body = await Request(scope, receive).body()
        fields = None if "traceparent" in Headers(scope=scope) else plain_fields(body)
        if fields is None:
            await Replayed(self._app, body)(scope, receive, send)
            return
        await until_left(receive, self._stream(fields, send))  # which ends the engine's request

    async def _stream(self, fields: dict[str, Any], send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        ended = False

        async def send_output(out: dict[str, Any], *, last: bool) -> None:
            line = b"data: " + orjson.dumps(out, option=_JSON) + b"\n\n" + (_END if last else b"")
            await send({"type": "http.response.body", "body": line, "more_body": not last})

        try:
            async with aclosing(self._outputs(fields)) as outputs:
                async for out in outputs:
                    ended = "error" in out or bool(out["meta_info"].get("finish_reason"))
                    await send_output(out, last=ended)
                    if ended:
                        return
        except Exception as error:  # noqa: BLE001 - the reader raises it
            if ended:
                return
            known = getattr(error, "status", None) or getattr(error, "status_code", None)
            code = known or (400 if isinstance(error, ValueError) else 500)
            await send_output({"error": {"message": str(error), "code": code}}, last=True)


def plain_fields(body: bytes) -> dict[str, Any] | None:
    """The fields of a streamed request for one answer to one prompt of tokens; None for any other."""
    with suppress(ValueError):
        fields = orjson.loads(body)
        if (
            isinstance(fields, dict)
            and fields.get("stream") is True
            and fields.keys() - {"stream", "extra_key"} == _TYPES.keys() - {"extra_key"}
            and all(isinstance(fields.get(name), types) for name, types in _TYPES.items())
            and set(map(type, fields["input_ids"])) == {int}
            and "n" not in fields["sampling_params"]
        ):
            return fields
    return None
