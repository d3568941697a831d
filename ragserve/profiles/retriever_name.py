"""What brings the passages of queries, in words, as verdicts name it."""

from __future__ import annotations

from ragserve.config import Settings
from ragserve.retrieval.embedder import public_embedder
from ragserve.retrieval.remote_reranker import public_name


def retriever_of(settings: Settings) -> str:
    """The server's defaults of a search."""
    parts = {
        "": settings.retrieval,
        "k": settings.top_k,
        "spelling": settings.spelling if settings.spelling == "off" else "",
        "rerank": f"{public_name(settings.rerank)} of {settings.rerank_candidates}"
        if settings.rerank != "off"
        else "",
        "neighbours": settings.neighbours,
        "tokens": settings.context_tokens,
        "min score": settings.min_score,
        "dedupe": settings.dedupe,
    }
    known = [f"{name} {value}".strip() for name, value in parts.items() if value]
    return ", ".join([public_embedder(settings.embedder), *known])
