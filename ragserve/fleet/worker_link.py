"""A worker as the server in front sees it: whether it may answer, and why not."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from ragserve.config import Settings
from ragserve.engine.remote import LOST
from ragserve.errors import InvalidRequest, RagserveError, Unavailable
from ragserve.fleet.affinity import HELD, Holders
from ragserve.fleet.router import ROUTER_LOST, Router, is_address
from ragserve.fleet.unconfirmed import Deletion, Unconfirmed
from ragserve.fleet.worker_about import WorkerAbout
from ragserve.fleet.worker_engine import WorkerEngine
from ragserve.metrics import metrics

State = Literal["serving", "draining", "fenced", "lost", "refused"]

log = logging.getLogger(__name__)
PROBE_S = 1.0
CONFIRM_S = 30.0
"""Seconds that a worker has to confirm a deletion before it is fenced off."""


class WorkerLink:
    """A worker's address, its engine and its state.

    ``serving`` takes requests. ``draining`` takes no new ones. ``fenced`` has deletions to confirm. ``lost``
    does not answer. ``refused`` serves something else than the others."""

    def __init__(
        self,
        settings: Settings,
        url: str,
        unconfirmed: Unconfirmed,
        holders: Holders,
        router: Router | None = None,
    ) -> None:
        """``holders`` gets what the worker holds whenever it has been started."""
        self.engine = WorkerEngine(settings, url, router)
        self.url = self.engine.url
        self.about: WorkerAbout | None = None
        self.error: RagserveError | None = None  # of the last probe
        self.refusal = ""
        self.in_flight = 0
        self.waiting = 0  # tokens that its requests have to compute before their first ones
        self._unconfirmed = unconfirmed
        self._holders = holders
        self._listed = ""  # the process whose documents are known
        self._answers = False
        self._state: State = "lost"
        self._confirming = asyncio.Lock()
        self._wake = asyncio.Event()

    @property
    def id(self) -> str:
        """The worker's own name; its address until it has been reached."""
        return self.url if self.about is None else self.about.id

    @property
    def state(self) -> State:
        if self.refusal:
            return "refused"
        if not self._answers or self.about is None:
            return "lost"
        if self._unconfirmed.of(self.about.id):
            return "fenced"
        return "draining" if self.about.draining else "serving"

    @property
    def serving(self) -> bool:
        return self.state == "serving"

    def answers_as(self, worker: str) -> bool:
        """Whether the last probe was answered, and by this worker: one that is gone may be elsewhere now."""
        return self.error is None and self.about is not None and self.about.id == worker

    def describe(self) -> dict[str, Any]:
        """Figures of `/info`."""
        return {
            "url": self.url,
            "id": self.id,
            "state": self.state,
            "routed": self.engine.routed,
            "reason": self._why(),
            "in_flight": self.in_flight,
            "unconfirmed_deletions": len(self._unconfirmed.of(self.id)),
        }

    @contextmanager
    def busy(self, tokens: int) -> Iterator[Callable[[], None]]:
        """Count a request, which has so many tokens to compute; call the result at its first token."""
        left = tokens

        def computed() -> None:
            nonlocal left
            self.waiting -= left
            left = 0

        self.waiting += tokens
        self.in_flight += 1
        metrics().worker_in_flight.labels(self.url).set(self.in_flight)
        metrics().worker_requests.labels(self.url).inc()
        try:
            yield computed
        finally:
            computed()
            self.in_flight -= 1
            metrics().worker_in_flight.labels(self.url).set(self.in_flight)

    def suspect(self) -> None:
        """Send nothing until the next probe, which comes at once: a request's connection broke off."""
        self._answers = False
        self.note()
        self._wake.set()

    async def probe(self, refusal_of: Callable[[WorkerAbout], str]) -> None:
        """Ask the worker how it is, and for what deletions it has to confirm. ``refusal_of`` says why a
        worker may not serve; empty if it may."""
        try:
            about = await self.engine.about()
        except RagserveError as error:
            self.error, self._answers = error, False
            self.refusal = "" if error.status == 503 else error.message
            self.note()
            return
        self.error, self.about = None, about
        self.refusal = refusal_of(about)
        self._unconfirmed.know(about.id)
        self._answers = True
        if not self.refusal:
            await self._confirm_all(about.id)
            await self._list_documents(about)
        self.note()

    def list_again(self) -> None:
        """Ask at the next probe what the worker holds."""
        self._listed = ""

    async def _list_documents(self, about: WorkerAbout) -> None:
        """Ask a worker that has been started what it holds, until it knows all of its disk."""
        if self._listed == about.boot:
            return
        try:
            held = await self.engine.control("held", most=HELD)
        except RagserveError as error:
            log.warning("Worker %s does not say what it holds, will ask again: %s", self.url, error)
            return
        self._holders.begin(about.id, held)
        if held["scanned"]:
            self._listed = about.boot

    async def confirm(self, deletion: Deletion) -> bool:
        """Have a deletion carried out. False, and the worker is fenced off, if that is not sure."""
        if self.about is None:
            raise Unavailable(f"Worker {self.url} has not answered yet.")
        worker = self.about.id
        try:
            await self._carry_out(deletion)
        except (RagserveError, TimeoutError) as error:
            log.warning("Worker %s is fenced off: it has not confirmed a deletion: %r", self.url, error)
            self._unconfirmed.add([worker], deletion)
            self.note()
            return False
        return True

    async def _confirm_all(self, worker: str) -> None:
        async with self._confirming:
            for deletion in self._unconfirmed.of(worker):
                try:
                    await self._carry_out(deletion)
                except (RagserveError, TimeoutError) as error:
                    level = logging.DEBUG if self._state == "fenced" else logging.WARNING  # said already
                    log.log(level, "Worker %s stays fenced off: %r", self.url, error)
                    break
                self._unconfirmed.confirm(worker, deletion)
        await self._unconfirmed.save()

    async def _carry_out(self, deletion: Deletion) -> None:
        arguments = {name: value for name, value in deletion.items() if name != "op"}
        async with asyncio.timeout(CONFIRM_S):
            answer = await self.engine.control(deletion["op"], **arguments)
        if answer.get("unconfirmed"):
            log.warning(
                "Worker %s has removed it, the shared store has not: the worker asks it again until it has",
                self.url,
            )

    async def watch(self, refusal_of: Callable[[WorkerAbout], str]) -> None:
        """Probe for ever."""
        while True:
            try:
                async with asyncio.timeout(PROBE_S):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            began = time.monotonic()
            try:
                await self.probe(refusal_of)
            except Exception:  # whatever it is, a worker that comes back must be seen
                log.warning("Worker %s could not be probed, will retry", self.url, exc_info=True)
            if not self._answers:  # not at full speed while connections are refused
                await asyncio.sleep(max(0.0, PROBE_S / 4 - (time.monotonic() - began)))

    def note(self) -> None:
        """Log a change of state, and show it."""
        state = self.state
        if state != self._state:
            level = logging.INFO if state in ("serving", "draining") else logging.WARNING
            log.log(level, "Worker %s is %s%s", self.url, state, f": {why}" if (why := self._why()) else "")
            self._state = state
        metrics().worker_serving.labels(self.url).set(state == "serving")
        metrics().worker_unconfirmed.labels(self.url).set(len(self._unconfirmed.of(self.id)))

    def _why(self) -> str:
        return self.refusal or ("" if self.error is None or self._answers else self.error.message)


def is_loss(error: RagserveError) -> bool:
    """Return whether another worker may do what this error kept one from."""
    return error.code != ROUTER_LOST and (error.status in (429, 503) or error.code == LOST)


def checked(urls: Sequence[str]) -> list[str]:
    """Return the addresses of workers. Raises InvalidRequest for one that is none, or is there twice."""
    found = [url.strip().rstrip("/") for url in urls if url.strip()]
    for url in found:
        if not is_address(url):
            raise InvalidRequest(
                f"{url!r} is no address of a worker.",
                hint="Write --workers http://HOST:PORT,http://HOST:PORT.",
            )
    if len(set(found)) < len(found) or not found:
        raise InvalidRequest("--workers needs addresses, each once.", hint="Separate them with commas.")
    return found
