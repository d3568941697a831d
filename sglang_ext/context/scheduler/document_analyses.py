"""Analyses of documents: in memory, in the tiers, or computed, several documents in one pass, which scheduler
steps do piece by piece."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
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
# Tokens of the longest document whose context sensitivity a CPU computes unless a rule needs it: the static
# attention of its blocks takes time by the square of its length.
_LONGEST_ON_CPU = 4096
# Tokens, through all layers, of analyses in one scheduler step: bounds how long all other requests wait
_STEP_TOKENS, _CPU_STEP_TOKENS = 8192, 512
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


@dataclass(slots=True, eq=False)
class _PassUnderWay:
    """Documents that are being analysed, cut alike and as far; `Analyser.in_pieces` of them."""

    wanted: Mapping[AnalysisName, WantedAnalysis]
    whole: bool
    pieces: Generator[float, None, list[Analysis]]
    removed: set[str] = field(default_factory=set)  # keys of those that were removed meanwhile

    @property
    def keys(self) -> set[str]:
        return {key for key, _, _ in self.wanted}


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
        self._step_tokens = _CPU_STEP_TOKENS if self._device.type == "cpu" else _STEP_TOKENS
        self._passes: dict[bool, _PassUnderWay] = {}  # under way; True: of a long document
        self._alone: set[AnalysisName] = set()  # a pass of several documents with these has failed

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
        for long, under_way in list(self._passes.items()):
            under_way.removed |= under_way.keys if keys is None else under_way.keys & set(keys)
            if keys is not None and under_way.removed == under_way.keys:
                del self._passes[long]

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
        self._count(made, whole=whole)
        for key, analysis in zip(keys, made, strict=True):
            self._cache.put(key, analysis)
        return made

    def _count(self, made: Sequence[Analysis], *, whole: bool) -> None:
        self._computed += len(made)
        self._whole += len(made) if whole else 0

    def find(
        self,
        wanted: Mapping[AnalysisName, WantedAnalysis],
        fail: Fail,
        *,
        held: int = 0,
        first: Collection[AnalysisName] = (),
    ) -> dict[AnalysisName, Analysis]:
        """Find what is ``wanted``, and compute it piece by piece, the same on every rank. What is read still,
        and what the step has no time for, is left out, and what has no room: requests hold ``held`` bytes of
        analyses, and may hold as many as the budget; those that come ``first`` have room in any case."""
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
        return found | self._advance({name: wanted[name] for name in lacking}, fail)

    def work_for(self, keys: Collection[str]) -> None:
        """Forget reads that are under way of other documents than these, and passes over none of them."""
        self._reads = {key: read for key, read in self._reads.items() if key in keys}
        self._alone = {name for name in self._alone if name[0] in keys}
        self._passes = {
            long: under_way for long, under_way in self._passes.items() if not under_way.keys.isdisjoint(keys)
        }

    def _advance(
        self, lacking: Mapping[AnalysisName, WantedAnalysis], fail: Fail
    ) -> dict[AnalysisName, Analysis]:
        """Compute analyses for as long as a step may take; a later step goes on. Short documents do not wait
        for long ones: where there are both, each kind has half of the step."""
        short = {name: asked for name, asked in lacking.items() if len(asked.ids) <= TOGETHER}
        long = {name: asked for name, asked in lacking.items() if name not in short}
        both = (short or False in self._passes) and (long or True in self._passes)
        half = self._step_tokens // 2
        spent, found = self._advance_kind(False, short, half if both else self._step_tokens, fail)
        _, more = self._advance_kind(True, long, max(half, self._step_tokens - spent), fail)
        return found | more

    def _advance_kind(
        self, long: bool, lacking: Mapping[AnalysisName, WantedAnalysis], most: float, fail: Fail
    ) -> tuple[float, dict[AnalysisName, Analysis]]:
        """Compute analyses of long or of other documents until that is as much work as ``most``; return the
        work, and those that are done. Documents of a pass that fails are analysed one by one, so that each
        fails alone."""
        found: dict[AnalysisName, Analysis] = {}
        spent = 0.0
        while spent < most:
            under_way = self._passes.get(long) or self._next(
                {name: lacking[name] for name in lacking if name not in found}
            )
            if under_way is None:
                break
            self._passes[long] = under_way
            name = next(iter(under_way.wanted)) if len(under_way.wanted) == 1 else None
            failed = stages.nobody if name is None else partial(fail, name)
            result = stages.run("new analysis", failed, self._run, under_way, most - spent)
            if result is None:
                del self._passes[long]
                self._alone = self._alone | set(under_way.wanted) if name is None else self._alone - {name}
                break
            work, made = result
            spent += work
            if made is not None:
                del self._passes[long]
                self._alone -= set(made)
                found |= {
                    name: analysis
                    for name, analysis in made.items()
                    if name in lacking and (under_way.whole or lacking[name].level < Wanted.WHOLE)
                }
        return spent, found

    def _next(self, lacking: Mapping[AnalysisName, WantedAnalysis]) -> _PassUnderWay | None:
        """A pass over the first document, and over what fits beside it of those that are cut alike and of
        which as much is wanted: at most `TOGETHER` tokens, or one document."""
        group: dict[AnalysisName, WantedAnalysis] = {}
        left = TOGETHER
        for name, asked in lacking.items():
            first = next(iter(group.values()), asked)
            fits = len(asked.ids) <= left and name not in self._alone
            if group and not (fits and (asked.level, asked.cut) == (first.level, first.cut)):
                continue
            group[name] = asked
            left -= len(asked.ids)
            if name in self._alone:
                break
        if not group:
            return None
        first, ids = next(iter(group.values())), [asked.ids for asked in group.values()]
        whole = first.level == Wanted.WHOLE
        return _PassUnderWay(group, whole, self._analyser.in_pieces(ids, first.cut, whole=whole))

    def _run(
        self, under_way: _PassUnderWay, most: float
    ) -> tuple[float, dict[AnalysisName, Analysis] | None]:
        """Do pieces of a pass until they are as much work as ``most``; return their work, and the analyses
        once all are done."""
        work = 0.0
        made: list[Analysis] | None = None
        with stages.together():
            while made is None and work < most:
                try:
                    work += next(under_way.pieces)
                except StopIteration as end:
                    made = end.value
        if made is None:
            return work, None
        self._count(made, whole=under_way.whole)
        for (name, asked), analysis in zip(under_way.wanted.items(), made, strict=True):
            key, known = name[0], self._cache.get(*name)
            if known is not None and known.is_whole and not under_way.whole:
                continue  # it has come since the pass began
            if key not in under_way.removed:
                self._cache.put(key, analysis)
            if asked.cut == self._analyser.cut:
                self._tiers.put_summary(key, analysis.encode())
        return work, dict(zip(under_way.wanted, made, strict=True))

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


def _vote_of(known: Analysis | int | None) -> int:
    if known is None:
        return _FAILED
    if isinstance(known, int):
        return known
    return _READY if known.is_whole else _PART
