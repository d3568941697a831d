"""Examples of the OpenAPI document; tests validate each against its schema."""

from __future__ import annotations

import json
from typing import Any

from ragserve.version import __version__

ID = "5b0c6a3f6d5e4f5f9d0f7f3a2b1c4d5e"
_TIME = 1767225600
QUESTION = "Who built Skerryvore?"
REPLY = "Alan Stevenson [1]."
_MODEL = "examples/models/ragserve-tiny"
_METADATA = {"lang": "en", "year": 1844}
_TITLED = {
    "title": "The lighthouse of Skerryvore",
    "text": "Skerryvore was lit for the first time on 1 February 1844. Its builder was Alan Stevenson.",
}
_DOC_ID = {"doc_id": "d41f6c2a9b7e"}
_PLACE = {
    "page": None,
    "first_page": None,
    "page_kind": None,
    "page_name": None,
    "start": 512,
    "end": 804,
    "header_chars": 0,
    "edited": False,
}
_SOURCE = {"source": "/srv/docs/lighthouse.md"}
_PASSAGE: dict[str, Any] = {
    "index": 1,
    "namespace": "docs",
    **_DOC_ID,
    "chunk_id": 17,
    **_SOURCE,
    **_PLACE,
    "score": 5.31,
    "cosine": 0.71,
    "bm25": 14.2,
    "search_rank": 1,
    "rerank_score": 31.4,
    **_TITLED,
}
_FOUND = {**_PASSAGE, "metadata": _METADATA}
_FILTER = {
    "op": "and",
    "filters": [
        {"op": "eq", "field": "lang", "value": "en"},
        {"op": "range", "field": "year", "gte": 1800, "lt": 1900},
    ],
}


def request(summary: str, **value: Any) -> dict[str, Any]:
    return {"summary": summary, "value": value}


_HISTORY = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": REPLY}]
QUERY_REQUESTS: dict[str, Any] = {
    "simple": request("Ask", query=QUESTION),
    "filtered": request("Ask part of a namespace", query=QUESTION, namespace="docs", k=3, filter=_FILTER),
    "several": request("Ask several namespaces", query=QUESTION, namespaces=["handbook", "docs-*"]),
    "streamed": request("Stream the answer", query=QUESTION, stream=True, max_new_tokens=64),
    "dialogue": request("Ask on", query="And when was it lit?", history=_HISTORY),
    "given": request("Bring the context along", query=QUESTION, documents=[_TITLED]),
    "session begun": request("Begin a session", query=QUESTION, namespace="docs", session="new"),
    "session": request("Go on with it", query="And when was it lit?", namespace="docs", session=ID),
    "session shortened": request(
        "Go on with at most 2000 tokens of the turns before the last one",
        query="And when was it lit?",
        session=ID,
        session_budget=2000,
    ),
}
_SEARCHED = {
    "namespace": "docs",
    "retrieval": "hybrid",
    "index_version": 12,
    "request_id": ID,
    "searched_for": None,
    "reranking": {
        "by": "keys",
        "scored": 1,
        "candidates": [{"chunk_id": 17, "search_rank": 1, "rank": 1, "score": 31.4}],
        "note": None,
    },
}
_SEARCH_TIMINGS = {"embed_ms": 8.1, "search_ms": 0.6, "rerank_ms": 6.2}
_SESSION = {
    "id": ID,
    "turn": 2,
    "expires_in_s": 3600.0,
    "documents": 6,
    "documents_added": 1,
    "documents_known": 2,
    "tokens": 812,
    "tokens_held": 640,
    "tokens_computed": 4,
    "earlier": None,
}
_SENTENCES = [{"start": 0, "end": len(REPLY), "supported": True, "passages": [1], "basis": "marker"}]
_EVIDENCE = {"likely": True, "score": 2.4, "reason": ""}
_EXTRAS = {
    "evidence": _EVIDENCE,
    "session": _SESSION,
    "context": {
        "strategy": "prefix",
        "documents_retrieved": 3,
        "documents_kept": 3,
        "tokens_retrieved": 124,
        "tokens_kept": 124,
        "tokens_recomputed": 124,
        "tokens_by_tier": {"device": 0, "computed": 124, "session": 640},
        "notes": [],
    },
    "timings": {
        **_SEARCH_TIMINGS,
        "prompt_ms": 0.3,
        "queue_ms": 0.1,
        "prefill_ms": 21.4,
        "ttft_ms": 32.0,
        "engine_ms": 66.2,
        "total_ms": 76.0,
    },
    **_SEARCHED,
}
ANSWER: dict[str, Any] = {
    "answer": REPLY,
    "citations": [{**_PASSAGE, "basis": "marker"}],
    "sentences": _SENTENCES,
    "usage": {"prompt": 804, "cached": 640, "completion": 8},
    **_EXTRAS,
    "finish_reason": "stop",
}


def _sse(*events: tuple[str, Any]) -> str:
    """Format a stream; OpenAI's events have no name."""
    lines = [
        (f"event: {name}\n" if name else "", data if isinstance(data, str) else json.dumps(data))
        for name, data in events
    ]
    return "".join(f"{head}data: {data}\n\n" for head, data in lines)


_RESULTS = {**_SEARCHED, "evidence": _EVIDENCE, "results": [_FOUND]}
QUERY_SSE = _sse(
    ("search_results", {**_RESULTS, "documents_kept": 1, "session": ID, "timings": _SEARCH_TIMINGS}),
    ("message", {"text": "Alan"}),
    ("message", {"text": " Stevenson [1]."}),
    ("citation", ANSWER["citations"][0]),
    ("final_answer", ANSWER),
    ("done", {"request_id": ID}),
)

RETRIEVE_REQUESTS: dict[str, Any] = {
    "simple": request("Search", query=QUESTION, k=3),
    "filtered": request("Search part of a namespace", query="lighthouse", namespace="docs", filter=_FILTER),
    "follow-up": request("Search on", query="And when was it lit?", history=_HISTORY),
    "lexical": request("Search by words", query="ISO 8601", retrieval="lexical"),
    "reranked": request("Order 50 candidates again", query=QUESTION, rerank="keys", min_score=0.3),
}
RETRIEVED = {**_RESULTS, "timings": {**_SEARCH_TIMINGS, "total_ms": 9.0}}

INGEST_TEXTS = {
    "texts": request(
        "Documents as text",
        namespace="docs",
        texts=[{"name": "skerryvore", **_TITLED, "metadata": _METADATA}],
    )
}
INGEST_URLS = {
    "urls": request("Pages of the web", namespace="docs", urls=["https://example.com/skerryvore.html"]),
    "site": request("A site, by its sitemap", namespace="docs", urls=["https://example.com/"], sitemap=True),
}
INGEST_FILES = {
    "files": request(
        "Files",
        namespace="docs",
        metadata='{"lang": "en"}',
        files=["(bytes of lighthouse.pdf)", "(bytes of notes.md)"],
    )
}
_ITEM_STATES = ("pending", "indexed", "warmed", "unchanged", "removed", "failed", "skipped")
_NO_COUNTS = dict.fromkeys(_ITEM_STATES, 0)
_NO_SIZES = {"chunks": 0, "tokens": 0, "size_bytes": 0}
_SIZES = {"chunks": 31, "tokens": 5210, "size_bytes": 182044}
_TIMES = {"created_at": float(_TIME), "updated_at": float(_TIME)}
JOB_QUEUED: dict[str, Any] = {
    "job_id": "job-7c1e",
    "kind": "upload",
    "namespace": "docs",
    "state": "queued",
    "counts": {**_NO_COUNTS, "pending": 2},
    "n_items": 2,
    **_NO_SIZES,
    "error": None,
    "cancel_requested": False,
    **_TIMES,
}
_JOB_DONE = JOB_QUEUED | _SIZES | {"state": "done", "counts": {**_NO_COUNTS, "indexed": 1, "failed": 1}}
JOB: dict[str, Any] = {
    **_JOB_DONE,
    "items": [
        {"source": "lighthouse.pdf", "state": "indexed", "reason": None, "doc_id": "d41f", **_SIZES},
        {
            "source": "notes.docx",
            "state": "failed",
            "reason": "the file is encrypted",
            "doc_id": None,
            **_NO_SIZES,
        },
    ],
    "next": None,
}
JOB_WARM = JOB_QUEUED | {"job_id": "job-9a40", "kind": "warm"}
JOBS = {"jobs": [_JOB_DONE]}
JOB_CANCELLING = {**JOB_QUEUED, "state": "running", "cancel_requested": True}

DOCUMENT: dict[str, Any] = {
    **_DOC_ID,
    "namespace": "docs",
    **_SOURCE,
    "title": _TITLED["title"],
    "mime": "text/markdown",
    "size_bytes": 18204,
    "n_chunks": 31,
    "n_tokens": 5210,
    **_TIMES,
    "metadata": _METADATA,
}
DOCUMENTS = {"documents": [DOCUMENT], "next": None}
CHUNK = {
    **_DOC_ID,
    "chunk_id": 17,
    "ordinal": 3,
    "text": _TITLED["text"],
    **_PLACE,
    "n_tokens": 61,
    "disabled": False,
    "original": None,
    "version": "9be1d2c04f7a6035",
}
NAMESPACE = {
    "name": "docs",
    "embedder": "all-MiniLM-L6-v2",
    "dim": 384,
    "index_type": "flat",
    "version": 12,
    "n_documents": 30,
    "n_chunks": 412,
    "n_tokens": 70213,
}
NAMESPACES = {"namespaces": [NAMESPACE]}
SESSION = {
    "id": ID,
    "namespace": "docs",
    "strategy": "prefix",
    "turns": 2,
    "documents": 6,
    "tokens": 812,
    "created_at": _TIME,
    "used_at": _TIME + 40,
    "expires_at": _TIME + 3640,
    "outdated": None,
}
SESSIONS = {"sessions": [SESSION]}

_DEVICE = {
    "documents": 41,
    "tokens": 10240,
    "bytes": 104857600,
    "budget_bytes": 671098880,
    "locked_tokens": 0,
}
_PAGES = {"documents": 33, "pages": 340}
CACHE: dict[str, Any] = {
    "device": _DEVICE,
    "host": {"bytes": 55705600, "budget_bytes": 536739840, **_PAGES, "sessions": 0},
    "disk": {"backend": "file", "bytes": 55840768, "budget_bytes": 17179869184, **_PAGES},
    "hits": {"device": 212, "host": 49, "disk": 9},
    "misses": 65,
    "evictions": {"device": 8, "host": 0, "disk": 0},
    "faults": {},
}

EVICT_REQUESTS: dict[str, Any] = {
    "device": request("Answer the next queries from host memory", tiers=["device"])
}
WARM_REQUESTS: dict[str, Any] = {
    "namespace": request("All documents of a namespace", namespace="docs"),
    "some": request("Some documents", namespace="docs", documents=["lighthouse.pdf"]),
}

READY = {"ready": True, "missing": []}
_SERVED = {"model": _MODEL, "tokenizer": _MODEL, "strategies": ["full", "prefix"]}
INFO: dict[str, Any] = {
    "versions": {"ragserve": __version__, "sglang": "0.5.17", "python": "3.11.9"},
    **_SERVED,
    "system_prompt": None,
    "engine": {
        "kind": "local",
        **_SERVED,
        "version": "0.5.17",
        "device": "cpu",
        "attention_backend": "torch_native",
        "context_length": 8192,
        "max_total_tokens": 65536,
        "start_s": 21.4,
        "warm_up_s": 0.3,
    },
    "embedder": {"name": "all-MiniLM-L6-v2", "dim": 384},
    "defaults": {
        "k": 5,
        "retrieval": "dense",
        "follow_ups": "rewrite",
        "spelling": "on",
        "strategy": "auto",
        "max_new_tokens": 128,
        "temperature": 0.0,
    },
    "limits": {"max_query_chars": 16384, "max_k": 64, "max_body_bytes": 4194304},
    "index": {"default_type": "flat", "device": "cpu", "namespaces": 1, "documents": 30, "chunks": 412},
    "warming": {"jobs": 1, "documents": 30, "documents_left": 12},
    "verification": {
        "measured": [
            {
                "namespace": "papers",
                "strategy": "passages:by=score,count=5",
                "verified": True,
                "questions": 352,
                "score": 60.4,
                "score_vs_full": 1.2,
                "margin": 4.8,
                "different": 14.2,
                "unsupported": 1.4,
                "kept": 25.1,
                "recomputed": 25.1,
                "ttft_ms": 171.0,
                "full_ttft_ms": 642.0,
                "retriever": "sentence-transformers/all-MiniLM-L6-v2, dense, k 20",
            }
        ],
        "in_use": [
            {
                "namespace": "papers",
                "strategy": "concat:recompute=sentences,share=0.1",
                "compared": 57,
                "different": 8.8,
                "recorded": 10.3,
                "unsupported": 1.75,
                "unsupported_recorded": 2.0,
                "taken_out": False,
            }
        ],
        "waiting": 1,
        "dropped": 0,
        "idle_tuning": {"state": "waiting"},
    },
}
METRICS = (
    "# HELP ragserve_queries_in_flight Queries being answered.\n"
    "# TYPE ragserve_queries_in_flight gauge\n"
    "ragserve_queries_in_flight 0.0\n"
)

_DIALOGUE = {"model": "ragserve/docs", "messages": [{"role": "user", "content": QUESTION}]}
CHAT_REQUESTS = {
    "chat": request("Ask a namespace", **_DIALOGUE),
    "streamed": request(
        "Stream, with usage", **_DIALOGUE, stream=True, stream_options={"include_usage": True}
    ),
}
_ANNOTATIONS = [
    {
        "type": "url_citation",
        "url_citation": {
            "start_index": 15,
            "end_index": 18,
            "title": _TITLED["title"],
            "url": "file:///srv/docs/lighthouse.md",
            "basis": "marker",
        },
    }
]
_HEAD = {"id": f"chatcmpl-{ID}", "created": _TIME, "model": "ragserve/docs"}
_SOURCES = {"citations": ANSWER["citations"], "ragserve": {"sentences": _SENTENCES, **_EXTRAS}}


def _choices(finish_reason: str | None, **content: Any) -> list[dict[str, Any]]:
    return [{"index": 0, **content, "logprobs": None, "finish_reason": finish_reason}]


CHAT_ANSWER: dict[str, Any] = {
    **_HEAD,
    "object": "chat.completion",
    "choices": _choices(
        "stop", message={"role": "assistant", "content": REPLY, "refusal": None, "annotations": _ANNOTATIONS}
    ),
    "usage": {
        "prompt_tokens": 804,
        "completion_tokens": 8,
        "total_tokens": 812,
        "prompt_tokens_details": {"cached_tokens": 640},
    },
    **_SOURCES,
}


def _chunk(delta: dict[str, Any], finish_reason: str | None = None, **extra: Any) -> tuple[str, Any]:
    head = {**_HEAD, "object": "chat.completion.chunk"}
    return "", {**head, "choices": _choices(finish_reason, delta=delta), **extra}


CHAT_SSE = _sse(
    _chunk({"role": "assistant", "content": ""}),
    _chunk({"content": REPLY}),
    _chunk({"annotations": _ANNOTATIONS}, "stop", **_SOURCES),
    ("", "[DONE]"),
)
MODEL = {"id": "ragserve/docs", "object": "model", "created": 0, "owned_by": "ragserve"}
_ENGINE_MODEL = {"id": _MODEL, "object": "model", "created": _TIME, "owned_by": "sglang"}
MODELS = {"object": "list", "data": [MODEL, _ENGINE_MODEL]}
EMBEDDING_REQUEST: dict[str, Any] = {"model": "all-MiniLM-L6-v2", "input": [QUESTION]}
EMBEDDINGS: dict[str, Any] = {
    "object": "list",
    "data": [{"object": "embedding", "index": 0, "embedding": [0.0312, -0.0451, 0.0127]}],
    "model": "all-MiniLM-L6-v2",
    "usage": {"prompt_tokens": 6, "total_tokens": 6},
}
_RERANKER = "cross-encoder/ms-marco-MiniLM-L6-v2"
RERANK_REQUEST: dict[str, Any] = {
    "model": _RERANKER,
    "query": QUESTION,
    "documents": ["A soup of leeks.", _TITLED["text"]],
    "top_n": 1,
}
RERANKED: dict[str, Any] = {
    "id": ID,
    "model": _RERANKER,
    "results": [{"index": 1, "relevance_score": 8.41}],
    "meta": {"api_version": {"version": "2"}, "tokens": {"input_tokens": 46}},
}
TEI_RERANK_REQUEST: dict[str, Any] = {"query": QUESTION, "texts": ["A soup of leeks.", _TITLED["text"]]}
TEI_RERANKED = [{"index": 1, "score": 8.41}, {"index": 0, "score": -11.2}]
