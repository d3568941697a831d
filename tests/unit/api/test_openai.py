"""`/v1/chat/completions` and `/v1/models` through OpenAI's own client; everything that is not ours goes
through untouched.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from ragserve.answering.prompt import Message, PromptBuilder, PromptDocument
from ragserve.errors import EngineError
from tests.unit.api.scripted_server import DOCUMENTS, Live

QUESTION = "Who built the lighthouse of Skerryvore?"
MESSAGES = [{"role": "user", "content": QUESTION}]


@pytest.fixture
def chat(live: Live, docs: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="unused", max_retries=0) as client:
        yield client.chat.completions


def test_an_answer_with_citations(chat: Any) -> None:
    answer = chat.create(model="ragserve/docs", messages=MESSAGES)
    message = answer.choices[0].message
    assert message.content == "Alan Stevenson [1]."
    assert answer.choices[0].finish_reason == "stop"
    (annotation,) = message.annotations
    where = annotation.url_citation
    assert annotation.type == "url_citation"
    assert message.content[where.start_index : where.end_index] == "[1]"
    assert (where.title, where.url) == ("Skerryvore", "skerryvore")
    assert answer.citations[0]["text"] == DOCUMENTS["skerryvore"]
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 4
    assert answer.ragserve["context"]["strategy"] == "prefix"
    assert answer.model == "ragserve/docs"


@pytest.mark.parametrize("with_usage", [False, True])
def test_a_stream_with_citations_on_its_last_choice(chat: Any, live: Live, with_usage: bool) -> None:
    live.engine.deltas = (" Alan [", "9] Stevenson", " [1", "].")
    live.engine.cached = 3
    options = {"stream_options": {"include_usage": True}} if with_usage else {}
    chunks = list(chat.create(model="ragserve/docs", messages=MESSAGES, stream=True, **options))
    choices = [chunk for chunk in chunks if chunk.choices]
    assert choices[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in choices) == "Alan Stevenson [1]."
    assert [chunk.choices[0].finish_reason for chunk in choices] == [None] * (len(choices) - 1) + ["stop"]
    last = choices[-1]
    assert last.citations[0]["source"] == "skerryvore"
    assert last.choices[0].delta.annotations[0]["url_citation"]["start_index"] == 15
    assert all(not hasattr(chunk, "citations") for chunk in choices[:-1])
    assert len({chunk.id for chunk in chunks}) == 1
    if with_usage:
        assert chunks[-1].choices == []
        assert chunks[-1].usage.completion_tokens == 4
        assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 3
        assert all(chunk.usage is None for chunk in chunks[:-1])
    else:
        assert chunks[-1] is last


def test_the_last_message_is_the_question_and_the_others_are_history(chat: Any, live: Live) -> None:
    first = chat.create(model="ragserve/docs", messages=MESSAGES)
    messages = [
        {"role": "system", "content": "Be brief."},
        *MESSAGES,
        first.choices[0].message,  # as the client library gives it back
        {
            "role": "user",
            "content": [{"type": "text", "text": "And who built Bell Rock, please, in two words?"}],
        },
    ]
    answer = chat.create(model="ragserve/docs", messages=messages, extra_body={"k": 1})
    passage = answer.citations[0]
    expected = PromptBuilder.load(live.settings.model).build(
        "And who built Bell Rock, please, in two words?",
        [PromptDocument("", passage["title"], passage["text"])],
        max_prompt_tokens=1500,
        history=[Message("user", QUESTION), Message("assistant", "Alan Stevenson [1].")],
        system="Be brief.",
    )
    assert live.engine.requests[-1].input_ids == expected.input_ids


def test_the_search_is_chosen_by_the_request(chat: Any, live: Live) -> None:
    for retrieval, present in (("lexical", (False, True)), ("hybrid", (True, True)), (None, (True, False))):
        extra = {"retrieval": retrieval} if retrieval else {}
        answer = chat.create(model="ragserve/docs", messages=MESSAGES, extra_body=extra)
        assert answer.ragserve["retrieval"] == (retrieval or live.settings.retrieval)
        citation = answer.citations[0]
        assert (citation["cosine"] is not None, citation["bm25"] is not None) == present


def test_options_reach_the_engine(chat: Any, live: Live) -> None:
    chat.create(
        model="ragserve/docs",
        messages=MESSAGES,
        max_completion_tokens=9,
        temperature=0.7,
        top_p=0.8,
        seed=4,
        stop="x",
        presence_penalty=0.5,
    )
    sampling = live.engine.requests[-1].sampling
    assert (sampling.max_new_tokens, sampling.temperature, sampling.top_p, sampling.seed) == (9, 0.7, 0.8, 4)
    assert (sampling.stop, sampling.presence_penalty) == (("x",), 0.5)
    chat.create(
        model="ragserve/docs",
        messages=MESSAGES,
        max_tokens=5,
        extra_body={"documents": [{"text": "x"}], "strategy": "full"},
    )
    assert live.engine.requests[-1].sampling.max_new_tokens == 5
    assert live.engine.requests[-1].strategy == "full"


@pytest.mark.parametrize(
    ("source", "url"),
    [
        ("https://x.org/a b", "https://x.org/a b"),
        ("/srv/a b.md", "file:///srv/a%20b.md"),
        ("notes", "notes"),
        (None, ""),
    ],
)
def test_sources_as_urls(chat: Any, source: str | None, url: str) -> None:
    document = {"title": "T", "text": "x", **({"source": source} if source else {})}
    answer = chat.create(model="ragserve/docs", messages=MESSAGES, extra_body={"documents": [document]})
    assert answer.choices[0].message.annotations[0].url_citation.url == url


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("model", ["ragserve/nowhere", "ragserve/", "ragserve/../x"])
def test_an_unknown_namespace_is_an_unknown_model(chat: Any, model: str, stream: bool) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        chat.create(model=model, messages=MESSAGES, stream=stream)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages"),
        ({"messages": [*MESSAGES, {"role": "assistant", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": " "}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 20_000}]}, "messages"),
        ({"messages": MESSAGES * 66}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "critic", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content",
        ),
        ({"n": 2}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"temperature": 3}, "temperature"),
        ({"extra_body": {"k": 0}}, "k"),
    ],
    ids=lambda value: json.dumps(value)[:50] if isinstance(value, dict) else "",
)
def test_bad_requests_are_openais_errors(chat: Any, options: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat.create(**{"model": "ragserve/docs", "messages": MESSAGES, **options})
    assert caught.value.param is not None
    assert caught.value.param.startswith(param)
    assert caught.value.type == "invalid_request_error"


def test_an_error_in_the_stream_is_raised_by_the_client(chat: Any, live: Live) -> None:
    live.engine.error, live.engine.error_after = EngineError("The engine failed."), 2
    with pytest.raises(openai.APIError, match="The engine failed"):
        list(chat.create(model="ragserve/docs", messages=MESSAGES, stream=True))


def test_a_body_too_large_for_ours_may_be_sglangs(client: httpx.Client, live: Live, docs: str) -> None:
    filler = "x" * (live.settings.max_body_bytes + 1)
    ours = client.post(
        "/v1/chat/completions", json={"model": "ragserve/docs", "messages": MESSAGES, "user": filler}
    )
    assert ours.status_code == 413
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{filler}"}}
    body = {"model": "tiny", "messages": [{"role": "user", "content": [image]}]}
    theirs = client.post("/v1/chat/completions", json=body)
    assert theirs.json()["upstream"] == "/v1/chat/completions"
    assert json.loads(live.seen_upstream[-1]["body"]) == body


@pytest.mark.parametrize("route", ["chat/completions", "responses", "messages"])
def test_more_text_than_any_context_is_refused_before_it_is_tokenised(
    client: httpx.Client, live: Live, route: str
) -> None:
    filler = "data:" + "x" * (1 << 20)
    message = {"role": "user", "content": filler}
    part = {"role": "user", "content": [{"type": "text", "text": filler}]}
    source = {"type": "tool_result", "content": [{"type": "search_result", "source": {"url": filler}}]}
    for fields in (
        {"messages": [message]},
        {"messages": [part]},
        {"messages": [{"role": "user", "content": [source]}]},
        {"input": filler},
        {"input": [message]},
        {"instructions": filler},
        {"system": [{"type": "text", "text": filler}]},
        {"tools": [{"type": "function", "function": {"description": filler}}]},
    ):
        answer = client.post(f"/v1/{route}", json={"model": "tiny", **fields})
        assert (answer.status_code, live.seen_upstream) == (413, []), fields.keys()
        assert "characters" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [{"model": "tiny", "tools": [1]}, {"model": "tiny:adapter"}, {"model": "default"}, {"messages": []}],
)
def test_other_models_are_sglangs(client: httpx.Client, live: Live, body: Any) -> None:
    raw = json.dumps(body, indent=3).encode()
    response = client.post(
        "/v1/chat/completions?x=1", content=raw, headers={"Content-Type": "application/json"}
    )
    assert response.json() == {"upstream": "/v1/chat/completions", "size": len(raw)}
    scope = live.seen_upstream[-1]["scope"]
    assert live.seen_upstream[-1]["body"] == raw
    assert scope["query_string"] == b"x=1"
    assert response.headers["x-request-id"]


@pytest.mark.parametrize(
    "path", ["/generate", "/v1/audio/transcriptions", "/health", "/v1/responses/x/cancel", "/encode"]
)
def test_what_no_route_of_ours_claims_is_sglangs(client: httpx.Client, live: Live, path: str) -> None:
    assert client.post(path, content=b"abc").json() == {"upstream": path, "size": 3}
    ours = {"router", "route", "endpoint", "path_params", "fastapi", "fastapi_inner_astack"}
    assert live.seen_upstream[-1]["scope"]["app"] is not live.app
    assert not ours & {
        name
        for name, value in live.seen_upstream[-1]["scope"].items()
        if value is getattr(live.app, name, object())
    }


OPENAI_ROUTES = (
    *("chat/completions", "completions", "responses", "embeddings", "classify", "score", "rerank"),
    *("messages", "messages/count_tokens"),
)


@pytest.mark.parametrize("route", OPENAI_ROUTES)
def test_an_unknown_model_is_not_answered_by_another(client: httpx.Client, live: Live, route: str) -> None:
    body = {"model": "gpt-4o", "messages": MESSAGES, "prompt": "x", "input": "x"}
    response = client.post(f"/v1/{route}", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert error["type"] == "invalid_request_error"
    assert live.seen_upstream == []


@pytest.mark.parametrize("route", OPENAI_ROUTES[1:])
def test_routes_without_retrieval_refuse_the_models_of_namespaces(
    client: httpx.Client, live: Live, docs: str, route: str
) -> None:
    response = client.post(f"/v1/{route}", json={"model": "ragserve/docs", "prompt": "Who?", "input": "Who?"})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "unsupported_model", "model")
    assert "/v1/chat/completions" in error["hint"]
    assert live.seen_upstream == []
    raw = json.dumps({"model": "tiny", "prompt": "Who?"}).encode()
    assert client.post(f"/v1/{route}", content=raw).json()["upstream"] == f"/v1/{route}"


@pytest.mark.parametrize("path", ["/invocations", "/api/chat", "/api/generate"])
def test_chats_under_names_of_other_servers_are_checked_as_those_of_openai(
    client: httpx.Client, live: Live, docs: str, path: str
) -> None:
    def code(**body: Any) -> tuple[int, str]:
        response = client.post(path, json={"messages": MESSAGES, **body})
        return response.status_code, response.json()["error"]["code"]

    assert code(model="ragserve/docs") == (400, "unsupported_model")
    assert code(model="gpt-4o") == (404, "model_not_found")
    assert code(model="tiny", prompt="x" * 3_000_000) == (413, "too_large")
    assert live.seen_upstream == []
    assert client.post(path, json={"model": "tiny", "messages": MESSAGES}).json()["upstream"] == path


@pytest.mark.parametrize("body", [{"model": 7}, {"model": ["tiny"]}, [], "x", 5])
@pytest.mark.parametrize("route", OPENAI_ROUTES)
def test_a_model_that_is_no_text_is_refused_with_the_documented_body(
    client: httpx.Client, live: Live, route: str, body: Any
) -> None:
    response = client.post(f"/v1/{route}", json=body)
    error = response.json()["error"]
    assert response.status_code == 400
    assert set(error) == {"message", "type", "code", "param", "hint", "request_id"}
    assert error["param"] == ("model" if isinstance(body, dict) else None)
    assert live.seen_upstream == []


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}],
        [{"type": "text", "text": "Who?"}, {"type": "input_audio", "input_audio": {}}],
        [7],
        [{}],
        7,
        {"type": "text", "text": "Who?"},
        [{"type": "text", "text": 5}],
    ],
)
def test_a_part_that_is_not_text_is_refused_in_plain_words(
    client: httpx.Client, docs: str, content: Any
) -> None:
    body = {"model": "ragserve/docs", "messages": [{"role": "user", "content": content}]}
    response = client.post("/v1/chat/completions", json=body)
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["param"].startswith("messages[0].content")
    for internal in (
        "constrained",
        "list[",
        "TextPart",
        "union",
        "tag",
        "dict",
        "function",
        "pydantic",
        "; ",
    ):
        assert internal not in error["message"], error["message"]


def test_an_error_of_sglangs_app_is_its_own(client: httpx.Client) -> None:
    response = client.get("/ping")
    assert response.status_code == 500
    assert "secret" not in response.text


def test_models_of_both(client: httpx.Client, live: Live, docs: str) -> None:
    live.index("more", {"a": "b"})
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="unused") as connection:
        names = {model.id: model.owned_by for model in connection.models.list()}
        assert {
            "ragserve/docs": "ragserve",
            "ragserve/more": "ragserve",
            "tiny": "sglang",
        }.items() <= names.items()
        assert connection.models.retrieve("ragserve/docs").id == "ragserve/docs"
        with pytest.raises(openai.NotFoundError):
            connection.models.retrieve("ragserve/nowhere")
    assert client.get("/v1/models").json()["data"][-1]["root"] == "x"  # as SGLang wrote it
    assert client.get("/v1/models/tiny").json()["upstream"] == "/v1/models/tiny"


@pytest.mark.parametrize("name", ["nobodys", "some/other", "ragserve/nowhere"])
def test_an_unknown_model_is_refused_with_a_hint(client: httpx.Client, name: str) -> None:
    response = client.get(f"/v1/models/{name}")
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (404, "model_not_found")
    assert "GET /v1/models" in error["hint"]
    assert error["request_id"] == response.headers["x-request-id"]


def test_a_model_with_a_line_break_is_refused_by_us(client: httpx.Client) -> None:
    """No route's pattern matches a line break: SGLang would answer, with a body of its own."""
    response = client.get("/v1/models/a%0Ab")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "route_not_found")
