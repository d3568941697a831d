"""Engine of a worker, over HTTP: all that an engine in this process does."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from http import HTTPStatus
from typing import Any

import aiohttp

from ragserve.config import Settings
from ragserve.engine.base import EngineInfo, GenerateChunk, GenerateRequest
from ragserve.engine.document_cache import ControlledCache
from ragserve.engine.prefill import Documents
from ragserve.engine.remote import FAILURES, LOST, RemoteEngine, refusal, told
from ragserve.engine.stream import new_rid, note_failure
from ragserve.errors import InvalidRequest, RagserveError, Unavailable
from ragserve.fleet.router import MISDIRECTED, ROUTER_LOST, UNDELIVERED, UNTAKEN, Router
from ragserve.fleet.routing_key import ROUTING_KEY, WORKER
from ragserve.fleet.worker_about import WorkerAbout, version_problem

ABOUT_TIMEOUT_S = 5.0
NO_WORKER = "It has no /worker: start it with `ragserve serve --worker`."
_WAYS = 3  # by the router that a request is sent before it goes to its worker directly
_PROBE_TIMEOUT_S = 15.0


class WorkerEngine(ControlledCache, RemoteEngine):
    """A `CachingEngine` over the routes of one worker. Requests go by the router, if there is one;
    control operations and what is prefilled for the cache do not."""

    def __init__(self, settings: Settings, url: str, router: Router | None = None) -> None:
        super().__init__(settings.model_copy(update={"engine_url": url}))
        self.url = self._url
        self.name = ""  # the worker's own, once it has been reached
        self._router = router
        self._documents = Documents(self._run, self._run_together)

    async def start(self) -> EngineInfo:
        """See `Engine`. Raises Unavailable, and InvalidRequest if it cannot work with this server."""
        return (await self.about()).engine

    async def close(self) -> None:
        """See `Engine`."""
        await self._documents.close()
        await super().close()

    async def about(self) -> WorkerAbout:
        """Ask the worker for its account. Raises Unavailable if it does not answer, EngineError if it
        refuses our key or failed, and InvalidRequest if it is no worker of this version."""
        body = await self._call("GET", "/worker", timeout_s=ABOUT_TIMEOUT_S)
        if problem := version_problem(str(body.get("ragserve"))):
            raise InvalidRequest(
                f"The worker at {self.url} cannot be used: {problem}.", hint="Run one version everywhere."
            )
        try:
            found = WorkerAbout.of(body)
        except (KeyError, TypeError) as error:
            raise InvalidRequest(
                f"{self.url} does not answer /worker as a worker does: {error!r}.", hint="Check --workers."
            ) from None
        self._info, self._fingerprint, self.name = found.engine, found.cache_fingerprint, found.id
        return found

    @property
    def routed(self) -> bool:
        """Whether requests go by the router now."""
        return self._router is not None and self._router.way(self.name) is not None

    async def left(self, probe: str) -> bool:
        """See `Routed`."""
        body = await self._call("GET", f"/worker/probes/{probe}", timeout_s=_PROBE_TIMEOUT_S)
        return body.get("left") is True

    async def ready(self) -> bool:
        """See `Engine`."""
        try:
            return not (await self.about()).draining
        except RagserveError:
            return False

    def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        """See `Engine`."""
        return self._documents.generate(request)

    async def warm(self, request: GenerateRequest) -> None:
        """See `CachingEngine`."""
        await self._documents.warm(request, analyse=self._settings.kv_analysis == "ingest")

    async def control(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """See `CachingEngine`."""
        self._documents.controlled(operation, arguments, self._fingerprint)
        body = {"operation": operation, "arguments": arguments}
        answer = await self._call("POST", "/worker/control", body)
        return self._documents.counted(answer) if operation == "stat" else answer

    async def _outputs(
        self, fields: dict[str, Any], url: str = "/generate", headers: Mapping[str, str] | None = None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """See `RemoteEngine`: by the router. What does not arrive that way is sent again, by another key or
        directly. The router takes one request at a time, so lists go directly."""
        for _ in range(_WAYS):
            router = None if isinstance(fields["rid"], list) else self._router
            way = None if router is None else router.way(self.name)
            if router is None or way is None:
                break
            began = False
            try:
                async with aclosing(super()._outputs(fields, way.url, way.headers)) as outputs:
                    async for out in outputs:
                        began = True
                        yield out
                return
            except RagserveError as error:
                if error.code == UNTAKEN:
                    break
                if error.code == MISDIRECTED:
                    await router.moved(self.name, way.key)
                else:
                    await self._find_fault(error, router, began=began)
            fields = fields | {"rid": new_rid(fields["rid"])}  # the first may still be ending
        async with aclosing(super()._outputs(fields, url, headers)) as outputs:
            async for out in outputs:
                yield out

    async def _find_fault(self, error: RagserveError, router: Router, *, began: bool) -> None:
        """Return if the router has failed and the request can be sent again. Otherwise raises the error."""
        if error.code not in (LOST, UNDELIVERED):
            raise error
        try:
            await self.about()
        except RagserveError:
            raise Unavailable(
                f"The worker at {self.url} is gone: {error.message}", hint="Retry in a moment.", code=LOST
            ) from error
        if error.code == UNDELIVERED:
            router.undelivered(self.name)
        else:
            router.lost(error.message)
        if began:
            raise Unavailable(
                "The router broke off, in the middle of the answer.",
                hint="Send the request again: it goes to the worker directly.",
                code=ROUTER_LOST,
            ) from error

    async def _admit(self, response: aiohttp.ClientResponse) -> None:
        """See `RemoteEngine`. An answer without a worker's name is the router's own."""
        if ROUTING_KEY in response.request_info.headers:
            status, worker = response.status, response.headers.get(WORKER)
            if status == HTTPStatus.MISDIRECTED_REQUEST:
                raise Unavailable("The router has moved the key.", code=MISDIRECTED)
            if worker is None and status != HTTPStatus.TOO_MANY_REQUESTS:
                text = (await response.read()).decode("utf-8", "replace")[:200]
                # such as a number out of range
                wrong = 400 <= status < 500 and status != HTTPStatus.NOT_FOUND
                code = UNTAKEN if wrong else UNDELIVERED
                raise Unavailable(f"The router answered {status} itself: {text}", code=code)
        await super()._admit(response)

    async def _call(
        self, method: str, path: str, body: Any = None, *, timeout_s: float | None = None
    ) -> dict[str, Any]:
        timeout_s = timeout_s or self._settings.engine_timeout_s
        try:
            async with self._request(method, path, body, timeout_s=timeout_s) as response:
                answer = await response.json(content_type=None)
        except FAILURES as error:
            raise Unavailable(
                f"The worker at {self.url} does not answer {path}: {told(error)}.",
                hint="Is it running?",
                code=LOST,
            ) from error
        if response.status == HTTPStatus.OK and isinstance(answer, dict):
            return answer
        raise refusal(f"The worker at {self.url}", response.status, answer, NO_WORKER)

    async def _run_together(self, requests: Sequence[dict[str, Any]]) -> dict[str, RagserveError]:
        """Run requests to their ends as one scheduler message, and so in one batch. Returns the errors of
        those that failed by their ids; raises one that is of all."""
        fields = {name: [request[name] for request in requests] for name in requests[0]} | {"stream": True}
        failed: dict[str, RagserveError] = {}
        async with aclosing(self._outputs(fields)) as outputs:
            async for out in outputs:
                note_failure(out, failed)
        return failed
