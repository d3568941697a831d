"""Documents that do not fit into the context: refused with the sizes, dropped, or cut."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import httpx
import pytest

from ragserve.answering.prompt import PromptBuilder
from tests.unit.api.scripted_server import Live
from tests.unit.api.test_query import ask


def test_documents_that_do_not_fit_are_said_to_be_dropped(client: httpx.Client) -> None:
    documents = [{"title": f"T{i}", "text": "lighthouse " * 400} for i in range(8)]
    answer = ask(client, documents=documents, documents_overflow="drop", max_new_tokens=64)
    context = answer["context"]
    assert 0 < context["documents_kept"] < 8
    assert context["documents_retrieved"] == 8
    assert context["tokens_kept"] < context["tokens_retrieved"]
    (note,) = context["notes"]
    assert note.startswith(f"{8 - context['documents_kept']} of 8 passages did not fit")
    assert answer["usage"]["prompt"] <= 2048 - 64


@pytest.mark.parametrize("overflow", ["refuse", None, "drop"])
def test_a_given_document_longer_than_the_context_is_refused_with_the_sizes(
    client: httpx.Client, live: Live, overflow: str | None
) -> None:
    body = {"query": "Who built it?", "documents": [{"text": "lighthouse " * 9000}]}
    if overflow is not None:
        body["documents_overflow"] = overflow
    response = client.post("/rag/query", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "documents_too_long", "documents")
    assert re.search(
        r"take [1-9]\d?,\d{3} tokens, and the context has room for [1-9],\d{3}", error["message"]
    )
    assert not live.engine.requests


def test_given_documents_that_fit_in_part_are_refused_unless_the_client_says_otherwise(
    client: httpx.Client, live: Live
) -> None:
    documents = [{"text": "The tower is red."}, {"text": "lighthouse " * 9000}]
    assert client.post("/rag/query", json={"query": "Who?", "documents": documents}).status_code == 400
    assert not live.engine.requests


def test_a_document_is_cut_where_the_client_says_so(client: httpx.Client, live: Live) -> None:
    text = "lighthouse " * 9000
    answer = ask(
        client, documents=[{"text": text}, {"text": "x"}], documents_overflow="cut", max_new_tokens=64
    )
    context = answer["context"]
    assert context["documents_kept"] == 1
    assert 1500 < context["tokens_kept"] < context["tokens_retrieved"]
    assert 1500 < answer["usage"]["prompt"] <= 2048 - 64
    (citation,) = answer["citations"]
    assert 0 < citation["end"] == len(citation["text"]) < len(text)
    assert any(f"first {citation['end']:,} characters" in note for note in context["notes"])


def test_a_beginning_is_tokenised_beside_the_event_loop_each_time(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the whole document's tokens are kept from the request before."""
    in_loop, beginning = [], PromptBuilder._beginning

    def watched(self: PromptBuilder, *given: Any) -> tuple[int, list[int]]:
        in_loop.append(asyncio._get_running_loop() is not None)
        return beginning(self, *given)

    monkeypatch.setattr(PromptBuilder, "_beginning", watched)
    documents = [{"text": "lighthouse " * 9500}]
    for _ in range(2):
        ask(client, documents=documents, documents_overflow="cut", max_new_tokens=4)
    assert in_loop == [False, False]


def test_retrieved_passages_of_which_none_fits_are_refused(client: httpx.Client, live: Live) -> None:
    live.index("long", {"tale": "lighthouse " * 4000})
    response = client.post("/rag/query", json={"query": "Which lighthouse?", "namespace": "long"})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "documents_too_long"
    assert "None of the 1 retrieved passages fits" in response.json()["error"]["message"]
    assert not live.engine.requests
