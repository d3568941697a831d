"""Option `prefill` of queries, by both routes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import pytest

from tests.unit.api.scripted_server import Live, ScriptedEngine

QUESTION = "Who built the lighthouse of Skerryvore?"


def test_sparse_prefill_is_for_exact_strategies_of_engines_that_have_it(
    client: httpx.Client, live: Live, docs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(strategy: str = "prefix", **prefill: Any) -> httpx.Response:
        body = {"query": QUESTION, "namespace": docs, "strategy": strategy, "prefill": prefill}
        return client.post("/rag/query", json=body)

    def refused(answer: httpx.Response) -> tuple[str, str]:
        assert answer.status_code == 400
        return answer.json()["error"]["param"], answer.json()["error"]["message"]

    assert refused(ask(alpha=2.0))[0] == "prefill.alpha"
    assert "has no sparse prefill" in refused(ask(mode="vertical_slash"))[1]
    monkeypatch.setattr(ScriptedEngine, "info", replace(live.engine.info, sparse_prefill=True))
    assert refused(ask("auto", mode="vertical_slash"))[0] == "prefill"
    assert live.engine.requests == []
    options, said = (
        {"mode": "vertical_slash", "alpha": 0.9},
        {
            "mode": "vertical_slash",
            "alpha": 0.9,
            "tokens": 40,
            "share": 0.25,
            "reused_lines": 3.5,
            "new_lines": 1.0,
        },
    )
    answer = ask(**options).json()
    assert answer["prefill"] == said
    assert not answer["context"]["notes"]
    dense = ask(**options, dense_below=100_000).json()
    assert dense["prefill"] is None
    assert "Nothing was prefilled sparsely" in dense["context"]["notes"][0]
    chat = {"messages": [{"role": "user", "content": QUESTION}], "strategy": "full", "prefill": options}
    answer = client.post("/v1/chat/completions", json=chat | {"model": f"ragserve/{docs}"}).json()
    assert answer["ragserve"]["prefill"] == said
    assert live.engine.requests[-1].prefill == options
