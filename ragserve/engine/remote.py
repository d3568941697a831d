"""Engine over the HTTP API of an SGLang server that runs elsewhere."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any

import httpx

from ragserve import tracing
from ragserve.config import Settings
from ragserve.engine.base import EngineInfo, GenerateChunk, GenerateRequest
from ragserve.engine.stream import StreamReader, new_rid, payload, timed_out
from ragserve.errors import EngineError, InvalidRequest, TooManyRequests, Unavailable

log = logging.getLogger(__name__)
_PROBE = "The lighthouse of Skerryvore was built in 1844, of 4,308 tons of granite, on a reef."
LOST = "engine_lost"
"""Code of the errors of a connection that ended before its answer."""

_IDLE_S = 2.0  # a connection is kept open; servers close theirs after five seconds


class RemoteEngine:
    """An `Engine` over ``settings.engine_url``, with strategies ``full`` and ``prefix``."""

    def __init__(self, settings: Settings) -> None:
        if settings.engine_url is None:
            raise InvalidRequest("No engine address given.", hint="Set --engine-url.")
        self._settings = settings
        self._url = settings.engine_url.rstrip("/")
        headers = (
            {"Authorization": f"Bearer {settings.engine_api_key.get_secret_value()}"}
            if settings.engine_api_key
            else {}
        )
        self._client = httpx.AsyncClient(
            base_url=self._url,
            headers=headers,
            timeout=httpx.Timeout(settings.engine_timeout_s, connect=10),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=_IDLE_S),
        )
        self._info: EngineInfo | None = None
        self._aborts: set[asyncio.Task[None]] = set()

    async def start(self) -> EngineInfo:
        """Read model and limits from the server. Raises Unavailable if it does not answer."""
        server, model = await self._get("/server_info"), await self._get("/model_info")
        tokenizer = self._settings.tokenizer or model.get("tokenizer_path") or model["model_path"]
        total = int(server["max_total_num_tokens"])
        # SGLang admits prompts up to max_req_input_len: a few tokens less than context or KV pool.
        context = int(server.get("context_length") or server.get("max_req_input_len") or total)
        self._info = EngineInfo(
            kind="remote",
            model=model["model_path"],
            tokenizer=tokenizer,
            version=str(server.get("version", "unknown")),
            device=str(server.get("device", "unknown")),
            attention_backend=str(server.get("attention_backend", "unknown")),
            context_length=min(context, int(server.get("max_req_input_len") or context) + 1),
            max_total_tokens=total,
            strategies=("full", "prefix"),
        )
        return self._info

    async def _get(self, path: str) -> dict[str, Any]:
        try:
            response = await self._client.get(path, timeout=10)
            response.raise_for_status()
            body = response.json()
            if not isinstance(body, dict):
                raise ValueError("the answer is not a JSON object")
        except (httpx.HTTPError, ValueError) as error:
            raise Unavailable(
                f"The engine at {self._url} does not answer {path} as SGLang does: {error}.",
                hint="Check --engine-url and --engine-api-key, and that SGLang is running there.",
                code="engine_unreachable",
            ) from error
        return body

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise Unavailable("The engine has not been reached yet.", hint="Wait until /ready answers 200.")
        return self._info

    async def check_tokenizer(self, encode: Callable[[str], Sequence[int]]) -> None:
        """See `TokenizingEngine`."""
        name = self._settings.tokenizer or self.info.tokenizer
        try:
            body = {"prompt": _PROBE, "add_special_tokens": False}
            response = await self._client.post("/tokenize", json=body, timeout=10)
            theirs = response.json()["tokens"] if response.is_success else None
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            theirs = None
        if theirs is None:
            log.info("the engine does not tell its tokens: %s is taken for its tokenizer", name)
        elif theirs != list(encode(_PROBE)):
            raise InvalidRequest(
                f"{name} is not the tokenizer of the engine at {self._url}: they make "
                "different tokens of the same text.",
                hint="Give the folder of the model that the engine serves with --tokenizer.",
                code="other_tokenizer",
            )

    async def ready(self) -> bool:
        try:
            response = await self._client.get("/health", timeout=5)
        except httpx.HTTPError:
            return False
        return response.status_code == httpx.codes.OK and self._info is not None

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        """See the protocol. Leaving early closes the connection and asks the server to abort."""
        fields = payload(request, new_rid(request.rid))
        async with aclosing(self._run(fields, len(request.input_ids))) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _run(self, fields: dict[str, Any], prompt_tokens: int) -> AsyncGenerator[GenerateChunk, None]:
        """Run one request."""
        reader = StreamReader(prompt_tokens)
        async with aclosing(self._outputs(fields)) as outputs:
            async for out in outputs:
                yield reader.read(out)

    async def _outputs(
        self, fields: dict[str, Any], url: str = "/generate", headers: Mapping[str, str] | None = None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Stream what SGLang's ``/generate`` answers to one request, or to several in lists. ``url`` and
        further ``headers``: of another way to it."""
        rids = fields["rid"] if isinstance(fields["rid"], list) else [fields["rid"]]
        ended = 0
        deadline = asyncio.get_running_loop().time() + self._settings.engine_timeout_s
        try:
            async with AsyncExitStack() as stack:
                # Timeouts are never around the yield: there they would cancel our reader.
                async with asyncio.timeout_at(deadline):
                    sent = tracing.headers() | dict(headers or {})
                    response = await stack.enter_async_context(
                        self._client.stream("POST", url, json=fields, headers=sent)
                    )
                    if response.status_code != httpx.codes.OK:
                        ended = len(rids)
                    await self._admit(response)
                async for line in _until(deadline, _lines(response.aiter_bytes())):
                    if not line.startswith(b"data:"):
                        continue
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        break
                    out = json.loads(data)
                    if "error" in out:
                        ended = len(rids)
                    elif out.get("meta_info", {}).get("finish_reason"):
                        ended += 1
                    yield out
                if ended < len(rids):
                    ended = len(rids)
                    raise EngineError(
                        "The engine closed the stream before the answer was complete.",
                        hint="See its log.",
                        code=LOST,
                    )
        except TimeoutError:
            raise timed_out(self._settings.engine_timeout_s) from None
        except (httpx.HTTPError, ValueError) as error:  # ValueError: no JSON, or no UTF-8
            raise Unavailable(
                f"The engine at {self._url} broke off: {error!r}.", hint="Is it still running?", code=LOST
            ) from error
        finally:
            if ended < len(rids):
                for rid in rids:
                    task = asyncio.create_task(self._abort(rid))
                    self._aborts.add(task)
                    task.add_done_callback(self._aborts.discard)

    async def _admit(self, response: httpx.Response) -> None:
        """Raise the error of an answer that is not 200."""
        if response.status_code != httpx.codes.OK:
            raise await refusal(response)

    async def forget(self, namespace: str, documents: Sequence[Sequence[int]] | None) -> None:
        """Do nothing: the engine holds exact prefixes only, found by their text alone and evicted by age."""

    async def _abort(self, rid: str) -> None:
        try:
            await self._client.post("/abort_request", json={"rid": rid}, timeout=10)
        except httpx.HTTPError as error:
            log.warning("could not tell the engine to abort %s: %r", rid, error)

    async def close(self) -> None:
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=5)
        await self._client.aclose()


async def _lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Split at line feeds only: httpx's lines end at U+2028 and its like, too, which JSON may contain."""
    rest = b""
    async for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield line
    yield rest


async def _until(deadline: float, lines: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield lines as they come. Raises TimeoutError when one has not come by ``deadline``, in loop time."""
    while True:
        try:
            async with asyncio.timeout_at(deadline):
                line = await anext(lines)
        except StopAsyncIteration:
            return
        yield line


async def refusal(response: httpx.Response) -> EngineError | InvalidRequest | TooManyRequests | Unavailable:
    """Read an answer that is not 200, and return the error that it stands for."""
    text = (await response.aread()).decode("utf-8", "replace")[:500]
    if response.status_code == httpx.codes.BAD_REQUEST:
        return InvalidRequest(f"The engine refused the request: {text}")
    if response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        return EngineError("The engine refused our API key.", hint="Set --engine-api-key.")
    if response.status_code == httpx.codes.TOO_MANY_REQUESTS:
        return TooManyRequests("The engine's queue is full.", hint="Retry in a moment.")
    if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
        return Unavailable(f"The engine is not available: {text}", hint="Retry in a moment.")
    return EngineError(f"The engine answered {response.status_code}: {text}")
