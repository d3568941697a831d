"""How the questions of a comparison are asked."""

from __future__ import annotations

from dataclasses import dataclass

from ragserve.config import Settings
from ragserve.profiles.gate import set_of
from ragserve.profiles.retriever_name import UsualSearch
from ragserve.retrieval.search_options import SearchOptions


@dataclass(frozen=True, slots=True)
class TunedQueries:
    """They are searched for as ``/rag/query`` does for a query that gives no options. ``retriever``: that in
    words; ``max_new_tokens`` of an answer; ``made_at``: when the namespace was made, Unix seconds;
    ``version``: that of its documents."""

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
        """The queries of a server with these settings, the namespace's own among them."""
        usual = UsualSearch.of(settings)
        return cls(namespace, usual.options, max_new_tokens, usual.retriever, made_at, version)

    @property
    def set_name(self) -> str:
        """The name of the questions in rows."""
        return set_of(self.namespace)
