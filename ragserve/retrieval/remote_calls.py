"""Call a model behind a URL: JSON over HTTP, retried with backoff, bounded in time and bytes.

The URL is the operator's. Redirects are not followed: they would take the key and the texts elsewhere."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from copy import copy
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from ragserve.errors import InvalidRequest, ModelUnavailable

if TYPE_CHECKING:
    import httpx
    from pydantic import SecretStr

T = TypeVar("T")
log = logging.getLogger(__name__)

_CONNECT_S = 5.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 20.0
_AGAIN = frozenset({408, 429, 500, 502, 503, 504, 529})
_REFUSED = frozenset({400, 413, 422})
_QUOTED_CHARS = 200
_HEAD_BYTES = 2**16
_POLL_S = 0.2
_REST_S = 5.0  # after a failed question, in which others fail at once


class Refused(Exception):
    """Internal: the model does not take this input (HTTP 400, 413, 422); its words."""


class Stopped(Exception):
    """A call ended because its caller was told to stop."""


@dataclass(frozen=True, slots=True)
class RemoteAddress:
    """A route, and the model that requests name; None where the route has one model only."""

    url: str
    model: str | None


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds for an attempt, and from the first one until another may begin."""

    attempt_s: float
    retry_s: float


def parse_address(text: str, route: str, *, param: str, example: str) -> RemoteAddress:
    """Read ``URL`` or ``URL#MODEL``; ``route`` is appended unless the URL ends with it.

    Raises InvalidRequest. A key in the URL is refused: settings, logs and errors would show it."""
    url, mark, model = text.partition("#")
    try:
        parts = urlsplit(url)
        port_is_valid = parts.port is None or parts.port > 0
    except ValueError:
        parts, port_is_valid = urlsplit(""), False
    problem = None
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_is_valid:
        problem = "is no http:// or https:// address"
    elif parts.username is not None or parts.password is not None or parts.query:
        problem = "has a user name, a password or a query, which may hold a key"
    elif mark and not model.strip():
        problem = "names no model behind '#'"
    if problem is not None:
        raise InvalidRequest(
            f"{param}: the URL {problem}.",
            hint=f"Give it as {example}, and its key as RAGSERVE_{param.upper()}_API_KEY.",
            code=f"{param}_invalid",
            param=param,
        )
    url = url.rstrip("/")
    return RemoteAddress(url if url.endswith(route) else url + route, model.strip() or None)


class RemoteModel:
    """A route of a remote model. Thread-safe: it holds no connection.

    Args:
        what: "embedder" or "rerank", the setting that names it.
        name: Its name in errors, which clients of the server read: without the host.
        key: Sent as a bearer token, nowhere else.
    """

    def __init__(self, what: str, name: str, address: RemoteAddress, key: SecretStr | None) -> None:
        self.what, self.name, self.address = what, name, address
        self._failed: tuple[float, ModelUnavailable] | None = None
        self._trouble = 0.0, ""  # when an attempt failed last, and why
        self._answered = 0.0  # when a question was answered last
        self._key = None if key is None else key.get_secret_value()

    def client(self) -> httpx.AsyncClient:
        """A client of the current event loop, which the caller closes."""
        import httpx

        headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        return httpx.AsyncClient(headers=headers, timeout=httpx.Timeout(None, connect=_CONNECT_S))

    async def post(
        self, client: httpx.AsyncClient, body: dict[str, Any], patience: Patience, most_bytes: int
    ) -> Any:
        """Return the parsed answer. Raises ModelUnavailable, and Refused for this input."""
        deadline = time.monotonic() + patience.retry_s
        pause = _FIRST_PAUSE_S
        while True:
            reason, wait = await self._attempt(client, body, patience.attempt_s, most_bytes + _HEAD_BYTES)
            if isinstance(reason, _Answer):
                return reason.value
            self._trouble = time.monotonic(), reason
            wait = max(wait, pause * random.uniform(0.5, 1.0))
            if wait >= deadline - time.monotonic():
                raise self.failed(reason)
            log.info("the %s %s (%s): %s; again in %.1f s", *self._who, reason, wait)
            await asyncio.sleep(wait)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    @asynccontextmanager
    async def answering(self, seconds: float) -> AsyncIterator[None]:
        """Bound the calls for a question. For a while after they failed the same error comes at once, so that
        nobody waits for a model that is down. One that has answered others meanwhile is not: a single
        question may be too much for it."""
        if self._failed is not None and time.monotonic() < self._failed[0]:
            raise copy(self._failed[1])
        began = time.monotonic()
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError:
            when, reason = self._trouble
            error = self.failed(reason if when >= began else f"did not answer within {seconds:g} s")
        except ModelUnavailable as failed:
            error = failed
        else:
            self._answered, self._failed = time.monotonic(), None
            return
        if self._answered < began:
            self._failed = time.monotonic() + _REST_S, error
        raise error from None

    def failed(self, reason: str, hint: str | None = None) -> ModelUnavailable:
        """The error of a call that got no answer, or none of use. The log names the address."""
        log.warning("the %s %s (%s) %s", *self._who, reason)
        kind = "reranker" if self.what == "rerank" else self.what
        return ModelUnavailable(
            f"The remote {kind} {self.name} {reason}.",
            hint=hint or "The server's log names its address; `ragserve doctor` asks it.",
            code=f"{kind}_unavailable",
        )

    @property
    def _who(self) -> tuple[str, str, str]:
        return self.what, self.name, self.address.url

    async def _attempt(
        self, client: httpx.AsyncClient, body: dict[str, Any], seconds: float, most: int
    ) -> tuple[str | _Answer, float]:
        """An answer, or why to try again and the seconds that the model asks to wait."""
        import httpx

        try:
            async with asyncio.timeout(seconds):
                async with client.stream("POST", self.address.url, json=body) as response:
                    raw = bytearray()
                    async for block in response.aiter_bytes():
                        raw += block
                        if len(raw) > most:
                            raise self.failed(f"sends more than the {most:,} bytes that fit the request")
        except (TimeoutError, httpx.TimeoutException):
            return f"did not answer within {seconds:.3g} s", 0.0
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return f"is not reachable: {str(error) or type(error).__name__}", 0.0
        status = response.status_code
        if status in _AGAIN:
            return f"answers HTTP {status}{self._quoted(raw)}", _asked_wait(response)
        if 300 <= status < 400:
            raise self.failed(
                f"answers HTTP {status}, a redirect, which is not followed", "Give the address it leads to."
            )
        if status in (401, 403):
            raise self.failed(
                f"refuses the API key (HTTP {status})", f"Set RAGSERVE_{self.what.upper()}_API_KEY."
            )
        if status in _REFUSED:
            raise Refused(f"HTTP {status}{self._quoted(raw)}")
        if status != 200:
            raise self.failed(f"answers HTTP {status}{self._quoted(raw)}")
        try:
            return _Answer(json.loads(bytes(raw))), 0.0
        except (ValueError, RecursionError):
            kind = response.headers.get("content-type", "no type").partition(";")[0][:40]
            raise self.failed(f"answers no JSON, but {kind}: is the URL its API?") from None

    def _quoted(self, raw: bytes | bytearray) -> str:
        """What an error says, for people: without the key, which some servers repeat."""
        text = bytes(raw[: 64 * _QUOTED_CHARS]).decode("utf-8", "replace")
        try:
            said = json.loads(text)
        except (ValueError, RecursionError):
            return ""  # a page for browsers
        said = said.get("error", said) if isinstance(said, dict) else said
        said = said.get("message", said.get("detail")) if isinstance(said, dict) else said
        if not isinstance(said, str):
            return ""
        if self._key:
            said = said.replace(self._key, "***")
        return f": {' '.join(said.split())[:_QUOTED_CHARS].rstrip('.')}"


@dataclass(frozen=True, slots=True)
class _Answer:
    value: Any


def _asked_wait(response: httpx.Response) -> float:
    """Seconds of ``Retry-After``, which is a number or a date."""
    given = response.headers.get("retry-after", "")
    try:
        return max(0.0, float(given))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(given).timestamp() - time.time())
    except (ValueError, TypeError):
        return 0.0


def run_until(work: Callable[[], Coroutine[Any, Any, T]], should_stop: Callable[[], bool]) -> T:
    """Run ``work`` in an event loop of this thread, which has none. Raises Stopped soon after
    ``should_stop()``."""

    async def watched() -> T:
        task = asyncio.ensure_future(work())
        try:
            while not (await asyncio.wait({task}, timeout=_POLL_S))[0]:
                if should_stop():
                    raise Stopped
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    return asyncio.run(watched())
