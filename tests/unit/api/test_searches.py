"""Search by vectors, by words and by both over REST: the choice, the scores, and odd questions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.unit.api.scripted_server import DOCUMENTS, Live, serving
from tests.unit.api.test_query import ask


def test_the_search_is_chosen_by_the_request(client: httpx.Client, live: Live, docs: str) -> None:
    def retrieved(**fields: Any) -> dict[str, Any]:
        body = {"query": "What is made of LEEKS?", "namespace": docs, **fields}
        response = client.post("/rag/retrieve", json=body)
        assert response.status_code == 200, response.text
        return dict(response.json())

    live.embedder.calls.clear()
    lexical = retrieved(retrieval="lexical", k=1)
    assert (lexical["retrieval"], lexical["timings"]["embed_ms"], live.embedder.calls) == (
        "lexical",
        None,
        [],
    )
    (soup,) = lexical["results"]
    assert soup["source"] == "soup"
    assert soup["score"] == soup["bm25"] > 0
    assert soup["cosine"] is None
    dense = retrieved(retrieval="dense")
    assert dense["retrieval"] == "dense"
    assert all(one["score"] == one["cosine"] and one["bm25"] is None for one in dense["results"])
    default, hybrid = retrieved(), retrieved(retrieval="hybrid")
    assert default["retrieval"] == live.settings.retrieval == "dense"
    assert default["results"] == dense["results"]
    assert len(hybrid["results"]) == len(DOCUMENTS), "the dense search finds what shares no word"
    answer = ask(client, retrieval="lexical", stream=False)
    assert (answer["retrieval"], answer["timings"]["embed_ms"]) == ("lexical", None)
    assert {one["source"] for one in answer["citations"]} == {"skerryvore"}
    none = ask(client, question="zzz", retrieval="lexical")
    assert none["context"]["documents_retrieved"] == 0
    given = ask(client, documents=[{"text": "Given."}], retrieval="lexical")
    assert given["retrieval"] is None
    refused = client.post("/rag/retrieve", json={"query": "x", "namespace": docs, "retrieval": "sparse"})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "retrieval"


def test_the_server_has_a_default_search(tmp_path: Path, model_path: Path) -> None:
    with serving(tmp_path, model_path, retrieval="lexical") as live, live.client() as client:
        live.index("docs", DOCUMENTS)
        assert ask(client)["retrieval"] == "lexical"
        assert client.get("/info").json()["defaults"]["retrieval"] == "lexical"
        assert ask(client, retrieval="dense")["retrieval"] == "dense"


@pytest.mark.parametrize("retrieval", ["lexical", "hybrid"])
@pytest.mark.parametrize("text", ['"', "* OR (", "NEAR(a b", "title:x", "\u0000", "'; DROP TABLE chunks; --"])
def test_no_question_is_syntax(client: httpx.Client, docs: str, retrieval: str, text: str) -> None:
    body = {"query": f"lighthouse {text}", "namespace": docs, "retrieval": retrieval}
    response = client.post("/rag/retrieve", json=body)
    assert response.status_code == (400 if "\0" in text else 200), response.text
