"""Engine over the HTTP API of an SGLang server that runs elsewhere."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, suppress
from http import HTTPStatus
from typing import Any

import aiohttp
import httpx
import orjson

from ragserve import tracing
from ragserve.config import Settings
from ragserve.engine.base import EngineInfo, GenerateChunk, GenerateRequest
from ragserve.engine.stream import StreamReader, new_rid, payload, timed_out
from ragserve.errors import EngineError, InvalidRequest, RagserveError, TooManyRequests, Unavailable

log = logging.getLogger(__name__)
_PROBE = "The lighthouse of Skerryvore was built in 1844, of 4,308 tons of granite, on a reef."
LOST = "engine_lost"
"""Code of the errors of a connection that ended before its answer."""

REFUSES_KEY = "engine_refuses_key"

FAILURES = (aiohttp.ClientError, TimeoutError, ValueError)
"""What a request raises that gets no answer, or one that cannot be read."""

_CONNECT_S = 10.0
_IDLE_S = 2.0  # a connection is kept open; servers close theirs after five seconds
_END_S = 1.0  # for a stream's end after its last output


class RemoteEngine:
    """An `Engine` over ``settings.engine_url``, with strategies ``full`` and ``prefix``."""

    def __init__(self, settings: Settings) -> None:
        if settings.engine_url is None:
            raise InvalidRequest("No engine address given.", hint="Set --engine-url.")
        self._settings = settings
        self._url = settings.engine_url.rstrip("/")
        self._session: aiohttp.ClientSession | None = None
        self._info: EngineInfo | None = None
        self._seeds = False  # the server reads them
        self._last: set[asyncio.Task[None]] = set()  # what is left to do for requests that have ended

    async def start(self) -> EngineInfo:
        """Read model and limits from the server. Raises Unavailable if it does not answer."""
        server, model = await self._get("/server_info"), await self._get("/model_info")
        tokenizer = self._settings.tokenizer or model.get("tokenizer_path") or model["model_path"]
        total = int(server["max_total_num_tokens"])
        self._seeds = bool(server.get("enable_deterministic_inference"))
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
            async with self._request("GET", path, timeout_s=10) as response:
                response.raise_for_status()
                body = await response.json(content_type=None)
            if not isinstance(body, dict):
                raise ValueError("the answer is not a JSON object")
        except FAILURES as error:
            raise Unavailable(
                f"The engine at {self._url} does not answer {path} as SGLang does: {told(error)}.",
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
            async with self._request("POST", "/tokenize", body, timeout_s=10) as response:
                theirs = (await response.json(content_type=None))["tokens"] if response.ok else None
        except (*FAILURES, KeyError, TypeError):
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
            async with self._request("GET", "/health", timeout_s=5) as response:
                return response.status == HTTPStatus.OK and self._info is not None
        except FAILURES:
            return False

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        """See the protocol. Leaving early closes the connection and asks the server to abort."""
        if request.sampling.seed is not None and request.sampling.temperature > 0 and not self._seeds:
            raise InvalidRequest(
                f"seed: the engine at {self._url} does not read seeds.",
                hint="Leave seed out, ask with temperature 0, or start that engine with "
                "--enable-deterministic-inference.",
            )
        fields = payload(request, new_rid(request.rid))
        async with aclosing(self._run(fields, len(request.input_ids))) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _run(self, fields: dict[str, Any], prompt_tokens: int) -> AsyncGenerator[GenerateChunk, None]:
        """Run one request."""
        reader = StreamReader(prompt_tokens, fields["sampling_params"].get("stop", ()))
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
        timeout_s = self._settings.engine_timeout_s
        deadline = asyncio.get_running_loop().time() + timeout_s
        sent = tracing.headers() | dict(headers or {})
        try:
            async with AsyncExitStack() as stack:
                # Timeouts are never around the yield: there they would cancel our reader.
                async with asyncio.timeout_at(deadline):
                    response = await stack.enter_async_context(
                        self._request("POST", url, fields, headers=sent)
                    )
                    if response.status != HTTPStatus.OK:
                        ended = len(rids)
                    await self._admit(response)
                lines = _lines(response.content.iter_any())
                async for line in _until(deadline, lines):
                    if not line.startswith(b"data:"):
                        continue
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        break
                    out = orjson.loads(data)
                    if "error" in out:
                        ended = len(rids)
                    elif out.get("meta_info", {}).get("finish_reason"):
                        ended += 1
                    yield out
                    if ended == len(rids):
                        self._do_later(_read_to_end(lines, stack.pop_all()))
                        return
                if ended < len(rids):
                    ended = len(rids)
                    raise EngineError(
                        "The engine closed the stream before the answer was complete.",
                        hint="See its log.",
                        code=LOST,
                    )
        except (aiohttp.ClientError, ValueError) as error:  # ValueError: no JSON, or no UTF-8
            raise Unavailable(
                f"The engine at {self._url} broke off: {told(error)}.", hint="Is it still running?", code=LOST
            ) from error
        except TimeoutError:
            raise timed_out(timeout_s) from None
        finally:
            if ended < len(rids):
                for rid in rids:
                    self._do_later(self._abort(rid))

    def _request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Send a request to a path of the engine, or to another URL. ``timeout_s`` is for all of it, None for
        no limit. Raises one of `FAILURES`."""
        if self._session is None:
            self._session = _session(self._settings)
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_S)
        data = None if body is None else orjson.dumps(body)
        kind = {} if body is None else {"content-type": "application/json"}
        url = self._url + path if path.startswith("/") else path
        return self._session.request(
            method, url, data=data, headers=kind | dict(headers or {}), timeout=timeout, allow_redirects=False
        )

    async def _admit(self, response: aiohttp.ClientResponse) -> None:
        """Raise the error of an answer that is not 200."""
        if response.status != HTTPStatus.OK:
            text = (await response.read()).decode("utf-8", "replace")
            raise refusal(f"The engine at {self._url}", response.status, _parsed(text))

    async def forget(self, namespace: str, documents: Sequence[Sequence[int]] | None) -> None:
        """Do nothing: the engine holds exact prefixes only, found by their text alone and evicted by age."""

    async def _abort(self, rid: str) -> None:
        try:
            async with self._request("POST", "/abort_request", {"rid": rid}, timeout_s=10):
                pass
        except FAILURES as error:
            log.warning("could not tell the engine to abort %s: %s", rid, told(error))

    def _do_later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._last.add(task)
        task.add_done_callback(self._last.discard)

    async def close(self) -> None:
        if self._last:
            await asyncio.wait(self._last, timeout=5)
        if self._session is not None:
            await self._session.close()


def told(error: Exception) -> str:
    """What one of `FAILURES` says, or its name: a TimeoutError says nothing."""
    return str(error) or type(error).__name__


def _session(settings: Settings) -> aiohttp.ClientSession:
    key = settings.engine_api_key
    return aiohttp.ClientSession(
        # httpx's certificates, as the proxy for SGLang's own routes and the router have them
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S, ssl=httpx.create_ssl_context()),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers={"Authorization": f"Bearer {key.get_secret_value()}"} if key else {},
    )


async def _lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Split at line feeds only: JSON may contain U+2028 and its like."""
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


async def _read_to_end(lines: AsyncIterator[bytes], response: AsyncExitStack) -> None:
    """Read what follows the last output, which is not waited for: only then is the connection used again."""
    async with response:
        with suppress(*FAILURES):
            async with asyncio.timeout(_END_S):
                async for _ in lines:
                    pass


def _parsed(text: str) -> Any:
    try:
        return orjson.loads(text)
    except ValueError:
        return text


def refusal(
    who: str, status: int, body: Any, missing: str = "It does not answer as SGLang does."
) -> RagserveError:
    """Return the error that an answer other than 200 stands for.

    Args:
        who: The engine, as the error names it.
        body: JSON, whose ``error`` says why if it has one, or text.
        missing: What 404 says of the engine."""
    error = body.get("error", body) if isinstance(body, dict) else body
    message = str(error.get("message", error) if isinstance(error, dict) else error)[:500]
    if status == HTTPStatus.BAD_REQUEST:
        return InvalidRequest(f"{who} refused the request: {message}")
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        hint = "Set --engine-api-key to the API key of the engine or the workers."
        return EngineError(f"{who} refuses our key.", hint=hint, code=REFUSES_KEY)
    if status == HTTPStatus.NOT_FOUND:
        return InvalidRequest(f"{who} answered 404. {missing}", hint="Check its address.")
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return TooManyRequests(f"{who} has a full queue.", hint="Retry in a moment.")
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        return Unavailable(f"{who} is not available: {message}", hint="Retry in a moment.")
    return EngineError(f"{who} answered {status}: {message}", hint="See its log.")
