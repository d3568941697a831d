"""Analyses of documents: in memory, in the tiers, or computed, several documents in one pass."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from sglang_ext.analysis.analyser import Analyser, DocumentPart, Keep
from sglang_ext.analysis.analysis_cache import AnalysisCache
from sglang_ext.analysis.document_analysis import Analysis, Cut, SummaryError
from sglang_ext.context.scheduler.document_pass import TOGETHER
from sglang_ext.context.scheduler.sglang_req import DocumentRequest
from sglang_ext.context.selection.base import Wanted
from sglang_ext.ranks.ranks import Ranks
from sglang_ext.stages import stages

if TYPE_CHECKING:
    from sglang_ext.documents.tier_store import TierStore

log = logging.getLogger(__name__)
# Tokens of the longest document whose context sensitivity a CPU computes unless a rule needs it. Two copies
# pass through the model in one step, while all other requests wait, and SGLang ends a server whose step takes
# 300 s: 2.4 ms a token on a core with 0.5B parameters, 16 times that with 8B, and more for longer documents.
_LONGEST_ON_CPU = 4096
_STEP_TOKENS = 8192  # document tokens analysed in one scheduler step; bounds how long decoding waits
# votes; the lowest of any rank decides. _PART: an analysis that is not whole
_FAILED, _MISSING, _WAIT, _PART, _READY = range(5)
AnalysisName = tuple[str, int, int]
"""Identifies an analysis: the document's key, block size and number of local blocks."""

Fail = Callable[[AnalysisName, str], None]
"""Called with a message for the clients of what an analysis was for."""


@dataclass(slots=True)
class WantedAnalysis:
    """A document whose analysis requests need, and how much of it."""

    ids: Sequence[int]
    cut: Cut
    level: Wanted = Wanted.SENTENCES


class DocumentAnalyses:
    """Finds and computes analyses. Per rank; scheduler thread only."""

    def __init__(
        self,
        analyser: Analyser,
        tiers: TierStore,
        ranks: Ranks,
        *,
        device: torch.device | str,
        memory_bytes: int,
        complete: bool = True,
    ) -> None:
        """``memory_bytes``: budget of decoded analyses. ``complete``: requests wait for the context
        sensitivity of their documents; else they do without what is not known yet.
        """
        self.complete = complete
        self._analyser = analyser
        self._tiers = tiers
        self._ranks = ranks
        self._device = torch.device(device)
        self._cache = AnalysisCache(memory_bytes)
        self._computed = self._prefilled = self._whole = 0
        self._reads: dict[str, Any] = {}  # reads of stored analyses under way, by document key

    def may_be_whole(self, n_tokens: int) -> bool:
        """False for a document whose context sensitivity is computed for rules only that know nothing else.
        The same on every rank."""
        return self._device.type != "cpu" or n_tokens <= _LONGEST_ON_CPU

    def analyse(self, key: str, ids: Sequence[int]) -> Analysis:
        """Return a document's whole analysis with the server's cut; computes it unless it is in memory."""
        cut = self._analyser.cut
        known = self._cache.get(key, self._analyser.block_of(len(ids), cut), cut.local_blocks)
        if self._ranks.all_agree(known is not None and known.is_whole) and known is not None:
            return known
        return self._compute([key], [ids], cut)[0]

    def analyse_all(self, documents: Sequence[DocumentRequest], keep: Keep, *, whole: bool) -> list[Analysis]:
        """Analyse documents with the server's cut in one pass, and hand over their K and V by layer."""
        found = self._compute(
            [document.key for document in documents],
            [document.ids for document in documents],
            self._analyser.cut,
            keep=keep,
            whole=whole,
        )
        self._prefilled += len(found)
        return found

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
            if vote >= _PART and isinstance(known, Analysis)
        }

    def stat(self) -> dict[str, int]:
        """Figures of the analyses in memory; ``computed`` counts those made since the start, ``whole`` the
        whole ones of them, ``prefilled`` those whose pass was the document's prefill as well.
        """
        made = {"computed": self._computed, "whole": self._whole, "prefilled": self._prefilled}
        return self._cache.stat() | made

    def forget(self, keys: Sequence[str] | None) -> None:
        """Drop the analyses of removed documents. With None some were removed: the others are read again from
        their tiers.
        """
        if keys is None:
            self._cache.clear()
            self._reads.clear()
        else:
            self._cache.remove(set(keys))
        for key in keys or ():
            self._reads.pop(key, None)

    def _compute(
        self,
        keys: Sequence[str],
        documents: Sequence[Sequence[int]],
        cut: Cut,
        *,
        keep: Keep | None = None,
        whole: bool = True,
    ) -> list[Analysis]:
        with stages.together():
            made = self._analyser.analyse_all(documents, cut, keep, whole=whole)
        self._computed += len(made)
        self._whole += len(made) if whole else 0
        for key, analysis in zip(keys, made, strict=True):
            self._cache.put(key, analysis)
        return made

    def find(
        self,
        wanted: Mapping[AnalysisName, WantedAnalysis],
        fail: Fail,
        *,
        held: int = 0,
        first: Collection[AnalysisName] = (),
    ) -> dict[AnalysisName, Analysis]:
        """Find or compute what is ``wanted``, the same on every rank. What is read still, and what the step
        has no time for, is left out, and what has no room: requests hold ``held`` bytes of analyses, and
        may hold as many as the budget; those that come ``first`` have room in any case."""
        with stages.together():  # the first time, they are looked for
            heads = self._analyser.heads if wanted else []
        have: dict[AnalysisName, Analysis | int | None] = {}
        for name, asked in wanted.items():
            known: Analysis | int | None = _WAIT
            if held < self._cache.budget or name in first:
                failed = partial(fail, name)
                known = stages.run("stored analysis", failed, self._known, name, len(asked.ids), heads)
            have[name] = known
            held += known.nbytes if isinstance(known, Analysis) else 0
        votes = self._ranks.min_votes([_vote_of(known) for known in have.values()])
        found: dict[AnalysisName, Analysis] = {}
        lacking: list[AnalysisName] = []
        for (name, asked), vote in zip(wanted.items(), votes, strict=True):
            known = have[name]
            if vote == _READY and isinstance(known, Analysis):
                found[name] = known
            elif vote == _PART and isinstance(known, Analysis) and asked.level < Wanted.WHOLE:
                found[name] = known.part()  # some rank does not have the rest
            elif vote == _MISSING and asked.level == Wanted.SENTENCES:
                found[name] = Analysis.of_sentences(self._analyser.texts.begins(asked.ids), name[1])
            elif vote == _FAILED:
                fail(name, stages.ELSEWHERE)
            elif vote != _WAIT:
                lacking.append(name)
        return found | self._make({name: wanted[name] for name in _first(lacking, wanted)}, fail)

    def read_only(self, keys: Collection[str]) -> None:
        """Forget reads that are under way of other documents than these."""
        self._reads = {key: read for key, read in self._reads.items() if key in keys}

    def _make(
        self, wanted: Mapping[AnalysisName, WantedAnalysis], fail: Fail
    ) -> dict[AnalysisName, Analysis]:
        """Compute analyses in few passes; those of a pass that fails one by one, so that each fails alone."""
        found: dict[AnalysisName, Analysis] = {}
        for group in _passes(wanted):
            if len(group) > 1:
                made = stages.run("new analysis", stages.nobody, self._compute_and_keep, group)
                if made is not None:
                    found |= made
                    continue
            for name, asked in group.items():
                alone = stages.run("new analysis", partial(fail, name), self._compute_and_keep, {name: asked})
                found |= alone or {}
        return found

    def _compute_and_keep(self, group: Mapping[AnalysisName, WantedAnalysis]) -> dict[AnalysisName, Analysis]:
        first = next(iter(group.values()))
        cut, keys = first.cut, [name[0] for name in group]
        documents = [asked.ids for asked in group.values()]
        made = self._compute(keys, documents, cut, whole=first.level == Wanted.WHOLE)
        if cut == self._analyser.cut:
            for key, analysis in zip(keys, made, strict=True):
                self._tiers.put_summary(key, analysis.encode())
        return dict(zip(group, made, strict=True))

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
            found = Analysis.decode(read.data, n_tokens).placed(self._device)
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


def _first(
    names: Sequence[AnalysisName], wanted: Mapping[AnalysisName, WantedAnalysis]
) -> list[AnalysisName]:
    """Those that are analysed in this step: the first, and what fits beside it."""
    taken: list[AnalysisName] = []
    left = _STEP_TOKENS
    for name in names:
        if not taken or len(wanted[name].ids) <= left:
            taken.append(name)
            left -= len(wanted[name].ids)
    return taken


def _passes(wanted: Mapping[AnalysisName, WantedAnalysis]) -> Iterable[dict[AnalysisName, WantedAnalysis]]:
    """Groups of at most `TOGETHER` tokens, or of one document, that are cut alike and of which as much is
    wanted."""
    group: dict[AnalysisName, WantedAnalysis] = {}
    for name, asked in sorted(wanted.items(), key=lambda item: (item[1].level, repr(item[1].cut))):
        first = next(iter(group.values()), asked)
        tokens = sum(len(each.ids) for each in group.values()) + len(asked.ids)
        if group and (tokens > TOGETHER or (asked.level, asked.cut) != (first.level, first.cut)):
            yield group
            group = {}
        group[name] = asked
    if group:
        yield group


def _vote_of(known: Analysis | int | None) -> int:
    if known is None:
        return _FAILED
    if isinstance(known, int):
        return known
    return _READY if known.is_whole else _PART
