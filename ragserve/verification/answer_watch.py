"""Check in use what the gate has verified: compare a share of the answers that composed strategies gave with
full prefill, while the server is idle.

Both contexts are led along the answer that was given, and their distributions compared token by token, as
`ragserve tune` does. What came of it is `ragserve.profiles.in_use`."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ragserve.answering.in_flight import QueryLimiter
from ragserve.engine.base import Engine, GenerateRequest, Sampling
from ragserve.engine.document_cache import CachingEngine, answering
from ragserve.errors import RagserveError
from ragserve.metrics import metrics
from ragserve.profiles.costs import ABSENT
from ragserve.profiles.gate import Gate
from ragserve.profiles.in_use import InUse, InUseRecord
from ragserve.strategy_spec import FULL, StrategySpec
from ragserve.verification import MAX_TOKENS
from ragserve.verification.distribution import Closeness, forced_along, given_answer
from ragserve_index import IndexStore
from sglang_ext.wire.protocol import pieces_of

log = logging.getLogger(__name__)
MOST_WAITING = 8  # answers, in memory with their prompts; further ones are not drawn
_LIMIT_S = 30.0  # well below the grace time of removed documents (`ragserve.cache.evictions`)


@dataclass(frozen=True, slots=True)
class WaitingAnswer:
    """An answered request, its tokens, and the version of the namespace it was retrieved from (None: its
    documents were given)."""

    label: str
    request: GenerateRequest
    ids: tuple[int, ...]
    version: int | None


class AnswerWatch:
    """Draws answers and compares them one at a time. Belongs to one event loop."""

    def __init__(
        self,
        engine: Engine,
        store: IndexStore,
        gate: Gate,
        record: InUseRecord,
        limiter: QueryLimiter,
        share: float,
        *,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """``share`` of the answers of verified strategies are compared; ``draw`` gives numbers below 1."""
        self._engine = engine
        self._store = store
        self._gate = gate
        self._record = record
        self._limiter = limiter
        self._share = share
        self._draw = draw
        self._waiting: deque[WaitingAnswer] = deque()
        self._comparing = 0
        for namespace, own in record.entries().items():
            for label, found in own.items():
                _show(namespace, label, found)

    @property
    def waiting(self) -> int:
        """Answers that were drawn and not compared yet, the one that is being compared among them."""
        return len(self._waiting) + self._comparing

    def answered(self, request: GenerateRequest, ids: Sequence[int], version: int | None) -> None:
        """Note an answer; an `OnComposed` of the answerer."""
        if not ids or len(self._waiting) >= MOST_WAITING or self._draw() >= self._share:
            return
        label = StrategySpec(request.strategy, request.options).label
        if label in self._gate.verified(request.namespace):
            sampling = Sampling(max_new_tokens=MAX_TOKENS)
            request = replace(request, rid="verify", sampling=sampling, decode={}, background=True)
            self._waiting.append(WaitingAnswer(label, request, tuple(ids[:MAX_TOKENS]), version))

    def work(self) -> Coroutine[Any, Any, None] | None:
        """Compare the next answer; None without any. What is cancelled is done again later."""
        return self._next() if self._waiting else None

    async def _next(self) -> None:
        self._comparing += 1
        try:
            await self._compare(self._waiting.popleft())
        finally:
            self._comparing -= 1

    async def _compare(self, answer: WaitingAnswer) -> None:
        namespace = answer.request.namespace
        try:
            async with asyncio.timeout(_LIMIT_S):
                versions = await self._versions()
                close = await self._compared(answer, versions.get(namespace))
        except asyncio.CancelledError:
            self._waiting.appendleft(answer)
            raise
        except (RagserveError, TimeoutError) as error:
            log.info("An answer of strategy %s could not be compared: %r", answer.label, error)
            return
        if close is not None:
            figures = close.mean_kl, close.mean_regret
            add = asyncio.to_thread(self._record.add, namespace, answer.label, *figures, existing=versions)
            try:
                found = await asyncio.shield(add)  # counted once
            except (OSError, RagserveError) as error:
                log.warning("What an answer in use has shown could not be kept: %s", error)
                return
            _show(namespace, answer.label, found)
            _report(namespace, answer.label, found)

    async def _versions(self) -> dict[str, int]:
        return {one.name: one.version for one in await asyncio.to_thread(self._store.namespaces)}

    async def _compared(self, answer: WaitingAnswer, version: int | None) -> Closeness | None:
        """Compare an answer; None if its documents have left the cache, or its texts may have been removed.

        ``version``: the namespace's, None for one that does not exist."""
        request = answer.request
        if version is None or answer.version not in (None, version):
            return None
        with self._limiter.background(request.namespace, request):
            if isinstance(self._engine, CachingEngine):
                documents = pieces_of(request.input_ids, request.spans)
                engine = answering(self._engine, request.namespace, documents)
                found = await engine.where(request.namespace, documents)
                if ABSENT in found.fastest():
                    return None
            full = replace(request, strategy=FULL.name, options={}, scores=None)
            reference = await given_answer(self._engine, full, answer.ids)
            close, timed = await forced_along(self._engine, request, reference)
        return None if timed.last.fallback else close


def _show(namespace: str, label: str, found: InUse) -> None:
    figures, recorded = found.figures, metrics()
    recorded.use_compared.labels(namespace, label).set(figures["compared"])
    recorded.use_kl.labels(namespace, label).set(figures["kl"])
    recorded.use_regret.labels(namespace, label).set(figures["regret"])
    recorded.use_taken_out.labels(namespace, label).set(found.out)


def _report(namespace: str, label: str, found: InUse) -> None:
    figures = found.figures
    log.log(
        logging.WARNING if found.out else logging.INFO,
        "Strategy %s in namespace %s over %d answers in use: KL a token %.3g (at 95 %% %.3g to %.3g), "
        "regret %.2g %% (%.2g to %.2g)%s",
        *(label, namespace, figures["compared"]),
        *(figures["kl"], figures["kl_at_least"], figures["kl_at_most"]),
        *(figures["regret"], figures["regret_at_least"], figures["regret_at_most"]),
        f": out of auto there until ragserve tune --namespace {namespace} has run" if found.out else "",
    )
