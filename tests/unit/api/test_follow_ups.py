"""What a follow-up is searched for as, over every route, with models that can rewrite and that cannot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from ragserve.answering import follow_ups
from ragserve.answering.prompt import load_tokenizer
from ragserve.config import DEFAULT_MODEL
from ragserve.engine.base import GenerateRequest
from ragserve.errors import TooManyRequests
from ragserve.programs import Rag
from ragserve.tenants.key_file import KeyLimits
from tests.unit.api.scripted_server import DOCUMENTS, Live, Tenants, serving

HISTORY = [
    {"role": "user", "content": "Tell me of the lighthouse of Skerryvore."},
    {"role": "assistant", "content": "It stands on a reef [1]."},
]
FOLLOW_UP = "And by which of the two engineers was it built in those years?"
REWRITE = "By which of the two engineers was the lighthouse of Skerryvore built in those years?"
REWRITES = {
    FOLLOW_UP: REWRITE,
    "Which prizes did she win in her life?": "Which prizes did Marie Curie win in her life?",
    "Which large rivers flow through the country?": "Which large rivers flow through Bolivia?",
}
CONTEXT = [
    FOLLOW_UP,
    f"Tell me of the lighthouse of Skerryvore.\n{FOLLOW_UP}",
    f"It stands on a reef.\n{FOLLOW_UP}",
]

UNCHANGED: dict[str, Any] = {"corrections": [], "model_reads": None}


@pytest.fixture
def live(tmp_path: Path, model_path: Path) -> Iterator[Live]:
    """A server of its own for each test: a server remembers whether its model can rewrite."""
    with serving(tmp_path, model_path) as live:
        live.index("docs", DOCUMENTS)
        yield live


class RewritingModel:
    """Rewrites the last question of a dialogue as ``rewrites`` has it, and leaves other prompts alone."""

    def __init__(self, rewrites: dict[str, str]) -> None:
        self._tokenizer = load_tokenizer(DEFAULT_MODEL)
        self._rewrites = rewrites
        self.asked: list[str] = []

    def __call__(self, request: GenerateRequest) -> Sequence[str] | None:
        prompt = self._tokenizer.decode(request.input_ids)
        if "Last question: " not in prompt:
            return None
        self.asked.append(prompt)
        last = prompt.rpartition("Last question: ")[2]
        (rewrite,) = [text for question, text in self._rewrites.items() if question in last]
        return [" ", rewrite, "\n", "And more."]


def retrieved(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    body = {"query": FOLLOW_UP, "namespace": "docs", "history": HISTORY, **fields}
    response = client.post("/rag/retrieve", json=body)
    assert response.status_code == 200, response.text
    return dict(response.json())


def test_a_follow_up_is_rewritten_on_every_route(client: httpx.Client, live: Live) -> None:
    live.engine.reply = RewritingModel(REWRITES)
    found = retrieved(client)
    assert live.embedder.calls[-1] == [REWRITE]
    assert found["results"][0]["source"] == "skerryvore"
    assert found["timings"]["rewrite_ms"] > 0
    expected = {"question": REWRITE, "variants": [], "follow_up": "rewrite", "note": None} | UNCHANGED
    assert found["searched_for"] == expected

    body = {"query": FOLLOW_UP, "namespace": "docs", "history": HISTORY}
    answer = client.post("/rag/query", json=body).json()
    assert answer["searched_for"] == expected
    prompt = load_tokenizer(DEFAULT_MODEL).decode(live.engine.requests[-1].input_ids)
    assert FOLLOW_UP in prompt, "the answer is to what the user wrote"
    assert REWRITE not in prompt
    assert {request.namespace for request in live.engine.requests} == {"docs"}
    streamed = client.post("/rag/query", json=body | {"stream": True}).text
    assert streamed.partition("\n\n")[0].count(f'"question":"{REWRITE}"') == 1

    messages = [*HISTORY, {"role": "user", "content": FOLLOW_UP}]
    chat = client.post("/v1/chat/completions", json={"model": "ragserve/docs", "messages": messages})
    assert chat.json()["ragserve"]["searched_for"] == expected

    rag = Rag(live.url, namespace="docs")
    turn = (HISTORY[0]["content"], HISTORY[1]["content"])
    live.embedder.calls.clear()
    assert rag.retrieve(FOLLOW_UP, 1, history=[turn])[0].source == "skerryvore"
    rag.retrieve(FOLLOW_UP, 1, history=[turn], follow_ups="alone")
    rag.close()
    assert live.embedder.calls == [[REWRITE], [FOLLOW_UP]]


def test_the_model_is_tested_once_and_not_asked_again_if_it_fails(client: httpx.Client, live: Live) -> None:
    for _ in range(2):
        found = retrieved(client)
        assert found["searched_for"] == {
            "question": FOLLOW_UP,
            "variants": CONTEXT[1:],
            "follow_up": "context",
            "note": follow_ups._UNABLE,
            **UNCHANGED,
        }
        assert live.embedder.calls[-1] == CONTEXT
    assert len(live.engine.requests) == 1


@pytest.mark.parametrize(
    "rewrite",
    [
        "",
        "Who built the lighthouse of Eddystone, of the two engineers?",
        "Tell me of Skerryvore.",
        REWRITE * 20,
    ],
    ids=["empty", "another-name", "another-question", "too-long"],
)
def test_a_rewrite_that_says_something_else_is_not_used(
    client: httpx.Client, live: Live, rewrite: str
) -> None:
    live.engine.reply = RewritingModel(REWRITES | {FOLLOW_UP: rewrite})
    asked = retrieved(client)["searched_for"]
    assert (asked["question"], asked["follow_up"]) == (FOLLOW_UP, "context")
    assert "not usable" in asked["note"]
    assert live.embedder.calls[-1] == CONTEXT


def test_an_engine_that_fails_to_rewrite_is_tried_again(client: httpx.Client, live: Live) -> None:
    live.engine.reply = RewritingModel(REWRITES)
    live.engine.error = TooManyRequests("Full.", hint="Wait.")
    assert "Full." in retrieved(client)["searched_for"]["note"]
    live.engine.error = None
    assert retrieved(client)["searched_for"]["question"] == REWRITE


def test_the_request_chooses_what_is_searched_for(client: httpx.Client, live: Live) -> None:
    live.engine.reply = model = RewritingModel(REWRITES)
    assert retrieved(client, follow_ups="alone")["searched_for"]["variants"] == []
    assert live.embedder.calls[-1] == [FOLLOW_UP]
    found = retrieved(client, follow_ups="context")
    assert live.embedder.calls[-1] == CONTEXT
    assert found["timings"]["rewrite_ms"] is None
    assert found["searched_for"]["note"] is None
    for history in ([], [HISTORY[1]]):
        assert retrieved(client, history=history)["searched_for"] is None
        assert live.embedder.calls[-1] == [FOLLOW_UP]
    assert model.asked == []
    refused = client.post("/rag/retrieve", json={"query": "x", "namespace": "docs", "follow_ups": "guess"})
    assert refused.json()["error"]["param"] == "follow_ups"


@pytest.mark.parametrize("retrieval", ["dense", "lexical", "hybrid"])
def test_the_turn_before_says_which_of_two_is_meant(client: httpx.Client, live: Live, retrieval: str) -> None:
    """The follow-up alone says as much of either lighthouse."""
    names = ("Pharos", "Inchkeith")
    live.index("pair", {name: f"{name} was built by an engineer." for name in names})

    def best(name: str, follow_ups: str) -> str:
        history = [{"role": "user", "content": f"What do you know of {name}?"}, HISTORY[1]]
        fields = {"namespace": "pair", "history": history, "retrieval": retrieval, "follow_ups": follow_ups}
        found = retrieved(client, **fields)["results"]
        assert [one["score"] for one in found] == sorted((one["score"] for one in found), reverse=True)
        return str(found[0]["source"])

    assert best(names[0], "alone") == best(names[1], "alone")
    assert [best(name, "context") for name in names] == list(names)


@pytest.mark.parametrize("path", ["/rag/retrieve", "/rag/query"])
def test_rewriting_a_question_counts_as_tokens_of_its_key(live: Live, path: str) -> None:
    """A key without a token left may search, but not have its question rewritten."""
    live.engine.reply = RewritingModel(REWRITES)
    tenants, body = Tenants(live), {"query": FOLLOW_UP, "namespace": "docs", "history": HISTORY}
    with live.client() as client:
        retrieved(client)  # the server's tests of its model are its own
    limits = KeyLimits(tokens_per_minute=1)
    with tenants.client("thrifty", "read", "docs", limits=limits) as thrifty:
        assert thrifty.post(path, json=body).status_code == 200
        rewriting = live.engine.requests[-1 if path == "/rag/retrieve" else -2]
        assert "Last question: " in load_tokenizer(DEFAULT_MODEL).decode(rewriting.input_ids)
        prompts = [len(each.input_ids) for each in (rewriting, live.engine.requests[-1])]
        least = prompts[0] if path == "/rag/retrieve" else sum(prompts)
        refused = thrifty.post("/rag/retrieve", json=body)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) > (least - 1) * 60 - 30, "a minute a token"
        alone = thrifty.post("/rag/retrieve", json=body | {"follow_ups": "context"})
        assert alone.status_code == 200
