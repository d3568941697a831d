"""SGLang's router `smg` between the server and its workers: by which key it reaches which worker.

The router maps keys to workers by consistent hashing of addresses, as it knows them. So keys are found by
asking: a worker that gets a question says who it is, and refuses a key that is for another. Which worker
answers what stays the server's decision."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

import httpx

from ragserve.config import Settings
from ragserve.errors import EngineError, InvalidRequest, RagserveError, Unavailable
from ragserve.fleet.router_probe import check_carries
from ragserve.fleet.routing_key import ASK, MARK, ROUTING_KEY, WORKER, routing_key

log = logging.getLogger(__name__)
MISDIRECTED = "misdirected"
UNDELIVERED = "undelivered"
UNTAKEN = "untaken"
ROUTER_LOST = "router_lost"
"""Code of the error of an answer that ended with the router, in its middle."""

TRIES = 24  # keys for each worker that there is: by chance none is its own once in 10^10
ASK_S = 5.0
AGAIN_S = 5.0  # until a worker that the router does not know is looked for again
_RETRY_S = 0.25
_STEADY = 8


class Routed(Protocol):
    """A worker's engine."""

    @property
    def url(self) -> str: ...

    @property
    def name(self) -> str:
        """The worker's own."""
        ...

    async def left(self, probe: str) -> bool:
        """Return whether the reader of a probe's answer has left."""
        ...


@dataclass(frozen=True, slots=True)
class Way:
    """A worker's key, and where requests with it go."""

    url: str
    key: str

    @property
    def headers(self) -> dict[str, str]:
        return {ROUTING_KEY: self.key}


def is_address(url: str) -> bool:
    """Return whether requests can be sent to ``url``: http or https, a host, and a possible port if any."""
    try:
        parts = urlsplit(url)
        httpx.URL(url)
        return url.startswith(("http://", "https://")) and bool(parts.hostname) and parts.port != 0
    except (ValueError, httpx.InvalidURL):
        return False


class Router:
    """The router at ``url``, in front of ``count`` workers. Belongs to one event loop."""

    def __init__(self, settings: Settings, url: str, count: int) -> None:
        """Raises InvalidRequest for an address that is none."""
        if not is_address(url):
            raise InvalidRequest(
                f"{url!r} is no address of a router.", hint="Write --router http://HOST:PORT."
            )
        self.url = url.rstrip("/")
        self._generate = f"{self.url}/generate"
        key = settings.engine_api_key
        headers = {"Authorization": f"Bearer {key.get_secret_value()}"} if key else {}
        self._client = httpx.AsyncClient(headers=headers, timeout=ASK_S)
        self._tries = TRIES * count
        self._keys: dict[str, str] = {}  # by worker
        self._due: dict[str, float] = {}  # when a worker without a key is looked for again
        self._finding = asyncio.Lock()
        self._asked = 0
        self._answer = ""  # of the router itself, to the last question that reached no worker
        self._has_none = False  # it said that it has no worker
        self._serving = False

    def way(self, worker: str) -> Way | None:
        """The way to a worker; None while the router cannot be used for it."""
        key = self._keys.get(worker) if self._serving else None
        return None if key is None else Way(self._generate, key)

    async def start(self, engines: Sequence[Routed], wait_s: float) -> None:
        """Find a key for each worker, and check that requests pass.

        Raises Unavailable if the router does not answer within ``wait_s``, and InvalidRequest if it does not
        know a worker by then, does not keep a key with a worker, or changes what it carries."""
        loop = asyncio.get_running_loop()
        until = loop.time() + wait_s
        while reason := await self._without(engines):
            if loop.time() >= until:
                raise reason
            await asyncio.sleep(_RETRY_S)
        await self._check(engines[0])
        self._serving = True
        log.info("The router at %s reaches all %d workers", self.url, len(engines))

    async def _without(self, engines: Sequence[Routed]) -> RagserveError | None:
        """Find keys. Returns why some worker has none. Raises EngineError if our key is refused."""
        try:
            missing = [engine.url for engine in engines if not await self._find(engine.name)]
        except Unavailable as error:
            return error
        if not missing:
            return None
        return InvalidRequest(
            f"The router at {self.url} sends nothing to {', '.join(missing)}{self._answer}.",
            hint="Start it with --worker-urls of all workers, and --policy consistent_hashing.",
            code="unusable_router",
        )

    async def _check(self, engine: Routed) -> None:
        """Raises InvalidRequest for a router that cannot be used, Unavailable if it does not answer."""
        key = self._keys[engine.name]
        for _ in range(_STEADY):
            if await self._ask(key) != engine.name:
                raise InvalidRequest(
                    f"The router at {self.url} sends requests of one routing key to several workers.",
                    hint="Start it with --policy consistent_hashing.",
                    code="unusable_router",
                )
        try:
            await check_carries(self._client, self._generate, {ROUTING_KEY: key}, engine.left)
        except httpx.HTTPError as error:
            raise self._silent(error) from error

    async def look(self, engines: Sequence[Routed]) -> None:
        """Use the router again when it is back, and find what keys are missing. ``engines``: of the workers
        that serve."""
        now = asyncio.get_running_loop().time()
        if self._serving:
            without = [engine for engine in engines if engine.name not in self._keys]
            engines = [engine for engine in without if now >= self._due.get(engine.name, 0.0)]
        if not engines:
            return
        try:
            async with self._finding:
                for engine in engines:
                    self._found(engine, await self._find(engine.name), now + AGAIN_S)
            known = [engine for engine in engines if engine.name in self._keys]
            if not self._serving and known:
                await self._check(known[0])
                self._serving = True
                log.info("The router at %s can be used again", self.url)
        except RagserveError as error:
            self.lost(error.message)

    def _found(self, engine: Routed, found: bool, again: float) -> None:
        if found:
            self._due.pop(engine.name, None)
            return
        if engine.name not in self._due:
            log.warning(
                "The router at %s sends nothing to worker %s, which gets its requests directly%s",
                *(self.url, engine.url, self._answer),
            )
        self._due[engine.name] = again

    async def moved(self, worker: str, key: str) -> None:
        """Find a worker's new key: ``key`` has led to another one."""
        try:
            async with self._finding:
                if self._keys.get(worker) == key:
                    await self._find(worker)
        except RagserveError as error:
            self.lost(error.message)

    def undelivered(self, worker: str) -> None:
        """Send nothing to a worker by the router until it has been looked for again: a request has not
        reached it, though it answers."""
        self._keys.pop(worker, None)
        self._due[worker] = asyncio.get_running_loop().time() + AGAIN_S

    def lost(self, reason: str) -> None:
        """Send everything directly until the router answers again."""
        level = logging.WARNING if self._serving else logging.DEBUG  # not again with each look
        log.log(level, "Requests go to the workers directly, not by the router at %s: %s", self.url, reason)
        self._serving = False

    async def _find(self, worker: str) -> bool:
        """Find a key that leads to a worker. Raises Unavailable and EngineError as `_ask` does."""
        known = self._keys.get(worker)
        if known is not None and await self._ask(known) == worker:
            return True
        self._keys.pop(worker, None)
        for number in range(self._tries):
            key = routing_key(worker, number)
            reached = await self._ask(key)
            if reached == worker:
                self._keys[worker] = key
                return True
            if reached is None and self._has_none:
                break
        return False

    async def _ask(self, key: str) -> str | None:
        """The worker that gets the requests of a key; None if none gets them.

        Raises Unavailable if the router does not answer, EngineError if our key is refused."""
        self._asked += 1  # other tokens each time: some policies go by them
        ids = [self._asked * place % 997 for place in range(1, 17)]
        body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1}}
        try:
            response = await self._client.post(
                self._generate, json=body, headers={ROUTING_KEY: key, MARK: ASK}
            )
        except httpx.HTTPError as error:
            raise self._silent(error) from error
        if response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise EngineError(
                f"The router at {self.url}, or a worker behind it, refuses our key.",
                hint="Set --engine-api-key to the workers' --api-key, and the router's --api-key, too.",
            )
        if WORKER in response.headers:
            return response.headers[WORKER]
        self._has_none = response.status_code in (httpx.codes.NOT_FOUND, httpx.codes.SERVICE_UNAVAILABLE)
        self._answer = f": it answers {response.status_code} {response.text[:200]!r}"
        return None

    def _silent(self, error: httpx.HTTPError) -> Unavailable:
        return Unavailable(
            f"The router at {self.url} does not answer: {error!r}.",
            hint="Is it running? Leave --router out to send requests to the workers directly.",
            code="engine_unreachable",
        )

    async def close(self) -> None:
        """Leave the router running."""
        await self._client.aclose()
