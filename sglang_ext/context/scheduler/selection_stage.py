"""What a composed request waits for before it is admitted: its documents' analyses, and for SamKV the query
pass and the selection.

    arrives -> initial and local blocks found, or loaded from disk -> analyses found, loaded or computed ->
    query pass, all waiting requests in one -> selection -> (admission) chosen blocks found or loaded -> slots
    reserved -> filled

Runs on the scheduler's thread, once a scheduler step, for all waiting requests. Between steps a waiting
request holds no lock. Every rank does the same in the same order: what their tiers hold may differ, so they
vote before each pass."""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from sglang_ext.analysis.analyser import Analyser
from sglang_ext.analysis.analysis_cache import AnalysisCache
from sglang_ext.analysis.document_analysis import Analysis, Cut, SummaryError
from sglang_ext.context.compose.locate import Locator
from sglang_ext.context.compose.request import ComposedContext
from sglang_ext.context.rope import Rotation
from sglang_ext.context.scheduler.query_pass import QueryPass
from sglang_ext.context.selection import samkv
from sglang_ext.context.selection.base import PartialSelection
from sglang_ext.request_options import QuestionQuery

log = logging.getLogger(__name__)
_ANALYSED_TOKENS = 8192  # documents' tokens analysed in one scheduler step: others' decode waits for no more
_QUESTION_TOKENS = 8192  # rows of one query pass
_MISSING, _WAIT, _READY = range(3)
Name = tuple[str, int, int]
"""A document's key, block size and local blocks: what an analysis is known by."""


class SelectionStage:
    """Settles drafts."""

    def __init__(
        self,
        model_runner: Any,
        rotation: Rotation,
        locator: Locator,
        tiers: Any,
        analyser: Analyser,
        query: QueryPass,
        cache: int,
        stable: Sequence[int] = (),
    ) -> None:
        """``stable``: the layers over which P is averaged; none: the built-in ones."""
        self.analyser = analyser
        self.analyses = AnalysisCache(cache)
        self._runner = model_runner
        self._rotation = rotation
        self._locator = locator
        self._tiers = tiers
        self._query = query
        self._stable = stable
        self._computed = 0
        self._waiting: list[ComposedContext] = []
        self._step: Callable[[], Any] = lambda: None
        self._tp_group = model_runner.tp_group
        self._reads: dict[str, Any] = {}  # of stored analyses, under way

    def add(self, context: ComposedContext) -> None:
        """A new request whose draft is not settled."""
        self._waiting.append(context)

    def advance(self, step: Any) -> None:
        """Bring every waiting request as far as it goes; ``step`` is the scheduler step's own object: once
        for each.
        """
        if self._step() is step:
            return
        self._step = weakref.ref(step)
        if not self._waiting:
            return
        votes = self._locator.agree([self._locate(context) for context in self._waiting])
        found = [context for context, vote in zip(self._waiting, votes, strict=True) if vote == _READY]
        for context, vote in zip(self._waiting, votes, strict=True):
            if vote != _READY:
                self._locator.unlock(context)  # found here, but not on every rank
            if vote == _MISSING:
                context.missing = self._locator.missing_anywhere(context, context.missing)
        try:
            with self.forward_stream():
                ready = self._analyse(found)
                self._select(ready)
        finally:
            for context in found:
                self._locator.unlock(context)
        self._waiting = [
            context
            for context, vote in zip(self._waiting, votes, strict=True)
            if vote != _MISSING and context.decided is None
        ]

    # a document request's own analysis

    def analyse(self, key: str, ids: Sequence[int]) -> Analysis:
        """A document's analysis with the server's cut, computed now unless it is in memory."""
        cut = self.analyser.cut
        known = self.analyses.get(key, self.analyser.block_of(len(ids), cut), cut.local_blocks)
        if self._locator.all_agree(known is not None) and known is not None:
            return known
        return self._compute(key, ids, cut)

    def stat(self) -> dict[str, int]:
        """Of what is in memory, decoded; ``computed``: analyses made since the start."""
        return self.analyses.stat() | {"computed": self._computed}

    def forget(self, keys: Sequence[str] | None) -> None:
        """These documents were removed, or (None) some were: what is left of the others is read again from
        their tiers.
        """
        if keys is None:
            self.analyses.clear()
            self._reads.clear()
        for key in keys or ():
            self.analyses.remove(key)
            self._reads.pop(key, None)

    def _compute(self, key: str, ids: Sequence[int], cut: Cut) -> Analysis:
        analysis = self.analyser.analyse(ids, cut)
        self._computed += 1
        self.analyses.put(key, analysis)
        return analysis

    # the stages

    def _locate(self, context: ComposedContext) -> int:
        """Find and lock what the query pass reads, or without one everything."""
        missing = self._locator.resolve(context)
        if missing is None:
            return _WAIT
        context.missing = missing
        return _MISSING if missing else _READY

    def _analyse(self, contexts: Sequence[ComposedContext]) -> list[ComposedContext]:
        """Find or compute the documents' analyses; the contexts that have all of them now."""
        wanted: dict[Name, tuple[Any, Cut]] = {}
        for context in contexts:
            for number, name in self._analyses_of(context).items():
                span = context.plan.spans[number]
                wanted.setdefault(name, (context.ids[span.start : span.end], context.draft.cut))
        heads = self.analyser.heads if wanted else []  # here, where all ranks are
        have = {name: self._known(name, len(ids), heads) for name, (ids, _) in wanted.items()}
        votes = self._locator.agree([known if isinstance(known, int) else _READY for known in have.values()])
        found: dict[Name, Analysis] = {}
        room, started = _ANALYSED_TOKENS, time.perf_counter()
        for name, vote in zip(list(wanted), votes, strict=True):
            ids, cut = wanted[name]
            known = have[name]
            if vote == _READY and isinstance(known, Analysis):
                found[name] = known
            elif vote == _MISSING and (room == _ANALYSED_TOKENS or room >= len(ids)):
                room -= len(ids)
                found[name] = self._compute(name[0], ids, cut)
                if cut == self.analyser.cut:
                    self._tiers.put_summary(name[0], found[name].encode())
        spent = (time.perf_counter() - started) * 1e3
        for context in contexts:
            names = self._analyses_of(context)
            context.analyses.update({number: found[name] for number, name in names.items() if name in found})
            context.analysis_ms += spent if names else 0.0
        return [context for context in contexts if not self._analyses_of(context)]

    def _analyses_of(self, context: ComposedContext) -> dict[int, Name]:
        """By span number, the analyses that a context needs and does not have yet."""
        if not context.draft.needs_analysis:
            return {}
        cut = context.draft.cut
        return {
            number: (
                context.keys[number],
                self.analyser.block_of(span.end - span.start, cut),
                cut.local_blocks,
            )
            for number, span in enumerate(context.plan.spans)
            if number and number not in context.analyses
        }

    def _known(self, name: Name, n_tokens: int, heads: Sequence[tuple[int, int]]) -> Analysis | int:
        """An analysis that is in memory or in a tier; _WAIT while it is read, _MISSING where it has to be
        computed.
        """
        key, block, local_blocks = name
        found = self.analyses.get(*name)
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
            return _MISSING  # of another way to find the retrieval heads
        self.analyses.put(key, found)
        return found

    def _select(self, contexts: Sequence[ComposedContext]) -> None:
        """One query pass for those that need it, then the selections."""
        questions = [context for context in contexts if context.draft.needs_query]
        while questions:
            batch: list[ComposedContext] = []
            rows = 0
            while questions and (not batch or rows + questions[0].question_tokens <= _QUESTION_TOKENS):
                rows += questions[0].question_tokens
                batch.append(questions.pop(0))
            self._ask(batch)
        for context in contexts:
            if context.decided is None and not context.draft.needs_query:
                self._settle(context, None)

    def _ask(self, batch: Sequence[ComposedContext]) -> None:
        started = time.perf_counter()
        queries = self._query(batch)
        asked = time.perf_counter()
        for context, query in zip(batch, queries, strict=True):
            self._settle(context, query)
        ended = time.perf_counter()
        for context in batch:
            context.query_ms += (asked - started) * 1e3
            context.select_ms += (ended - asked) * 1e3

    def _settle(self, context: ComposedContext, queries: Mapping[QuestionQuery, torch.Tensor] | None) -> None:
        """Select, where there is something to select; ``queries`` where the selector looks at them."""
        analyses = context.in_order
        query = (
            None
            if queries is None or context.draft.samkv is None
            else queries[context.draft.samkv.experimental.question_query]
        )
        kept = self.chosen(
            context.draft, analyses, query, torch.from_numpy(np.array(context.ids)), self._stable
        )
        context.decided = context.draft.settle(analyses, kept)

    def chosen(
        self,
        draft: PartialSelection,
        analyses: Sequence[Analysis],
        query: torch.Tensor | None,
        ids: torch.Tensor,
        stable: Sequence[int],
    ) -> torch.Tensor | None:
        """The document tokens that a draft's selector keeps, as in `samkv.Chosen`; None where it keeps no
        more than the draft does. ``query``: of the question, where the selector looks at it; ``ids`` int64:
        the whole prompt; ``stable`` as above."""
        if not draft.selects or draft.samkv is None or draft.blocks is None:
            return None
        options, blocks, start = draft.samkv, draft.blocks, draft.plan.question_start
        if options.by_sentence:
            return samkv.choose_sentences(
                options,
                blocks,
                analyses,
                query,
                start,
                self._rotation,
                ids[blocks.first : start],
                self.analyser.texts.telling(ids[start:]),
                reduce=self._sum,
                highest=self._max,
            )
        if query is None:
            return None
        found = samkv.choose(
            options,
            blocks,
            analyses,
            query,
            start,
            self._rotation,
            reduce=self._sum,
            highest=self._max,
            stable=stable or None,
        )
        return found.kept

    def _sum(self, part: torch.Tensor) -> torch.Tensor:
        """Over ranks: all choose the same."""
        if self._tp_group is None or self._tp_group.world_size == 1:
            return part
        summed: torch.Tensor = self._tp_group.all_reduce(part)
        return summed

    def _max(self, part: torch.Tensor) -> torch.Tensor:
        """As `_sum`, the largest."""
        if self._tp_group is not None and self._tp_group.world_size > 1:
            torch.distributed.all_reduce(
                part, op=torch.distributed.ReduceOp.MAX, group=self._tp_group.device_group
            )
        return part

    @contextlib.contextmanager
    def forward_stream(self) -> Iterator[None]:
        """Passes run behind the forward passes that were launched, as all that reads KV, and in the same
        order on every rank.
        """
        device = torch.device(self._runner.device)
        if device.type != "cuda":
            yield
            return
        stream, current = self._runner.forward_stream, torch.cuda.current_stream(device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            yield
        current.wait_stream(stream)
