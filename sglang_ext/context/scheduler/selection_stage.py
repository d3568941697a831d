"""The stage before admission, in which a composed request waits for its documents' analyses and, for SamKV,
the query pass and the selection.

    arrives -> initial and local blocks found, or loaded from disk -> analyses found, loaded or computed ->
    query pass, all waiting requests in one -> selection -> (admission) chosen blocks found or loaded -> slots
    reserved -> filled

Runs on the scheduler's thread, once a scheduler step, for all waiting requests. A waiting request holds no
lock between steps. Every rank does the same in the same order; since their tiers may hold different things,
the ranks vote before each pass.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sglang_ext.analysis.analyser import Analyser, DocumentPart, Keep
from sglang_ext.analysis.analysis_cache import AnalysisCache
from sglang_ext.analysis.document_analysis import Analysis, Cut, SummaryError
from sglang_ext.context.compose.locate import Locator
from sglang_ext.context.compose.request import ComposedContext
from sglang_ext.context.scheduler.query_pass import QueryPass
from sglang_ext.context.scheduler.sglang_req import DocumentRequest
from sglang_ext.context.selection.base import ContextSelection, PartialSelection
from sglang_ext.context.selection.choose import Selector
from sglang_ext.context.selection.samkv import Chosen
from sglang_ext.context.selection.signals import Evidence
from sglang_ext.context.selection.signals.attention import Attention, begin_attention
from sglang_ext.ranks.ranks import Ranks
from sglang_ext.sglang_internals.model import forward_stream
from sglang_ext.stages import stages
from sglang_ext.wire.request_options import QuestionQuery

if TYPE_CHECKING:
    from sglang_ext.documents.tier_store import TierStore

log = logging.getLogger(__name__)
_ANALYSED_TOKENS = 8192  # document tokens analysed in one scheduler step; bounds how long decoding waits
_FAILED, _MISSING, _WAIT, _READY = range(4)  # votes; the lowest of any rank decides
AnalysisName = tuple[str, int, int]
"""Identifies an analysis: the document's key, block size and number of local blocks."""


class SelectionStage:
    """Turns partial selections into final ones. Per rank; scheduler thread only."""

    def __init__(
        self,
        model_runner: Any,
        *,
        locator: Locator,
        tiers: TierStore,
        analyser: Analyser,
        query_pass: QueryPass,
        selector: Selector,
        ranks: Ranks,
        memory_bytes: int,
        stable: Sequence[int] = (),
    ) -> None:
        """``memory_bytes``: budget of decoded analyses. ``stable``: layers over which P is averaged; empty
        for the built-in ones.
        """
        self._runner = model_runner
        self._locator = locator
        self._tiers = tiers
        self._analyser = analyser
        self._query_pass = query_pass
        self._selector = selector
        self._ranks = ranks
        self._stable = stable
        self._cache = AnalysisCache(memory_bytes)
        self._computed = self._prefilled = 0
        self._waiting: list[ComposedContext] = []
        self._step: Callable[[], Any] = lambda: None
        self._reads: dict[str, Any] = {}  # reads of stored analyses under way, by document key

    def add(self, context: ComposedContext) -> None:
        """Add a new request whose selection is not final."""
        self._waiting.append(context)

    def advance(self, step: Any) -> None:
        """Bring every waiting request as far as it goes, once for each ``step``, the scheduler step's own
        object.
        """
        if self._step() is step:
            return
        self._step = weakref.ref(step)
        if not self._waiting:
            return
        votes = self._located()
        found = [context for context, vote in zip(self._waiting, votes, strict=True) if vote == _READY]
        for context, vote in zip(self._waiting, votes, strict=True):
            if vote != _READY:
                self._locator.unlock(context)  # found here, but not on every rank
            if vote == _FAILED:
                context.fail(stages.ELSEWHERE)
        try:
            with forward_stream(self._runner):
                stages.run("analysis", failing(found), self._analyse, found)
                self._select([context for context in found if self._is_analysed(context)])
        finally:
            for context in found:
                self._locator.unlock(context)
        self._waiting = [
            context
            for context, vote in zip(self._waiting, votes, strict=True)
            if vote != _MISSING and context.decided is None and context.failure is None
        ]

    @property
    def waits(self) -> bool:
        """True while a request waits for its selection."""
        return bool(self._waiting)

    def drop(self, context: ComposedContext) -> None:
        """Forget a request that has ended."""
        self._waiting = [other for other in self._waiting if other is not context]

    def drop_gone(self, queued: Iterable[Any]) -> None:
        """Forget the requests that are not among SGLang's ``queued`` ones. It takes those of clients that
        left and those that waited too long off its queue without a word.
        """
        there = {id(getattr(req, "ragserve", None)) for req in queued}
        self._waiting = [context for context in self._waiting if id(context) in there]
        wanted = {key for context in self._waiting for key in context.keys}
        self._reads = {key: read for key, read in self._reads.items() if key in wanted}

    def analyse(self, key: str, ids: Sequence[int]) -> Analysis:
        """Return a document's analysis with the server's cut; computes it unless it is in memory."""
        cut = self._analyser.cut
        known = self._cache.get(key, self._analyser.block_of(len(ids), cut), cut.local_blocks)
        if self._ranks.all_agree(known is not None) and known is not None:
            return known
        return self._compute(key, ids, cut)

    def analyse_all(self, documents: Sequence[DocumentRequest], keep: Keep) -> list[Analysis]:
        """Analyse documents with the server's cut in one pass, and hand over their K and V by layer."""
        with stages.together():
            made = self._analyser.analyse_all([document.ids for document in documents], keep=keep)
        self._computed += len(made)
        self._prefilled += len(made)
        for document, analysis in zip(documents, made, strict=True):
            self._cache.put(document.key, analysis)
        return made

    def prefill(self, parts: Sequence[DocumentPart], keep: Keep) -> None:
        """Prefill parts of documents behind the prefix in one pass, and hand over their K and V by layer."""
        with stages.together():
            self._analyser.prefill(parts, keep)

    def stored(self, documents: Mapping[str, int], *, wait: bool = True) -> dict[str, Analysis] | None:
        """Return the analyses, with the server's cut, of those of ``documents`` (tokens by key) that have
        one on every rank, in order. None while some are read, unless told not to ``wait`` for them.
        """
        cut = self._analyser.cut
        with stages.together():  # the first time, they are looked for
            heads = self._analyser.heads if documents else []
        have = {
            key: self._known((key, self._analyser.block_of(n, cut), cut.local_blocks), n, heads)
            for key, n in documents.items()
        }
        votes = self._ranks.min_votes([_vote_of(known) for known in have.values()])
        if wait and _WAIT in votes:
            return None
        return {
            key: known
            for (key, known), vote in zip(have.items(), votes, strict=True)
            if vote == _READY and isinstance(known, Analysis)
        }

    def stat(self) -> dict[str, int]:
        """Figures of the analyses in memory; ``computed`` counts those made since the start, ``prefilled``
        those whose pass was the document's prefill as well.
        """
        return self._cache.stat() | {"computed": self._computed, "prefilled": self._prefilled}

    def forget(self, keys: Sequence[str] | None) -> None:
        """Drop the analyses of removed documents. With None some were removed: the others are read again from
        their tiers.
        """
        if keys is None:
            self._cache.clear()
            self._reads.clear()
        for key in keys or ():
            self._cache.remove(key)
            self._reads.pop(key, None)

    def _compute(self, key: str, ids: Sequence[int], cut: Cut) -> Analysis:
        with stages.together():
            analysis = self._analyser.analyse(ids, cut)
        self._computed += 1
        self._cache.put(key, analysis)
        return analysis

    def _located(self) -> list[int]:
        """Find what the waiting requests read, and return their votes. Every rank's misses go along: what one
        rank lacks is missing for all.
        """
        own = [self._locate(context) for context in self._waiting]
        there = [present(context.missing, len(context.keys)) for context in self._waiting]
        ballot = self._ranks.min_votes([*own, *(flag for flags in there for flag in flags)])
        votes, at = ballot[: len(own)], len(own)
        for context, vote, flags in zip(self._waiting, votes, there, strict=True):
            if vote == _MISSING:
                context.missing = absent(ballot[at : at + len(flags)])
            at += len(flags)
        return votes

    def _locate(self, context: ComposedContext) -> int:
        """Find and lock what the query pass reads, or everything where there is none."""
        missing = stages.run("load", context.fail, self._locator.resolve, context)
        if context.failure is not None:
            return _FAILED
        if missing is None:
            return _WAIT
        context.missing = missing
        return _MISSING if missing else _READY

    def _is_analysed(self, context: ComposedContext) -> bool:
        return context.failure is None and not self._analyses_of(context)

    def _analyse(self, contexts: Sequence[ComposedContext]) -> None:
        """Find or compute the documents' analyses. A document that fails fails the requests that have it."""
        wanted: dict[AnalysisName, tuple[Any, Cut]] = {}
        for context in contexts:
            for number, name in self._analyses_of(context).items():
                span = context.plan.spans[number]
                wanted.setdefault(name, (context.ids[span.start : span.end], context.partial.cut))
        with stages.together():  # the first time, they are looked for
            heads = self._analyser.heads if wanted else []
            for context in contexts:
                if context.partial.rule.reads_anchors:
                    context.critical_layers = self._analyser.critical_layers

        def fail(name: AnalysisName, message: str) -> None:
            failing([c for c in contexts if name in self._analyses_of(c).values()])(message)

        have = {
            name: stages.run("stored analysis", partial(fail, name), self._known, name, len(ids), heads)
            for name, (ids, _) in wanted.items()
        }
        votes = self._ranks.min_votes([_vote_of(known) for known in have.values()])
        found: dict[AnalysisName, Analysis] = {}
        room, started = _ANALYSED_TOKENS, time.perf_counter()
        for (name, (ids, cut)), vote in zip(wanted.items(), votes, strict=True):
            known = have[name]
            if vote == _READY and isinstance(known, Analysis):
                found[name] = known
            elif vote == _FAILED:
                fail(name, stages.ELSEWHERE)
            elif vote == _MISSING and (room == _ANALYSED_TOKENS or room >= len(ids)):
                room -= len(ids)
                made = stages.run(
                    "new analysis", partial(fail, name), self._compute_and_keep, name[0], ids, cut
                )
                if made is not None:
                    found[name] = made
        spent = (time.perf_counter() - started) * 1e3
        for context in contexts:
            names = self._analyses_of(context)
            context.analyses.update({number: found[name] for number, name in names.items() if name in found})
            context.analysis_ms += spent if names else 0.0

    def _compute_and_keep(self, key: str, ids: Sequence[int], cut: Cut) -> Analysis:
        analysis = self._compute(key, ids, cut)
        if cut == self._analyser.cut:
            self._tiers.put_summary(key, analysis.encode())
        return analysis

    def _analyses_of(self, context: ComposedContext) -> dict[int, AnalysisName]:
        """Analyses that a context needs and does not have yet, by span number."""
        if not context.partial.needs_analysis:
            return {}
        cut = context.partial.cut
        return {
            number: (
                context.keys[number],
                self._analyser.block_of(span.end - span.start, cut),
                cut.local_blocks,
            )
            for number, span in enumerate(context.plan.spans)
            if number and number not in context.analyses
        }

    def _known(self, name: AnalysisName, n_tokens: int, heads: Sequence[tuple[int, int]]) -> Analysis | int:
        """An analysis that is in memory or in a tier; _WAIT while it is read, _MISSING if it has to be
        computed.
        """
        key, block, local_blocks = name
        found = self._cache.get(*name)
        if found is not None:
            return found
        read = self._reads.pop(key, None) or self._tiers.summary(key)
        if not read.done():
            self._reads[key] = read
            return _WAIT
        if read.data is None:
            return _MISSING
        try:
            found = Analysis.decode(read.data, n_tokens).placed(torch.device(self._runner.device))
        except SummaryError as error:
            log.warning("the stored analysis of document %s is not used: %s", key, error)
            return _MISSING
        if (found.block, found.local_blocks) != (block, local_blocks):
            return _MISSING  # the request cuts documents in another way than the server
        if [tuple(head) for head in found.heads.tolist()] != list(heads):
            return _MISSING  # made with other retrieval heads
        if found.basis != self._analyser.basis:
            return _MISSING  # made with another tokenizer or other unrelated texts
        self._cache.put(key, found)
        return found

    def _select(self, contexts: Sequence[ComposedContext]) -> None:
        """Run query passes for the contexts that need them, then the selections."""
        questions = [context for context in contexts if context.partial.needs_query]
        if questions:
            for batch in self._query_pass.batches(questions):
                stages.run("query", failing(batch), self._query, batch)
        others = [c for c in contexts if c.decided is None and not c.partial.needs_query]
        self._settle(others, [None] * len(others))

    def _query(self, batch: Sequence[ComposedContext]) -> None:
        started = time.perf_counter()
        with stages.together():
            queries = self._query_pass(batch)
        asked = time.perf_counter()
        self._settle(batch, queries)
        ended = time.perf_counter()
        for context in batch:
            context.query_ms += (asked - started) * 1e3
            context.select_ms += (ended - asked) * 1e3

    def _settle(
        self,
        contexts: Sequence[ComposedContext],
        queries: Sequence[Mapping[QuestionQuery, torch.Tensor] | None],
    ) -> None:
        """Make selections final; queries are None where the selector does not use them.

        The first rank's count. Stored analyses of two ranks may come from two computations, and a score that
        differs in its last bit chooses other tokens, perhaps another number of them.
        """
        failures: list[list[str]] = [[] for _ in contexts]
        # All begin while the device runs the query pass, and the first one to end waits for that.
        own = [
            _query_of(context.partial, queries) for context, queries in zip(contexts, queries, strict=True)
        ]
        read = [
            stages.run("selection", failed.append, self._read, *each)
            for failed, *each in zip(failures, contexts, own, strict=True)
        ]
        attention = self._attention(read)
        begun = [
            None if failed else stages.run("selection", failed.append, self._begin, *each)
            for failed, *each in zip(failures, contexts, own, read, attention, strict=True)
        ]
        chosen = [
            None if end is None else stages.run("selection", failed.append, self._end, context, end)
            for failed, context, end in zip(failures, contexts, begun, strict=True)
        ]
        final = self._ranks.first_each(chosen, lambda one: b"" if one is None else one.content())
        for context, decided, failed in zip(contexts, final, failures, strict=True):
            context.decided = decided
            if decided is None:
                context.fail(failed[0] if failed else stages.ELSEWHERE)

    def _read(self, context: ComposedContext, query: torch.Tensor | None) -> Evidence | None:
        ids = torch.from_numpy(np.array(context.ids))
        with stages.together():
            return self._selector.read(context.partial, context.in_order, query, ids)

    def _attention(self, read: Sequence[Evidence | None]) -> list[Attention | None]:
        """Begin signal `attention` of all requests together. If that fails each makes its own, so that only
        those fail whose own does."""
        known = [evidence for evidence in read if evidence is not None]

        def begin() -> list[Attention]:
            with stages.together():
                return begin_attention(known)

        begun = stages.run("selection", stages.nobody, begin)
        if begun is None:
            return [None] * len(read)
        found = iter(begun)
        return [None if evidence is None else next(found) for evidence in read]

    def _begin(
        self,
        context: ComposedContext,
        query: torch.Tensor | None,
        evidence: Evidence | None,
        attention: Attention | None,
    ) -> Callable[[], Chosen | None]:
        with stages.together():
            return self._selector.begin(
                context.partial, context.in_order, query, evidence, attention, self._stable
            )

    def _end(self, context: ComposedContext, end: Callable[[], Chosen | None]) -> ContextSelection:
        partial, analyses = context.partial, context.in_order
        with stages.together():
            chosen = end()
        if chosen is None:
            return partial.settle(analyses)
        return replace(partial.settle(analyses, chosen.kept), reason=chosen.reason)


def _query_of(
    partial: PartialSelection, queries: Mapping[QuestionQuery, torch.Tensor] | None
) -> torch.Tensor | None:
    """The query that a selection asks with, of those that the query pass has found."""
    if queries is None or partial.samkv is None:
        return None
    return queries[partial.samkv.experimental.question_query]


def present(missing: Sequence[int], count: int) -> list[int]:
    """Return a vote for each of ``count`` documents: 0 for those that are ``missing``, else 1."""
    return [int(number not in missing) for number in range(count)]


def absent(votes: Sequence[int]) -> list[int]:
    """Return the numbers of the documents that the votes of `present` say are missing on some rank."""
    return [number for number, vote in enumerate(votes) if not vote]


def failing(contexts: Sequence[ComposedContext]) -> Callable[[str], None]:
    """Return what fails these requests with a message."""

    def fail(message: str) -> None:
        for context in contexts:
            context.fail(message)

    return fail


def _vote_of(known: Analysis | int | None) -> int:
    if known is None:
        return _FAILED
    return known if isinstance(known, int) else _READY
