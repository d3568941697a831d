"""What a router must do for the fleet: bring requests unchanged, stream answers, and pass on that a reader
has left."""

from __future__ import annotations

import asyncio
import json
import struct
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import httpx

from ragserve.engine.base import GenerateRequest, Sampling
from ragserve.engine.stream import new_rid, payload
from ragserve.errors import InvalidRequest, Unavailable
from ragserve.fleet.routing_key import MARK, PROBE
from sglang_ext.wire.protocol import RetrievalScores, SessionPart, Span

FIRST_S = 5.0
"""Seconds for the first event of a stream, which the worker keeps open for longer."""

_TOKENS = 64


async def check_carries(
    client: httpx.AsyncClient, url: str, headers: Mapping[str, str], left: Callable[[str], Awaitable[bool]]
) -> None:
    """Send a composed request with every field that ours have to ``url``, whose worker says what has arrived.

    ``left(name)`` asks the worker whether the reader of a probe's answer has left. Raises InvalidRequest for
    a router that cannot be used, and httpx.HTTPError if it does not answer."""
    sent, name = _request(), uuid.uuid4().hex
    try:
        async with (
            asyncio.timeout(FIRST_S),
            client.stream(
                "POST", url, json=sent, headers={**headers, MARK: f"{PROBE}{name}"}, timeout=FIRST_S
            ) as response,
        ):
            received = await _first_event(response)
    except (TimeoutError, httpx.ReadTimeout):
        raise _unusable(url, "keeps answers until they are complete, so they cannot be streamed") from None
    if received is None:
        raise _unusable(url, "has answered a request itself, or changed the answer")
    if said := _difference(sent, json.loads(received)):
        raise _unusable(url, f"changes requests: {said}")
    if not await left(name):
        raise _unusable(url, "does not pass on that a reader has left: answers would run on for nobody")


def _unusable(url: str, what: str) -> InvalidRequest:
    return InvalidRequest(
        f"The router at {url.removesuffix('/generate')} {what}.",
        hint="Use the router of `pip install 'ragserve[router]'`, with nothing between it and this server.",
        code="unusable_router",
    )


async def _first_event(response: httpx.Response) -> str | None:
    """What a worker has received, as it says in its first event; None if this is no such event."""
    if response.status_code in (httpx.codes.BAD_GATEWAY, httpx.codes.SERVICE_UNAVAILABLE):
        raise Unavailable("The router has no worker for its probe now.", hint="Retry in a moment.")
    got = b""
    async for chunk in response.aiter_bytes():
        got += chunk
        if b"\n\n" in got:
            break
    try:
        return str(json.loads(got.partition(b"\n\n")[0].removeprefix(b"data:"))["received"])
    except (ValueError, KeyError, TypeError):
        return None


def _request() -> dict[str, Any]:
    """The fields of a composed request, and those of an exact one beside them."""
    request = GenerateRequest(
        "router-probe",
        [7 * i % 997 for i in range(_TOKENS)],
        "router-probe",
        "concat",
        Sampling(
            max_new_tokens=3,
            temperature=0.7,
            top_p=0.95,
            top_k=40,
            stop=("\u2028é",),
            seed=2**40 + 1,
            frequency_penalty=0.1,
            presence_penalty=-0.3,
            ignore_eos=True,
        ),
        spans=(Span(0, 8), Span(8, 40)),
        options={"recompute": "sentences", "share": 0.1},
        distributions=2,
        forced=(1, 2),
        decode={"mode": "hierarchical"},
        scores=RetrievalScores((0.25,), ((),)),
        session=SessionPart("session:router-probe:1", 8),
    )
    others = {"extra_key": "router-probe\u00e9", "unknown": [None, 0.1]}
    return payload(request, new_rid(request.rid)) | others


def _difference(sent: Any, received: Any, path: str = "", *, top: bool = True) -> str:
    """Say where two JSON values differ; empty if they are the same.

    Numbers may be rounded to float32, in which SGLang samples. A router may add fields at the top, which name
    SGLang's defaults."""
    if isinstance(sent, dict) and isinstance(received, dict):
        if added := [] if top else sorted(received.keys() - sent.keys()):
            return f"{path}.{added[0]} is added"
        for name, value in sent.items():
            inside = f"{path}.{name}".removeprefix(".")
            if name not in received:
                return f"{inside} is missing"
            if said := _difference(value, received[name], inside, top=False):
                return said
        return ""
    if isinstance(sent, list) and isinstance(received, list) and len(sent) == len(received):
        parts = (_difference(a, b, path, top=False) for a, b in zip(sent, received, strict=True))
        return next((said for said in parts if said), "")
    if isinstance(sent, float) and isinstance(received, float | int):
        return "" if _float32(sent) == _float32(received) else f"{path} is {received!r}, not {sent!r}"
    same = type(sent) is type(received) and sent == received
    return "" if same else f"{path} is {received!r:.80}, not {sent!r:.80}"


def _float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])
