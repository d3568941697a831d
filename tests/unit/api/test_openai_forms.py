"""What clients of OpenAI's API send besides questions: fields that ask for nothing, turns of tools, formats
of the answer. The real engine's part is in `tests/integration/test_chat_clients.py`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from ragserve.answering.prompt import PromptBuilder
from tests.unit.api.scripted_server import Live

QUESTION = "Who built the lighthouse of Skerryvore?"
MESSAGES = [{"role": "user", "content": QUESTION}]
CALL = {"id": "call1", "type": "function", "function": {"name": "tide", "arguments": '{"port": "Oban"}'}}
TOOL = {"type": "function", "function": {"name": "tide", "parameters": {"type": "object", "properties": {}}}}
NONE = {"op": "eq", "field": "name", "value": "nothing"}


@pytest.fixture
def chat(live: Live, docs: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="unused", max_retries=0) as client:
        yield client.chat.completions


def ask(client: httpx.Client, **fields: Any) -> httpx.Response:
    body = {"model": "ragserve/docs", "messages": MESSAGES, **fields}
    return client.post("/v1/chat/completions", json=body)


def prompt_of(live: Live) -> str:
    """The last prompt as text."""
    return PromptBuilder.load(live.settings.model).words(live.engine.requests[-1].input_ids)


NULLS = (
    *(
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "logit_bias",
        "reasoning_effort",
        "top_logprobs",
        "stop",
    ),
    *("functions", "function_call", "audio", "prediction", "web_search_options", "verbosity", "modalities"),
    *("response_format", "stream_options", "max_completion_tokens", "seed", "user", "metadata", "store", "n"),
    *("service_tier", "temperature", "top_p", "frequency_penalty", "presence_penalty", "logprobs", "stream"),
)


@pytest.mark.parametrize(
    "fields",
    [
        dict.fromkeys(NULLS),
        {"tools": [], "tool_choice": "none", "functions": [], "function_call": "none"},
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
        {"tools": [TOOL], "tool_choice": "none"},
        {
            "logit_bias": {},
            "top_logprobs": 0,
            "logprobs": False,
            "n": 1,
            "seed": -1,
            "stop": "",
            "store": False,
        },
        {"stop": [], "modalities": ["text"], "reasoning_effort": "low", "verbosity": "low", "metadata": {}},
        {"stream_options": {"include_obfuscation": False}, "user": "me", "service_tier": "auto"},
        {"response_format": {"type": "text"}, "prompt_cache_key": "x", "safety_identifier": "y"},
    ],
    ids=lambda fields: ",".join(fields)[:50],
)
def test_fields_that_ask_for_nothing_are_accepted(client: httpx.Client, docs: str, fields: Any) -> None:
    answer = ask(client, **fields)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == "Alan Stevenson [1]."
    assert "tool_calls" not in answer.json()["choices"][0]["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"web_search_options": {"a": 1}}, "web_search_options"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "description": "x" * 65_530}}]}, "tools"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
            "response_format",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"type": "string", "pattern": "a"}},
                }
            },
            "response_format",
        ),
        ({"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [CALL]}]}, "messages"),
    ],
    ids=lambda value: json.dumps(value)[:50] if isinstance(value, dict) else "",
)
def test_what_cannot_be_done_is_refused_in_one_sentence(
    client: httpx.Client, docs: str, fields: Any, param: str
) -> None:
    answer = ask(client, **fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert "; " not in error["message"]
    assert len(error["message"]) < 300


def test_a_model_whose_template_has_no_tools_says_so(client: httpx.Client, live: Live, docs: str) -> None:
    answer = ask(client, tools=[TOOL])
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "tools_not_served", "tools")
    assert error["message"].startswith("This model's chat template takes no tools")
    assert live.engine.requests == []


RESULT = {"role": "tool", "tool_call_id": "call1", "content": "At six."}
OLDER = {"role": "assistant", "content": None, "function_call": {"name": "tide", "arguments": "{}"}}
CACHED = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}


@pytest.mark.parametrize(
    "history",
    [
        [{"role": "assistant", "content": None}],
        [{"role": "assistant"}],
        [{"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT],
        [{"role": "assistant", "content": "", "tool_calls": []}],
        [
            {
                "role": "assistant",
                "content": "x",
                "tool_calls": None,
                "refusal": None,
                "id": "z",
                "reasoning": "y",
            }
        ],
        [OLDER, {"role": "function", "name": "tide", "content": "At six."}],
        [{"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}],
        [{"role": "assistant", "content": [CACHED]}],
        [{"role": "developer", "content": [{"type": "text", "text": "Be brief."}]}],
        [{"role": "user", "content": None, "name": "me"}],
    ],
    ids=lambda history: json.dumps(history)[:60],
)
def test_any_history_is_read(client: httpx.Client, live: Live, docs: str, history: Any) -> None:
    before = [{"role": "user", "content": "When is the tide?"}, *history]
    answer = ask(client, messages=[*before, *MESSAGES])
    assert answer.status_code == 200, answer.text
    said = prompt_of(live)
    assert QUESTION in said
    assert ("At six." in said) == ("At six." in json.dumps(history))


def test_after_the_results_of_tools_the_users_question_is_searched_for(
    chat: Any, live: Live, docs: str
) -> None:
    turns = [
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call1", "content": "A soup of leeks at six."},
    ]
    answer = chat.create(model="ragserve/docs", messages=[*MESSAGES, *turns], extra_body={"k": 1})
    assert answer.citations[0]["source"] == "skerryvore"
    assert live.embedder.calls[-1] == [QUESTION]
    assert "A soup of leeks at six." in PromptBuilder.load(live.settings.model).words(
        live.engine.requests[-1].input_ids
    )


class Builder(BaseModel):
    name: str
    places: list[int]


@pytest.mark.parametrize("stream", [False, True])
def test_json_is_sent_as_the_model_wrote_it_and_annotated(chat: Any, live: Live, stream: bool) -> None:
    text = '\n{"name": "Alan Stevenson [1]", "places": [9], "seen": ["Skerryvore"]}'
    live.engine.deltas = [text[i : i + 3] for i in range(0, len(text), 3)]
    asked = {"model": "ragserve/docs", "messages": MESSAGES, "extra_body": {"k": 2}}
    if stream:
        with chat.stream(**asked, response_format=Builder) as events:
            message = events.get_final_completion().choices[0].message
    else:
        answer = chat.parse(**asked, response_format=Builder)
        message = answer.choices[0].message
        spans = [each.url_citation for each in message.annotations]
        cited = [message.content[span.start_index : span.end_index] for span in spans]
        assert cited == ["[1]", "Skerryvore"]
        assert [span.basis for span in spans] == ["marker", "quote"]
    assert message.content == text.strip()
    assert message.parsed == Builder(name="Alan Stevenson [1]", places=[9])
    constraint = live.engine.requests[-1].sampling.constraint
    assert json.loads(constraint["json_schema"])["required"] == ["name", "places"]


def test_any_object_may_be_asked_for(client: httpx.Client, live: Live, docs: str) -> None:
    live.engine.deltas = ['{"a": ', "[7]}"]
    answer = ask(client, response_format={"type": "json_object"}).json()
    assert answer["choices"][0]["message"]["content"] == '{"a": [7]}'
    assert live.engine.requests[-1].sampling.constraint == {"json_schema": '{"type": "object"}'}


@pytest.mark.parametrize("stream", [False, True])
def test_where_nothing_is_found_there_is_a_refusal_in_place_of_json(
    chat: Any, live: Live, stream: bool
) -> None:
    asked = {"model": "ragserve/docs", "messages": MESSAGES, "extra_body": {"filter": NONE, "min_score": 0.9}}
    if stream:
        with chat.stream(**asked, response_format=Builder) as events:
            message = events.get_final_completion().choices[0].message
    else:
        message = chat.parse(**asked, response_format=Builder).choices[0].message
    assert message.parsed is None
    assert not message.content
    assert message.refusal == live.settings.nothing_found
    assert live.engine.requests == []


def test_a_session_has_no_tools(client: httpx.Client, docs: str) -> None:
    error = ask(client, tools=[TOOL], session="new").json()["error"]
    assert error["message"].startswith("The turns of a session have no tools.")
