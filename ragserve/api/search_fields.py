"""The fields of a search, shared by `/rag/query`, `/rag/retrieve` and `/v1/chat/completions`."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from pydantic import Field

from ragserve.api.body import RequestModel, Text
from ragserve.config import Settings
from ragserve.profiles.retriever_name import UsualSearch
from ragserve.retrieval.search_options import SearchOptions
from ragserve.setting_groups.answering import (
    MAX_CANDIDATES,
    MAX_NEIGHBOURS,
    FollowUps,
    NotFound,
    Retrieval,
    Spelling,
)
from ragserve_index.filters import Filter
from ragserve_index.viewers import Viewer

MAX_K = 64
MAX_CONTEXT_TOKENS = 2**24
_OPTIONS = {"rerank_candidates": "candidates"}  # names of options that differ from the field's


class SearchFields(RequestModel):
    """How to search. What is left out is the server's default."""

    k: int | None = Field(
        None,
        ge=1,
        le=MAX_K,
        description="Passages to return, fewer if the namespace has fewer. Default: the server's top_k; with "
        f"`context_tokens`, {MAX_K}.",
    )
    filter: Filter | None = Field(
        None,
        description="Restricts the search by document fields: metadata keys, doc_id, source, title, mime.",
    )
    retrieval: Retrieval | None = Field(
        None,
        description="`dense`: by the embedder. `lexical`: by words (BM25); finds only passages that share a "
        "word with the question. `hybrid`: both, fused by their scores. Default: the server's.",
    )
    follow_ups: FollowUps | None = Field(
        None,
        description="What is searched for when there are earlier turns. `rewrite`: the question, rewritten "
        "by the model to stand alone; `context`, if it cannot. `context`: the question together with the "
        "turn before. `alone`: the question as it is. Default: the server's.",
    )
    spelling: Spelling | None = Field(
        None,
        description="Where typing errors are corrected: words that neither the namespace nor the embedder "
        "knows become the word of the namespace that is one error away; `searched_for` says which. `on`: "
        "for the search, and for the model where a passage has the word. `search`: the model reads what was "
        "typed. `off`: nowhere. Default: the server's.",
    )
    rerank: Annotated[Text, Field(min_length=1, max_length=1024)] | None = Field(
        None,
        description="What orders the candidates again. `off`. `keys`: the model's attention over the stored "
        "keys of analysed documents. Or a CrossEncoder or remote reranker of the server's, by name. Default: "
        "the server's.",
    )
    rerank_candidates: int | None = Field(
        None,
        ge=1,
        le=MAX_CANDIDATES,
        description="Passages that are searched for to be reranked or compared. Default: the server's.",
    )
    neighbours: int | None = Field(
        None,
        ge=0,
        le=MAX_NEIGHBOURS,
        description="Chunks before and after each passage that join it, as passages of their own in the "
        "order of the text. `k` does not count them. Default: the server's.",
    )
    context_tokens: int | None = Field(
        None,
        ge=0,
        le=MAX_CONTEXT_TOKENS,
        description="Most tokens of all passages together, the first one excepted; 0: no limit. Default: the "
        "server's.",
    )
    min_score: float | None = Field(
        None,
        description="Lowest score of a passage: `cosine`; `bm25` if `retrieval` is `lexical`; `rerank_score` "
        "if a CrossEncoder reranks. Where nothing reaches it, the answer is the server's `nothing_found` and "
        "the model is not asked. Default: the server's.",
    )
    dedupe: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Share of common word triples (Jaccard) from which a passage is a copy of a better one "
        "and left out; 0 keeps all. Default: the server's.",
    )
    not_found: NotFound | None = Field(
        None,
        description="What becomes of a question that the passages do not seem to answer (`evidence`). "
        "`note`: a note with the answer. `refuse`: the answer is the server's `nothing_found` and the model "
        "is not asked. `off`: nothing is looked at. Default: the server's.",
    )

    def search_options(self, settings: Settings, viewer: Viewer) -> SearchOptions:
        """The options of a viewer's search, with the server's defaults where the request has none."""
        given = {
            _OPTIONS.get(name, name): value
            for name in SearchFields.model_fields
            if (value := getattr(self, name)) is not None
        }
        if self.context_tokens:
            given.setdefault("k", MAX_K)
        return replace(UsualSearch.of(settings).options, viewer=viewer, **given)
