"""How the questions of a comparison are asked."""

from __future__ import annotations

from dataclasses import dataclass

from ragserve.config import Settings
from ragserve.profiles.gate import set_of
from ragserve.profiles.retriever_name import retriever_of
from ragserve.retrieval.remote_reranker import public_name
from ragserve.retrieval.search_options import SearchOptions


@dataclass(frozen=True, slots=True)
class TunedQueries:
    """They are searched for as ``/rag/query`` does by the server's settings. ``retriever``: these in words;
    ``max_new_tokens`` of an answer; ``made_at``: when the namespace was made, Unix seconds; ``version``: that
    of its documents."""

    namespace: str
    search: SearchOptions
    max_new_tokens: int
    retriever: str = ""
    made_at: float = 0.0
    version: int = 0

    @classmethod
    def of(
        cls,
        settings: Settings,
        namespace: str,
        max_new_tokens: int,
        made_at: float = 0.0,
        version: int = 0,
    ) -> TunedQueries:
        """The queries of a server with these settings."""
        search = SearchOptions(
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
        return cls(namespace, search, max_new_tokens, retriever_of(settings), made_at, version)

    @property
    def set_name(self) -> str:
        """The name of the questions in rows."""
        return set_of(self.namespace)
