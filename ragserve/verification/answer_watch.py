"""Check in use what the gate has verified: compare a share of the answers that strategies gave in place of
full prefill with those of full prefill, while the server is idle.

Both are asked again as `ragserve tune` asks: greedily, for a short answer. So the rates of different answers
and of those that stand in no passage may be held against the ones that were recorded when the strategy was
verified. What came of it is `ragserve.profiles.in_use`."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ragserve.answering.in_flight import QueryLimiter
from ragserve.answering.prompt import PromptBuilder
from ragserve.engine.base import Engine, GenerateRequest, Sampling
from ragserve.engine.document_cache import CachingEngine, answering
from ragserve.errors import NotFound, RagserveError
from ragserve.metrics import metrics
from ragserve.profiles.costs import ABSENT
from ragserve.profiles.gate import Gate
from ragserve.profiles.in_use import InUse, InUseRecord, RecordedRates
from ragserve.strategy_spec import StrategySpec
from ragserve.verification import MAX_TOKENS
from ragserve.verification.engine_run import first_token
from ragserve.verification.question_probes import SHORT, differ
from ragserve.verification.unsupported import unsupported
from ragserve_index import IndexStore
from sglang_ext.wire.joint_names import is_joint
from sglang_ext.wire.protocol import EXACT_STRATEGIES, Span, pieces_of

log = logging.getLogger(__name__)
MOST_WAITING = 8  # answers, in memory with their prompts; further ones are not drawn
_LIMIT_S = 30.0  # well below the grace time of removed documents (`ragserve.cache.evictions`)


@dataclass(frozen=True, slots=True)
class WaitingAnswer:
    """An answered request, the same by full prefill, and the version of the namespace it was retrieved from
    (None: its documents were given)."""

    label: str
    request: GenerateRequest
    full: GenerateRequest
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
        prompts: PromptBuilder,
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
        self._system = prompts.system_ids(SHORT)
        self._words = prompts.words
        self._share = share
        self._draw = draw
        self._waiting: deque[WaitingAnswer] = deque()
        self._comparing = 0
        self.dropped = 0
        """Answers that were drawn and could not be compared."""
        for namespace, own in record.entries().items():
            for label, found in own.items():
                _show(namespace, label, found)

    @property
    def waiting(self) -> int:
        """Answers that were drawn and not compared yet, the one that is being compared among them."""
        return len(self._waiting) + self._comparing

    def answered(
        self,
        spec: StrategySpec,
        request: GenerateRequest,
        full: GenerateRequest,
        version: int | None,
        retriever: str | None = None,
    ) -> None:
        """Note an answer; an `OnChosen` of the answerer. Not one over several namespaces: what use shows of a
        strategy is one's. Nor one that was forced and is not verified, as far as the ``retriever`` is
        known: the registry, which knows it, is not asked here."""
        if is_joint(request.namespace):
            return
        if len(self._waiting) >= MOST_WAITING or self._draw() >= self._share:
            return
        if retriever is not None:
            verified = self._gate.searched_by(retriever).verified(request.namespace)
            if spec.label not in verified:
                return
        asked, whole = self._short(request), self._short(full)
        self._waiting.append(WaitingAnswer(spec.label, asked, whole, version))

    def _short(self, request: GenerateRequest) -> GenerateRequest:
        """The request as it is compared: with the system text that asks for short answers."""
        end, ids = request.spans[0].end, self._system
        moved = len(ids) - end
        return replace(
            request,
            rid="verify",
            input_ids=[*ids, *request.input_ids[end:]],
            spans=(Span(0, len(ids)), *(Span(s.start + moved, s.end + moved) for s in request.spans[1:])),
            sampling=Sampling(max_new_tokens=MAX_TOKENS, stop=request.sampling.stop),
            decode={},
            prefill={},
            background=True,
        )

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
        made_at: dict[str, float] = {}
        why = "its documents have left the cache, or its namespace has changed"
        try:
            async with asyncio.timeout(_LIMIT_S):
                if answer.label not in await asyncio.to_thread(self._gate.verified, namespace):
                    return  # out of the record since then
                made_at, version = await asyncio.to_thread(self._current, namespace)
                shown = await self._compared(answer, version)
                known = await asyncio.to_thread(self._gate.recorded, answer.label, namespace)
        except asyncio.CancelledError:
            self._waiting.appendleft(answer)
            raise
        except TimeoutError:
            why = f"full prefill and the strategy together took more than {_LIMIT_S:g} s"
        except RagserveError as error:
            why = str(error)
        else:
            if shown is not None:
                await self._add(answer, shown, known, made_at)
                return
        self.dropped += 1
        if namespace in made_at:
            metrics().use_dropped.labels(namespace, answer.label).inc()
        log.info("An answer of strategy %s could not be compared: %s", answer.label, why)

    async def _add(
        self,
        answer: WaitingAnswer,
        shown: tuple[bool, bool],
        known: RecordedRates,
        made_at: Mapping[str, float],
    ) -> None:
        namespace, label = answer.request.namespace, answer.label
        add = asyncio.to_thread(self._record.add, namespace, label, *shown, known, made_at=made_at)
        try:
            found = await asyncio.shield(add)  # counted once
        except (OSError, RagserveError) as error:
            log.warning("What an answer in use has shown could not be kept: %s", error)
            return
        _show(namespace, label, found)
        _report(namespace, label, found)

    def _current(self, namespace: str) -> tuple[dict[str, float], int | None]:
        """When each namespace was made, and the version of this one, None for one that does not exist."""
        made_at = self._store.made_at()  # first: one that is made again now has another version
        try:
            return made_at, self._store.namespace(namespace).version
        except NotFound:
            return made_at, None

    async def _compared(self, answer: WaitingAnswer, version: int | None) -> tuple[bool, bool] | None:
        """Whether the answers differ, and whether only full's stands in a passage; None if the documents have
        left the cache, or their texts may have been removed.

        ``version``: the namespace's, None for one that does not exist."""
        request = answer.request
        if version is None or answer.version not in (None, version):
            return None
        with self._limiter.background(request.namespace, request):
            if isinstance(self._engine, CachingEngine) and request.strategy not in EXACT_STRATEGIES:
                documents = pieces_of(request.input_ids, request.spans)[1:]
                engine = answering(self._engine, request.namespace, documents)
                found = await engine.where(request.namespace, documents)
                if ABSENT in found.fastest():
                    return None
            full = await first_token(self._engine, answer.full)
            own = await first_token(self._engine, request)
        if own.last.fallback:
            return None
        lost = await asyncio.to_thread(unsupported, self._words, answer.full, full.text, own.text)
        return differ(own.text, full.text), lost


def _show(namespace: str, label: str, found: InUse) -> None:
    recorded = metrics()
    recorded.use_compared.labels(namespace, label).set(found.compared)
    recorded.use_different.labels(namespace, label).set(found.figures["different"])
    known = found.figures["recorded"]
    recorded.use_recorded.labels(namespace, label).set(math.nan if known is None else known)
    recorded.use_unsupported.labels(namespace, label).set(found.figures["unsupported"])
    recorded.use_taken_out.labels(namespace, label).set(found.out)


def _report(namespace: str, label: str, found: InUse) -> None:
    figures = found.figures
    log.log(
        logging.WARNING if found.out else logging.INFO,
        "Strategy %s in namespace %s: of %d answers in use %g %% differ from full prefill's (when it was "
        "verified %s %%), and %g %% stand in no passage although full's do (%s %%)%s",
        *(label, namespace, figures["compared"], figures["different"], figures["recorded"]),
        *(figures["unsupported"], figures["unsupported_recorded"]),
        f": out of auto there until ragserve tune --namespace {namespace} has run" if found.out else "",
    )
