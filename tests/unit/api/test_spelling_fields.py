"""A typing error is corrected for the search and for the model, over every route, and the answer says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from ragserve.answering.prompt import load_tokenizer
from ragserve.config import DEFAULT_MODEL
from ragserve.engine.base import GenerateRequest
from ragserve.programs import Rag
from tests.unit.api.scripted_server import Live
from tests.unit.programs.test_said_turns import State

TYPED = "Which was built at Skeryvore?"
MEANT = "Which was built at Skerryvore?"
SAID = {
    "question": MEANT,
    "variants": [],
    "follow_up": None,
    "note": None,
    "corrections": [{"original": "Skeryvore", "replacement": "Skerryvore", "read": True}],
    "model_reads": MEANT,
}
ONLY_SEARCHED = {
    "corrections": [{"original": "Skeryvore", "replacement": "Skerryvore", "read": False}],
    "model_reads": None,
}


def prompt_of(request: GenerateRequest) -> str:
    return str(load_tokenizer(DEFAULT_MODEL).decode(request.input_ids))


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


def test_every_route_says_so_and_the_model_reads_the_word_that_is_meant(
    client: httpx.Client, live: Live, docs: str
) -> None:
    body = {"query": TYPED, "namespace": docs}
    assert client.post("/rag/query", json=body).json()["searched_for"] == SAID
    streamed = client.post("/rag/query", json=body | {"stream": True}).text
    assert '"replacement":"Skerryvore"' in streamed.partition("\n\n")[0]
    messages = [{"role": "user", "content": TYPED}]
    chat = client.post("/v1/chat/completions", json={"model": f"ragserve/{docs}", "messages": messages})
    assert chat.json()["ragserve"]["searched_for"] == SAID
    prompts = {prompt_of(request) for request in live.engine.requests[-3:]}
    assert len(prompts) == 1
    assert MEANT in prompts.pop()


def test_the_model_reads_what_was_typed_if_it_shall(client: httpx.Client, live: Live, docs: str) -> None:
    body = {"query": TYPED, "namespace": docs, "spelling": "search"}
    said = client.post("/rag/query", json=body).json()["searched_for"]
    assert said == SAID | ONLY_SEARCHED
    assert client.post("/rag/query", json=body | {"spelling": "off"}).json()["searched_for"] is None
    for request in live.engine.requests[-2:]:
        assert TYPED in prompt_of(request)


def test_a_word_that_no_passage_has_is_not_put_into_the_users_mouth(
    client: httpx.Client, live: Live, docs: str
) -> None:
    body = {"query": TYPED, "namespace": docs, "filter": {"op": "eq", "field": "source", "value": "soup"}}
    assert client.post("/rag/query", json=body).json()["searched_for"] == SAID | ONLY_SEARCHED
    assert TYPED in prompt_of(live.engine.requests[-1])


@pytest.mark.parametrize(
    "query",
    [
        'What does "Skeryvore" say of the lighthouse?',
        "What is ‘the Skeryvore light’?",
        "What is skeryvore_2, or Skeryvore-1844?",
        "Wo ist der Leuchtturm von Skeryvore, und wer hat ihn gebaut?",
    ],
)
def test_quotations_codes_and_other_languages_are_read_as_typed(
    client: httpx.Client, live: Live, docs: str, query: str
) -> None:
    assert client.post("/rag/query", json={"query": query, "namespace": docs}).json()["searched_for"] is None
    assert query in prompt_of(live.engine.requests[-1])


def test_given_documents_leave_the_question_alone(client: httpx.Client, live: Live, docs: str) -> None:
    body = {"query": TYPED, "namespace": docs, "documents": [{"text": "Skerryvore is a reef."}]}
    assert client.post("/rag/query", json=body).json()["searched_for"] is None
    assert TYPED in prompt_of(live.engine.requests[-1])


def test_a_history_and_a_session_are_read_alike(client: httpx.Client, live: Live, docs: str) -> None:
    first = client.post("/rag/query", json={"query": TYPED, "namespace": docs, "session": "new"}).json()
    more = {"query": "Which bell is it?", "namespace": docs}
    session = client.post("/rag/query", json=more | {"session": first["session"]["id"]}).json()
    in_session = prompt_of(live.engine.requests[-1])
    history = [{"role": "user", "content": TYPED}, {"role": "assistant", "content": first["answer"]}]
    said = client.post("/rag/query", json=more | {"history": history}).json()["searched_for"]
    in_history = prompt_of(live.engine.requests[-1])
    for prompt in (in_session, in_history):
        assert MEANT in prompt
        assert "Skeryvore" not in prompt
    assert session["searched_for"]["corrections"] == []  # the session has the question as it was read
    assert (said["corrections"], said["model_reads"]) == (SAID["corrections"], None)


def test_a_session_does_not_read_its_turns_again(client: httpx.Client, live: Live, docs: str) -> None:
    soup = {"filter": {"op": "eq", "field": "source", "value": "soup"}}
    body = {"query": TYPED, "namespace": docs}
    first = client.post("/rag/query", json=body | soup | {"session": "new"}).json()
    more = {"query": "Which was it?", "namespace": docs, "session": first["session"]["id"]}
    said = client.post("/rag/query", json=more).json()["searched_for"]
    assert said["corrections"] == ONLY_SEARCHED["corrections"]
    assert TYPED in prompt_of(live.engine.requests[-1])


def test_a_program_asks_as_its_search_has_read(live: Live, docs: str) -> None:
    rag = Rag(live.url, namespace=docs, tokenizer=str(Path(DEFAULT_MODEL)))
    live.embedder.calls.clear()
    corrected, typed = State(), State()
    rag.context(corrected, TYPED, 1)
    rag.answer(corrected, TYPED, "four")
    rag.context(typed, TYPED, 1, spelling="search")
    rag.answer(typed, TYPED, "four")
    rag.retrieve(TYPED, 1, spelling="off")
    rag.close()
    assert (MEANT in corrected.text(), TYPED in typed.text()) == (True, True)
    assert live.embedder.calls == [[MEANT], [MEANT], [TYPED]]


def test_a_follow_up_is_corrected_with_its_turn(client: httpx.Client, live: Live, docs: str) -> None:
    history = [{"role": "user", "content": "Which is Skeryvore?"}]
    said = retrieved(client, history=history, follow_ups="context", query="Which was built?")
    assert said["searched_for"] == SAID | {
        "question": "Which was built?",
        "variants": ["Which is Skerryvore?\nWhich was built?"],
        "follow_up": "context",
        "model_reads": None,
    }


def test_an_unknown_value_is_refused(client: httpx.Client, docs: str) -> None:
    refused = client.post("/rag/retrieve", json={"query": "x", "namespace": docs, "spelling": "maybe"})
    assert refused.json()["error"]["param"] == "spelling"
