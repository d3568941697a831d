"""Sessions of three turns on a small engine, whose documents are in the index, and in the document cache."""

from __future__ import annotations

import time
from typing import Any

from tests.integration.small_engine import Engine

DOCUMENTS = {
    "lamlash": "The pier of Lamlash was built of oak by Ann Tarbert in the spring of 1883.",
    "sannox": "The mill of Sannox was moved to the mouth of the burn by Donald Kerr.",
    "corrie": "The ferry of Corrie sinks in a storm of March, and Ian Brodie finds its bell.",
}
QUESTIONS = (
    "Who built the pier of Lamlash?",
    "Who moved the mill of Sannox?",
    "Who finds the bell of Corrie?",
)
STRATEGIES: dict[str, dict[str, Any]] = {
    "prefix": {"strategy": "prefix"},
    "all": {"strategy": "concat", "strategy_options": {"recompute": "all", "force": True}},
}


def ingest(engine: Engine, namespace: str) -> None:
    """Put the documents into a namespace's index."""
    texts = [{"name": name, "text": text} for name, text in DOCUMENTS.items()]
    job = engine.client.post("/rag/ingest", json={"texts": texts, "namespace": namespace})
    assert job.status_code == 202, job.text
    deadline = time.monotonic() + 240
    while engine.client.get(job.headers["location"]).json()["state"] != "done":
        assert time.monotonic() < deadline, "the documents are not ingested"
        time.sleep(0.05)


class Talk:
    """A session of one strategy. Each turn finds another document."""

    def __init__(self, engine: Engine, namespace: str, strategy: str) -> None:
        self._engine, self._namespace, self._fields = engine, namespace, STRATEGIES[strategy]
        self._turns = 0
        self._name = "new"

    def turn(self) -> dict[str, Any]:
        """Ask the next question: the whole answer."""
        body = {
            "query": QUESTIONS[self._turns],
            "namespace": self._namespace,
            "session": self._name,
            "k": 1,
            "retrieval": "lexical",
            "follow_ups": "alone",
            "max_new_tokens": 12,
            **({} if self._turns else self._fields),
        }
        response = self._engine.client.post("/rag/query", json=body)
        assert response.status_code == 200, response.text
        answer = dict(response.json())
        self._turns += 1
        self._name = answer["session"]["id"]
        assert answer["session"]["turn"] == answer["session"]["documents"] == self._turns
        assert answer["context"]["strategy"] == self._fields["strategy"]
        return answer
