"""Strategy `passages`: the best passages whole, prefilled exactly."""

from __future__ import annotations

import httpx
import pytest

from tests.unit.api.scripted_server import DOCUMENTS, Live
from tests.unit.api.test_query import QUESTION, ask

FIRST = {"strategy": "passages", "strategy_options": {"tokens": 1}}


def test_the_best_passages_alone_are_prefilled(client: httpx.Client, live: Live, docs: str) -> None:
    whole = ask(client, namespace=docs, strategy="prefix", k=3)
    live.engine.cached = 4
    answer = ask(client, namespace=docs, k=3, **FIRST)
    read = live.engine.requests[-1]
    assert (read.strategy, dict(read.options)) == ("prefix", {}), "it shares the prefix cache"
    assert len(read.input_ids) < len(live.engine.requests[0].input_ids)
    context = answer["context"]
    assert (context["strategy"], context["documents_retrieved"], context["documents_kept"]) == (
        "passages",
        3,
        1,
    )
    assert context["tokens_retrieved"] == whole["context"]["tokens_retrieved"]
    assert 0 < context["tokens_kept"] < context["tokens_retrieved"]
    assert context["notes"] == [
        "2 of 3 passages were left out: the best others fill the strategy's token budget."
    ]
    assert [each["text"] for each in answer["citations"]] == [DOCUMENTS["skerryvore"]]


def test_passages_are_numbered_as_the_prompt_has_them(client: httpx.Client, live: Live) -> None:
    """The second is skipped, the third fits: marker [2] is the third."""
    live.engine.deltas = (" See", " [2]", ".")
    texts = ["The tower is red.", "lighthouse " * 300, "The roof is blue."]
    documents = [{"text": text, "source": str(number)} for number, text in enumerate(texts)]
    answer = ask(client, documents=documents, strategy="passages", strategy_options={"keep": 0.5})
    assert [(each["index"], each["source"]) for each in answer["citations"]] == [(2, "2")]
    assert answer["context"]["documents_kept"] == 2


def test_what_is_left_out_need_not_fit(client: httpx.Client) -> None:
    documents = [{"text": "The tower is red."}, {"text": "lighthouse " * 9000}]
    answer = ask(client, documents=documents, strategy="passages", strategy_options={"tokens": 100})
    assert answer["context"]["documents_kept"] == 1


def test_the_search_s_results_begin_with_those_in_the_prompt(client: httpx.Client, docs: str) -> None:
    body = {"query": QUESTION, "namespace": docs, "k": 3, "stream": True, **FIRST}
    stream = client.post("/rag/query", json=body).text
    assert '"documents_kept":1' in stream.replace(" ", "")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"strategy_options": {"keep": 2}}, "less than or equal to 1"),
        ({"session": "new"}, "keeps part of the documents"),
    ],
)
def test_what_it_does_not_do_is_refused(
    client: httpx.Client, live: Live, docs: str, fields: dict[str, object], says: str
) -> None:
    body = {"query": QUESTION, "namespace": docs, "strategy": "passages", **fields}
    response = client.post("/rag/query", json=body)
    assert response.status_code == 400, response.text
    assert says in response.json()["error"]["message"]
    assert not live.engine.requests


def test_it_is_listed(client: httpx.Client) -> None:
    assert "passages" in client.get("/info").json()["strategies"]
