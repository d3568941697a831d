"""Examples of the OpenAPI document: a namespace's settings, labels, ratings and open questions."""

from __future__ import annotations

from typing import Any

from ragserve.api.examples import ID, QUESTION, REPLY, request

NAMESPACE_SETTINGS: dict[str, Any] = {
    "system": "Answer from the documents, in one sentence.",
    "k": 8,
    "min_score": None,
    "retrieval": "hybrid",
    "not_found": "refuse",
    "strategy": None,
}
NAMESPACE_SETTINGS_REQUESTS: dict[str, Any] = {
    "some": request("Hybrid search for eight passages", retrieval="hybrid", k=8)
}
LABELS_REQUESTS: dict[str, Any] = {
    "one": request("For keys that hold the label", labels=["engineering"]),
    "none": request("For every key of the namespace", labels=[]),
}
FEEDBACK: dict[str, Any] = {
    "rows": [
        {
            "id": ID,
            "question": QUESTION,
            "answers": [REPLY],
            "documents": ["d41f"],
            "namespace": "docs",
            "rating": "up",
            "answer": REPLY,
            "time": "2026-03-01T09:30:00.000000+00:00",
        }
    ]
}
FEEDBACK_REQUESTS: dict[str, Any] = {
    "up": request(
        "The answer is good",
        namespace="docs",
        rating="up",
        query=QUESTION,
        answer=REPLY,
        documents=["d41f"],
        answer_id=ID,
    )
}
UNANSWERED: dict[str, Any] = {
    "questions": [
        {
            "question": "What does a ticket cost?",
            "asked": 3,
            "time": "2026-03-01T09:30:00.000000+00:00",
            "why": "no passage has: ticket, cost",
        }
    ]
}
