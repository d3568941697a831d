"""Answers of a server, for tests of evaluation."""

from __future__ import annotations

from ragserve.answering.results import Answer


def answered(text: str) -> Answer:
    """An answer without citations."""
    context = dict.fromkeys(
        ("documents_retrieved", "documents_kept", "tokens_retrieved", "tokens_kept", "tokens_recomputed"), 2
    )
    return Answer.model_validate(
        {
            "answer": text,
            "citations": [],
            "usage": {"prompt": 10, "cached": 4, "completion": 2},
            "context": {"strategy": "full", "tokens_by_tier": {"device": 4, "computed": 6}, **context},
            "timings": {"ttft_ms": 5.0, "total_ms": 6.0},
            "index_version": 1,
            "namespace": "n",
            "finish_reason": "stop",
            "request_id": "r",
        }
    )
