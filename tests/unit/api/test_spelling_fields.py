"""A typing error is corrected for the search, over every route, and the model reads what was typed."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from ragserve.answering.prompt import load_tokenizer
from ragserve.config import DEFAULT_MODEL
from ragserve.programs import Rag
from tests.unit.api.scripted_server import Live

TYPED = "Which was built at Skeryvore?"
MEANT = "Which was built at Skerryvore?"
SAID = {
    "question": MEANT,
    "variants": [],
    "follow_up": None,
    "note": None,
    "corrections": [{"original": "Skeryvore", "replacement": "Skerryvore"}],
}


def retrieved(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = client.post("/rag/retrieve", json={"query": TYPED, "namespace": "docs", **fields})
    assert response.status_code == 200, response.text
    return dict(response.json())


@pytest.mark.parametrize("retrieval", ["dense", "lexical", "hybrid"])
def test_every_search_is_for_the_word_that_is_meant(
    client: httpx.Client, live: Live, docs: str, retrieval: str
) -> None:
    live.embedder.calls.clear()
    found = retrieved(client, retrieval=retrieval, k=1)
    assert found["searched_for"] == SAID
    assert found["results"][0]["source"] == "skerryvore"
    assert live.embedder.calls == ([] if retrieval == "lexical" else [[MEANT]])
    live.embedder.calls.clear()
    off = retrieved(client, retrieval=retrieval, k=1, spelling="off")
    assert off["searched_for"] is None
    assert live.embedder.calls == ([] if retrieval == "lexical" else [[TYPED]])
    plain = retrieved(client, query=MEANT, retrieval=retrieval, k=1)
    assert plain["searched_for"] is None
    assert plain["results"] == found["results"]


def test_every_route_says_so_and_the_model_reads_what_was_typed(
    client: httpx.Client, live: Live, docs: str
) -> None:
    body = {"query": TYPED, "namespace": docs, "session": "new"}
    assert client.post("/rag/query", json=body).json()["searched_for"] == SAID
    prompt = load_tokenizer(DEFAULT_MODEL).decode(live.engine.requests[-1].input_ids)
    assert TYPED in prompt
    assert MEANT not in prompt
    streamed = client.post("/rag/query", json={"query": TYPED, "namespace": docs, "stream": True}).text
    assert '"replacement":"Skerryvore"' in streamed.partition("\n\n")[0]
    messages = [{"role": "user", "content": TYPED}]
    chat = client.post("/v1/chat/completions", json={"model": f"ragserve/{docs}", "messages": messages})
    assert chat.json()["ragserve"]["searched_for"] == SAID

    rag = Rag(live.url, namespace=docs)
    live.embedder.calls.clear()
    rag.retrieve(TYPED, 1)
    rag.retrieve(TYPED, 1, spelling="off")
    rag.close()
    assert live.embedder.calls == [[MEANT], [TYPED]]


def test_a_follow_up_is_corrected_with_its_turn(client: httpx.Client, live: Live, docs: str) -> None:
    history = [{"role": "user", "content": "Which is Skeryvore?"}]
    said = retrieved(client, history=history, follow_ups="context", query="Which was built?")
    assert said["searched_for"] == SAID | {
        "question": "Which was built?",
        "variants": ["Which is Skerryvore?\nWhich was built?"],
        "follow_up": "context",
    }


def test_an_unknown_value_is_refused(client: httpx.Client, docs: str) -> None:
    refused = client.post("/rag/retrieve", json={"query": "x", "namespace": docs, "spelling": "maybe"})
    assert refused.json()["error"]["param"] == "spelling"
