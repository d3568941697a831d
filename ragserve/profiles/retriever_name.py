"""What brings the passages of queries, in words, as verdicts name it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from ragserve.retrieval.embedder import public_embedder
from ragserve.retrieval.remote_reranker import public_name
from ragserve.retrieval.search_options import OFF, SearchOptions

if TYPE_CHECKING:
    from ragserve.config import Settings

_CACHED = 256  # searches: namespaces have their own


def retriever_of(settings: Settings) -> str:
    """That of queries which give no options of a search."""
    return UsualSearch.of(settings).retriever


@dataclass(frozen=True, slots=True)
class UsualSearch:
    """The search of a namespace's queries that give no options, and its ``retriever`` in words."""

    options: SearchOptions
    retriever: str

    @classmethod
    def of(cls, settings: Settings) -> UsualSearch:
        """By the server's settings with the namespace's own in their place."""
        options = SearchOptions(
            settings.top_k,
            retrieval=settings.retrieval,
            follow_ups=settings.follow_ups,
            spelling=settings.spelling,
            rerank=public_name(settings.rerank),
            candidates=settings.rerank_candidates,
            neighbours=settings.neighbours,
            context_tokens=settings.context_tokens,
            min_score=settings.min_score,
            dedupe=settings.dedupe,
            not_found=settings.not_found,
        )
        return _usual(settings.embedder, options)

    def is_like(self, search: SearchOptions) -> bool:
        """Return whether a search brings the same passages, or the first of them."""
        same = _words(replace(search, k=self.options.k)) == _words(self.options)
        return same and search.k <= self.options.k

    def is_same(self, search: SearchOptions) -> bool:
        """Return whether a search brings the same passages."""
        return self.is_like(search) and search.k == self.options.k


@lru_cache(_CACHED)  # every query asks
def _usual(embedder: str, options: SearchOptions) -> UsualSearch:
    return UsualSearch(options, ", ".join([public_embedder(embedder), *_words(options)]))


def _words(search: SearchOptions) -> list[str]:
    parts = {
        "": search.retrieval,
        "k": search.k,
        "spelling": search.spelling if search.spelling == OFF else "",
        "rerank": f"{search.rerank} of {search.candidates}" if search.rerank != OFF else "",
        "neighbours": search.neighbours,
        "tokens": search.context_tokens,
        "min score": "" if search.min_score is None else str(search.min_score),
        "dedupe": search.dedupe,
    }
    return [f"{name} {value}".strip() for name, value in parts.items() if value]
