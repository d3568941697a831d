"""The stage before admission, in which a composed request waits for its documents' analyses and, for SamKV,
the query pass and the selection.

    arrives -> initial and local blocks found, or loaded from disk -> analyses found, loaded or computed ->
    query pass, all waiting requests in one -> selection -> (admission) chosen blocks found or loaded -> slots
    reserved -> filled

Runs on the scheduler's thread, once a scheduler step, for all waiting requests, whether SGLang has room for
them or not. A waiting request holds no
lock between steps. Every rank does the same in the same order; since their tiers may hold different things,
the ranks vote before each pass.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sglang_ext.analysis.analyser import Analyser
from sglang_ext.context.compose.locate import Locator
from sglang_ext.context.compose.request import ComposedContext
from sglang_ext.context.scheduler.document_analyses import AnalysisName, DocumentAnalyses, WantedAnalysis
from sglang_ext.context.scheduler.query_pass import QueryPass
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
_FAILED, _MISSING, _WAIT, _READY = range(4)  # votes; the lowest of any rank decides


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
        analyses: DocumentAnalyses,
        stable: Sequence[int] = (),
    ) -> None:
        """``stable``: layers over which P is averaged; empty for the built-in ones."""
        self.analyses = analyses
        self._runner = model_runner
        self._locator = locator
        self._tiers = tiers
        self._analyser = analyser
        self._query_pass = query_pass
        self._selector = selector
        self._ranks = ranks
        self._stable = stable
        self._waiting: list[ComposedContext] = []

    def add(self, context: ComposedContext) -> None:
        """Add a new request whose selection is not final."""
        self._waiting.append(context)

    def advance(self) -> None:
        """Bring every waiting request as far as it goes; once in a scheduler step."""
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
        waiting: list[ComposedContext] = []
        for context, vote in zip(self._waiting, votes, strict=True):
            if vote != _MISSING and context.decided is None and context.failure is None:
                waiting.append(context)
            else:
                context.shed_analyses()
        self._wait(waiting)

    @property
    def waits(self) -> bool:
        """True while a request waits for its selection."""
        return bool(self._waiting)

    def fail(self, message: str) -> None:
        """Fail every waiting request."""
        failing(self._waiting)(message)

    def drop(self, context: ComposedContext) -> None:
        """Forget a request that has ended."""
        self._wait([other for other in self._waiting if other is not context])

    def drop_gone(self, queued: Iterable[Any]) -> None:
        """Forget the requests that are not among SGLang's ``queued`` ones. It takes those of clients that
        left and those that waited too long off its queue without a word.
        """
        there = {id(getattr(req, "ragserve", None)) for req in queued}
        self._wait([context for context in self._waiting if id(context) in there])

    def _wait(self, contexts: list[ComposedContext]) -> None:
        """Work for these requests only."""
        self._waiting = contexts
        self.analyses.work_for({key for context in contexts for key in context.keys})

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
        wanted: dict[AnalysisName, WantedAnalysis] = {}
        for context in contexts:
            complete = self.analyses.complete or context.complete
            for number, name in self._analyses_of(context).items():
                span = context.plan.spans[number]
                ids = context.ids[span.start : span.end]
                waits = complete and self.analyses.may_be_whole(len(ids))
                asked = wanted.setdefault(name, WantedAnalysis(ids, context.partial.cut))
                asked.level = max(asked.level, context.partial.analysis_wanted(complete=waits))
        with stages.together():  # the first time, they are looked for
            for context in contexts:
                if context.partial.rule.reads_anchors:
                    context.critical_layers = self._analyser.critical_layers

        def fail(name: AnalysisName, message: str) -> None:
            failing([c for c in contexts if name in self._analyses_of(c).values()])(message)

        first = next((names for names in map(self._analyses_of, contexts) if names), {})
        held = {id(each): each.nbytes for c in self._waiting for each in c.analyses.values()}
        started = time.perf_counter()
        found = self.analyses.find(wanted, fail, held=sum(held.values()), first=set(first.values()))
        spent = (time.perf_counter() - started) * 1e3
        for context in contexts:
            names = self._analyses_of(context)
            context.analyses.update({number: found[name] for number, name in names.items() if name in found})
            context.analysis_ms += spent if names else 0.0
            if context.partial.rule.reads_sensitivity:
                context.unknown = [n for n, analysis in context.analyses.items() if not analysis.is_whole]

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
