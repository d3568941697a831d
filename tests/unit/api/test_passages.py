"""Strategy `passages`: the best passages whole, prefilled exactly."""

from __future__ import annotations

import httpx
import pytest

from ragserve.answering.prompt import PromptBuilder
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
    answer = ask(
        client, documents=documents, strategy="passages", strategy_options={"keep": 0.5, "by": "score"}
    )
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
        (
            {"session": "new", "strategy": "epic", "strategy_options": {"passages": {"keep": 0.5}}},
            "Strategy epic:passages.keep=0.5 keeps part of the documents",
        ),
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


def test_a_composed_strategy_composes_the_best_passages_alone(
    client: httpx.Client, live: Live, docs: str
) -> None:
    options = {"passages": {"tokens": 1}, "recompute": "question", "force": True}
    answer = ask(client, namespace=docs, k=3, strategy="epic", strategy_options=options)
    read = live.engine.requests[-1]
    assert (read.strategy, dict(read.options)) == ("epic", {"recompute": "question"})
    assert len(read.spans) == 2, "the system text and one passage: the others are not loaded"
    assert [each["text"] for each in answer["citations"]] == [DOCUMENTS["skerryvore"]]
    context = answer["context"]
    assert (context["strategy"], context["documents_retrieved"], context["documents_kept"]) == (
        "epic",
        3,
        1,
    )
    assert context["tokens_kept"] < context["tokens_retrieved"]


def test_the_scores_are_those_of_the_passages_in_the_prompt(
    client: httpx.Client, live: Live, docs: str
) -> None:
    ask(client, namespace=docs, k=3, strategy="samkv", strategy_options={"force": True})
    options = {"passages": {"tokens": 1}, "force": True}
    ask(client, namespace=docs, k=3, strategy="samkv", strategy_options=options)
    every, best = (request.scores for request in live.engine.requests)
    assert every is not None
    assert best is not None
    assert best.documents == every.documents[:1]


def test_a_choice_of_passages_is_verified_by_itself(client: httpx.Client, live: Live, docs: str) -> None:
    body = {"query": QUESTION, "namespace": docs, "strategy": "epic"}
    response = client.post("/rag/query", json={**body, "strategy_options": {"passages": {"keep": 0.25}}})
    error = response.json()["error"]
    assert error["code"] == "strategy_not_verified"
    assert error["message"].startswith("Strategy epic:passages.keep=0.25 has not been verified")
    assert "ragserve tune --namespace docs --strategies 'epic:passages.keep=0.25'" in error["hint"]


def test_a_question_s_second_passage_is_found_by_what_the_first_names(
    client: httpx.Client, live: Live
) -> None:
    texts = {
        "Skerryvore": "The lighthouse of Skerryvore was built by Alan Stevenson.",
        "Lighthouse": "A lighthouse is a tower that was built for ships.",
        "Ships": "Ships are large.",
        "Alan Stevenson": "He came from Edinburgh.",
    }
    documents = [{"title": title, "text": text, "source": title} for title, text in texts.items()]
    for by in ("links", "score"):
        options = {"tokens": 60, "by": by}
        ask(client, documents=documents, strategy="passages", strategy_options=options)
    prompts = PromptBuilder.load(live.settings.model)
    linked, nearest = (prompts.words(request.input_ids) for request in live.engine.requests)
    assert "Edinburgh" in linked
    assert "Edinburgh" not in nearest


def test_it_is_listed(client: httpx.Client) -> None:
    assert "passages" in client.get("/info").json()["strategies"]
