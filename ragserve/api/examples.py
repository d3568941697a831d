"""Examples of the OpenAPI document; tests validate each against its schema."""

from __future__ import annotations

import json
from typing import Any

_ID = "5b0c6a3f6d5e4f5f9d0f7f3a2b1c4d5e"
_PASSAGE: dict[str, Any] = {
    "index": 1,
    "doc_id": "d41f6c2a9b7e",
    "chunk_id": 17,
    "source": "/srv/docs/lighthouse.md",
    "title": "The lighthouse of Skerryvore",
    "page": None,
    "start": 512,
    "end": 804,
    "score": 0.71,
    "text": "Skerryvore was lit for the first time on 1 February 1844. Its builder was Alan Stevenson.",
}
_FOUND = {**_PASSAGE, "metadata": {"lang": "en", "year": 1844}}
_FILTER = {
    "op": "and",
    "filters": [
        {"op": "eq", "field": "lang", "value": "en"},
        {"op": "range", "field": "year", "gte": 1800, "lt": 1900},
    ],
}

QUERY_REQUESTS: dict[str, Any] = {
    "simple": {"summary": "Ask", "value": {"query": "Who built Skerryvore?"}},
    "filtered": {
        "summary": "Ask part of a namespace",
        "value": {"query": "Who built Skerryvore?", "namespace": "docs", "k": 3, "filter": _FILTER},
    },
    "streamed": {
        "summary": "Stream the answer",
        "value": {"query": "Who built Skerryvore?", "stream": True, "max_new_tokens": 64},
    },
    "dialogue": {
        "summary": "Ask on",
        "value": {
            "query": "And when was it lit?",
            "history": [
                {"role": "user", "content": "Who built Skerryvore?"},
                {"role": "assistant", "content": "Alan Stevenson [1]."},
            ],
        },
    },
    "given": {
        "summary": "Bring the context along",
        "value": {
            "query": "Who built Skerryvore?",
            "documents": [{"title": _PASSAGE["title"], "text": _PASSAGE["text"]}],
        },
    },
}
ANSWER: dict[str, Any] = {
    "answer": "Alan Stevenson [1].",
    "citations": [{**_PASSAGE, "basis": "marker"}],
    "usage": {"prompt": 412, "cached": 320, "completion": 8},
    "context": {
        "strategy": "prefix",
        "documents_retrieved": 3,
        "documents_kept": 3,
        "tokens_retrieved": 371,
        "tokens_kept": 371,
        "tokens_recomputed": 62,
        "tokens_by_tier": {"device": 309},
        "notes": [],
    },
    "timings": {
        "embed_ms": 8.1,
        "search_ms": 0.6,
        "prompt_ms": 0.3,
        "queue_ms": 0.1,
        "prefill_ms": 21.4,
        "ttft_ms": 32.0,
        "engine_ms": 66.2,
        "total_ms": 76.0,
    },
    "index_version": 12,
    "namespace": "docs",
    "finish_reason": "stop",
    "request_id": _ID,
}


def _sse(*events: tuple[str, Any]) -> str:
    """Format a stream; OpenAI's events have no name."""
    lines = [
        (f"event: {name}\n" if name else "", data if isinstance(data, str) else json.dumps(data))
        for name, data in events
    ]
    return "".join(f"{head}data: {data}\n\n" for head, data in lines)


_SEARCH_RESULTS = {
    "namespace": "docs",
    "index_version": 12,
    "results": [_FOUND],
    "documents_kept": 1,
    "timings": {"embed_ms": 8.1, "search_ms": 0.6},
    "request_id": _ID,
}
QUERY_SSE = _sse(
    ("search_results", _SEARCH_RESULTS),
    ("message", {"text": "Alan"}),
    ("message", {"text": " Stevenson [1]."}),
    ("citation", ANSWER["citations"][0]),
    ("final_answer", ANSWER),
    ("done", {"request_id": _ID}),
)

RETRIEVE_REQUESTS: dict[str, Any] = {
    "simple": {"summary": "Search", "value": {"query": "Who built Skerryvore?", "k": 3}},
    "filtered": {
        "summary": "Search part of a namespace",
        "value": {"query": "lighthouse", "namespace": "docs", "filter": _FILTER},
    },
}
RETRIEVED = {
    "results": [_FOUND],
    "namespace": "docs",
    "index_version": 12,
    "timings": {"embed_ms": 8.1, "search_ms": 0.6, "total_ms": 9.0},
    "request_id": _ID,
}

INGEST_TEXTS: dict[str, Any] = {
    "texts": {
        "summary": "Documents as text",
        "value": {
            "namespace": "docs",
            "texts": [
                {
                    "name": "skerryvore",
                    "text": _PASSAGE["text"],
                    "title": _PASSAGE["title"],
                    "metadata": {"lang": "en", "year": 1844},
                }
            ],
        },
    }
}
INGEST_FILES: dict[str, Any] = {
    "files": {
        "summary": "Files",
        "value": {
            "namespace": "docs",
            "metadata": '{"lang": "en"}',
            "files": ["(bytes of lighthouse.pdf)", "(bytes of notes.md)"],
        },
    }
}
_ZERO_COUNTS = {
    "pending": 0,
    "indexed": 0,
    "warmed": 0,
    "unchanged": 0,
    "removed": 0,
    "failed": 0,
    "skipped": 0,
}
JOB_QUEUED: dict[str, Any] = {
    "job_id": "job-7c1e",
    "kind": "upload",
    "namespace": "docs",
    "state": "queued",
    "counts": {**_ZERO_COUNTS, "pending": 2},
    "n_items": 2,
    "chunks": 0,
    "tokens": 0,
    "size_bytes": 0,
    "error": None,
    "cancel_requested": False,
    "created_at": 1767225600.0,
    "updated_at": 1767225600.0,
}
_JOB_DONE = JOB_QUEUED | {
    "state": "done",
    "counts": {**_ZERO_COUNTS, "indexed": 1, "failed": 1},
    "chunks": 31,
    "tokens": 5210,
    "size_bytes": 182044,
}
JOB: dict[str, Any] = {
    **_JOB_DONE,
    "items": [
        {
            "source": "lighthouse.pdf",
            "state": "indexed",
            "reason": None,
            "chunks": 31,
            "tokens": 5210,
            "size_bytes": 182044,
            "doc_id": "d41f",
        },
        {
            "source": "notes.docx",
            "state": "failed",
            "reason": "the file is encrypted",
            "chunks": 0,
            "tokens": 0,
            "size_bytes": 0,
            "doc_id": None,
        },
    ],
    "next": None,
}
JOB_WARM = JOB_QUEUED | {"job_id": "job-9a40", "kind": "warm"}
JOBS = {"jobs": [_JOB_DONE]}
JOB_CANCELLING = {**JOB_QUEUED, "state": "running", "cancel_requested": True}

DOCUMENT: dict[str, Any] = {
    "doc_id": "d41f6c2a9b7e",
    "namespace": "docs",
    "source": "/srv/docs/lighthouse.md",
    "title": "The lighthouse of Skerryvore",
    "mime": "text/markdown",
    "size_bytes": 18204,
    "n_chunks": 31,
    "n_tokens": 5210,
    "created_at": 1767225600.0,
    "updated_at": 1767225600.0,
    "metadata": {"lang": "en", "year": 1844},
}
DOCUMENTS = {"documents": [DOCUMENT], "next": None}
CHUNKS = {
    "chunks": [
        {
            "chunk_id": 17,
            "doc_id": "d41f6c2a9b7e",
            "ordinal": 3,
            "text": _PASSAGE["text"],
            "start": 512,
            "end": 804,
            "page": None,
            "n_tokens": 61,
        }
    ],
    "next": None,
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

CACHE: dict[str, Any] = {
    "device": {
        "documents": 41,
        "tokens": 10240,
        "bytes": 104857600,
        "budget_bytes": 671098880,
        "locked_tokens": 0,
    },
    "host": {"bytes": 55705600, "budget_bytes": 536739840, "documents": 33, "pages": 340},
    "disk": {
        "backend": "file",
        "bytes": 55840768,
        "budget_bytes": 17179869184,
        "documents": 33,
        "pages": 340,
    },
    "hits": {"device": 212, "host": 49, "disk": 9},
    "misses": 65,
    "evictions": {"device": 8, "host": 0, "disk": 0},
    "faults": {},
}

READY = {"ready": True, "missing": []}
INFO: dict[str, Any] = {
    "versions": {"ragserve": "0.1.0", "sglang": "0.5.16", "python": "3.11.9"},
    "model": "examples/models/ragserve-tiny",
    "tokenizer": "examples/models/ragserve-tiny",
    "system_prompt": None,
    "engine": {
        "kind": "local",
        "model": "examples/models/ragserve-tiny",
        "tokenizer": "examples/models/ragserve-tiny",
        "version": "0.5.16",
        "device": "cpu",
        "attention_backend": "torch_native",
        "context_length": 8192,
        "max_total_tokens": 65536,
        "strategies": ["full", "prefix"],
    },
    "embedder": {"name": "all-MiniLM-L6-v2", "dim": 384},
    "strategies": ["full", "prefix"],
    "defaults": {"k": 5, "strategy": "prefix", "max_new_tokens": 128, "temperature": 0.0},
    "limits": {"max_query_chars": 16384, "max_k": 64, "max_body_bytes": 4194304},
    "index": {"default_type": "flat", "device": "cpu", "namespaces": 1, "documents": 30, "chunks": 412},
}
METRICS = (
    "# HELP ragserve_queries_in_flight Queries being answered.\n"
    "# TYPE ragserve_queries_in_flight gauge\n"
    "ragserve_queries_in_flight 0.0\n"
)

CHAT_REQUESTS: dict[str, Any] = {
    "chat": {
        "summary": "Ask a namespace",
        "value": {
            "model": "ragserve/docs",
            "messages": [{"role": "user", "content": "Who built Skerryvore?"}],
        },
    },
    "streamed": {
        "summary": "Stream, with usage",
        "value": {
            "model": "ragserve/docs",
            "messages": [{"role": "user", "content": "Who built Skerryvore?"}],
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    },
}
_URL_CITATION = {
    "type": "url_citation",
    "url_citation": {
        "start_index": 15,
        "end_index": 18,
        "title": _PASSAGE["title"],
        "url": "file:///srv/docs/lighthouse.md",
    },
}
_EXTRAS = {name: ANSWER[name] for name in ("context", "timings", "index_version", "namespace", "request_id")}
CHAT_ANSWER: dict[str, Any] = {
    "id": f"chatcmpl-{_ID}",
    "object": "chat.completion",
    "created": 1767225600,
    "model": "ragserve/docs",
    "choices": [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": "Alan Stevenson [1].",
                "refusal": None,
                "annotations": [_URL_CITATION],
            },
            "logprobs": None,
            "finish_reason": "stop",
        }
    ],
    "usage": {
        "prompt_tokens": 412,
        "completion_tokens": 8,
        "total_tokens": 420,
        "prompt_tokens_details": {"cached_tokens": 320},
    },
    "citations": ANSWER["citations"],
    "ragserve": _EXTRAS,
}
_CHUNK = {
    "id": f"chatcmpl-{_ID}",
    "object": "chat.completion.chunk",
    "created": 1767225600,
    "model": "ragserve/docs",
}


def _choice(delta: dict[str, Any], finish_reason: str | None = None) -> list[dict[str, Any]]:
    return [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}]


CHAT_SSE = _sse(
    ("", {**_CHUNK, "choices": _choice({"role": "assistant", "content": ""})}),
    ("", {**_CHUNK, "choices": _choice({"content": "Alan Stevenson [1]."})}),
    (
        "",
        {
            **_CHUNK,
            "choices": _choice({"annotations": [_URL_CITATION]}, "stop"),
            "citations": ANSWER["citations"],
            "ragserve": _EXTRAS,
        },
    ),
    ("", "[DONE]"),
)
MODEL = {"id": "ragserve/docs", "object": "model", "created": 0, "owned_by": "ragserve"}
MODELS = {
    "object": "list",
    "data": [
        MODEL,
        {
            "id": "examples/models/ragserve-tiny",
            "object": "model",
            "created": 1767225600,
            "owned_by": "sglang",
        },
    ],
}
