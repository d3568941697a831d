"""Clients and an agent framework on the OpenAI route of the real engine, with a model of random weights: what
it writes is held to its form by SGLang's grammars, and read by SGLang's parser of the model's template."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict, SecretStr

from tests.integration.engines import Server

NAMESPACE = "chat-clients"
MODEL = f"ragserve/{NAMESPACE}"
TEXTS = {
    "skerryvore.txt": "The lighthouse of Skerryvore was built by Alan Stevenson between 1838 and 1844.",
    "oban.txt": "Ships call at Oban twice a day, in the morning and in the evening.",
}
QUESTION = "Who built the lighthouse of Skerryvore?"
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
PORTS = {
    "type": "object",
    "properties": {"port": {"type": "string", "enum": ["Oban", "Wick"]}},
    "required": ["port"],
    "additionalProperties": False,
}


def tool(name: str) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": PORTS, "strict": True}}


class Port(BaseModel):
    port: Literal["Oban", "Wick"]


def read_tide(port: str) -> str:
    """Tell when the tide is."""
    return f"At six in {port}."


class Fact(BaseModel):
    """Small enough for a model that ends no text by itself."""

    model_config = ConfigDict(extra="forbid")
    sure: bool
    port: Literal["Oban", "Wick"]


@pytest.fixture(scope="module")
def url(quick_server: Server) -> str:
    texts = [{"name": name, "text": text} for name, text in TEXTS.items()]
    job = quick_server.finished(
        quick_server.client.post("/rag/ingest", json={"namespace": NAMESPACE, "texts": texts})
    )
    assert job["counts"]["indexed"] == len(texts), job
    return f"{quick_server.url}/v1"


@pytest.fixture(scope="module")
def chat(url: str) -> Any:
    with openai.OpenAI(base_url=url, api_key="unused", max_retries=0) as client:
        yield client.chat.completions


def ports(calls: Any) -> list[str]:
    return [json.loads(call.function.arguments)["port"] for call in calls]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "tide"}}])
def test_openai_calls_a_tool_and_sends_its_result(chat: Any, choice: Any) -> None:
    asked = {"model": MODEL, "max_tokens": 150, "parallel_tool_calls": False}
    tools = [tool("tide"), tool("ferry")]
    answer = chat.create(**asked, messages=MESSAGES, tools=tools, tool_choice=choice)
    called = answer.choices[0]
    assert called.finish_reason == "tool_calls"
    assert called.message.content is None
    assert set(ports(called.message.tool_calls)) <= {"Oban", "Wick"}
    names = {call.function.name for call in called.message.tool_calls}
    assert names == {"tide"} if isinstance(choice, dict) else names <= {"tide", "ferry"}
    with chat.stream(**asked, messages=MESSAGES, tools=tools, tool_choice=choice) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert streamed.finish_reason == "tool_calls"
    calls = zip(called.message.tool_calls, streamed.message.tool_calls, strict=True)
    assert all(one.function.arguments == other.function.arguments for one, other in calls)
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "At six."} for call in called.message.tool_calls
    ]
    messages = [*MESSAGES, called.message, *results]
    final = chat.create(**asked, messages=messages, tools=tools, extra_body={"k": 1})
    assert final.choices[0].finish_reason in ("stop", "length", "tool_calls")
    assert final.usage.prompt_tokens > 40
    assert final.ragserve["context"]["tokens_kept"] > 10, "passages are found again"
    assert final.ragserve["searched_for"] is None, "with the user's question"


def test_openai_parses_json_over_documents(chat: Any) -> None:
    asked = {"model": MODEL, "messages": MESSAGES, "max_tokens": 150, "response_format": Fact}
    message = chat.parse(**asked).choices[0].message
    assert message.parsed == Fact.model_validate_json(message.content)
    with chat.stream(**asked) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == message.parsed
    composed = {"strategy": "concat", "strategy_options": {"force": True}}
    answer = chat.parse(**asked, extra_body=composed)
    assert answer.choices[0].message.parsed is not None
    assert answer.ragserve["context"]["strategy"] == "concat"


def test_json_and_tools_at_once(chat: Any) -> None:
    """As agents with a type of output ask: the answer is either JSON or calls, and nothing else."""
    seen = set()
    for seed in range(6):
        answer = chat.parse(
            model=MODEL,
            messages=MESSAGES,
            max_tokens=150,
            response_format=Fact,
            tools=[tool("tide")],
            parallel_tool_calls=False,
            temperature=1.0,
            seed=seed,
        )
        choice = answer.choices[0]
        seen.add(choice.finish_reason)
        if choice.finish_reason == "tool_calls":
            assert ports(choice.message.tool_calls)
        elif choice.finish_reason == "stop":
            assert choice.message.parsed is not None
    assert seen & {"tool_calls", "stop"}


def test_sglang_refuses_no_schema_that_we_have_taken(chat: Any) -> None:
    schemas = [
        {"type": "object"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"enum": [1, 2]}}},
        {"type": "integer"},
    ]
    for schema in schemas:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        answer = chat.create(model=MODEL, messages=MESSAGES, max_tokens=8, response_format=form)
        assert answer.choices[0].message.content
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "thing"}}}
    with pytest.raises(openai.BadRequestError, match="response_format"):
        chat.create(model=MODEL, messages=MESSAGES, response_format=form)


def test_langchain(url: str) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool as as_tool
    from langchain_openai import ChatOpenAI

    @as_tool
    def tide(port: Literal["Oban", "Wick"]) -> str:
        """Tell when the tide is."""
        return f"At six in {port}."

    model = ChatOpenAI(
        base_url=url, api_key=SecretStr("unused"), model=MODEL, max_completion_tokens=150, temperature=0
    )
    chunks = list(model.stream(QUESTION))
    assert "".join(str(chunk.content) for chunk in chunks) == model.invoke(QUESTION).content
    assert isinstance(model.with_structured_output(Fact).invoke(QUESTION), Fact)
    by_call = model.with_structured_output(Fact, method="function_calling", strict=True)
    assert isinstance(by_call.invoke(QUESTION), Fact)
    bound = model.bind_tools([tide], tool_choice="tide", strict=True, parallel_tool_calls=False)
    called = bound.invoke(QUESTION)
    assert called.tool_calls[0]["name"] == "tide"
    result = tide.invoke(called.tool_calls[0])
    assert isinstance(result, ToolMessage)
    said = model.bind_tools([tide]).invoke([HumanMessage(QUESTION), called, result])
    assert said.content or said.tool_calls
    streamed: Any = None
    for chunk in bound.stream(QUESTION):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed is not None
    assert streamed.tool_calls[0]["args"] == called.tool_calls[0]["args"]


def test_llama_index(url: str) -> None:
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike  # type: ignore[import-untyped]

    model = OpenAILike(
        model=MODEL,
        api_base=url,
        api_key="unused",
        max_tokens=150,
        temperature=0.0,
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=4096,
        strict=True,
    )
    history = [ChatMessage(role="user", content=QUESTION)]
    whole = model.chat(history).message.content
    assert whole
    assert list(model.stream_chat(history))[-1].message.content == whole
    tools = [FunctionTool.from_defaults(read_tide, fn_schema=Port)]
    response = model.chat_with_tools(tools, chat_history=history, tool_required=True)
    calls = model.get_tool_calls_from_response(response)
    assert {call.tool_name for call in calls} == {"read_tide"}
    result = ChatMessage(role="tool", content="At six.", additional_kwargs={"tool_call_id": calls[0].tool_id})
    again = model.chat_with_tools(tools, chat_history=[*history, response.message, result])
    assert again.message.content or model.get_tool_calls_from_response(again, error_on_no_tool_call=False)


def test_openais_agents(url: str) -> None:
    from agents import (
        Agent,
        ModelSettings,
        OpenAIChatCompletionsModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )

    set_tracing_disabled(True)
    called: list[str] = []

    @function_tool
    def tide(port: Literal["Oban", "Wick"]) -> str:
        """Tell when the tide is."""
        called.append(port)
        return f"At six in {port}."

    async def run() -> Any:
        async with openai.AsyncOpenAI(base_url=url, api_key="unused", max_retries=0) as client:
            agent = Agent(
                name="Pilot",
                instructions="Answer from the documents.",
                model=OpenAIChatCompletionsModel(MODEL, client),
                model_settings=ModelSettings(
                    tool_choice="required", max_tokens=150, temperature=0, parallel_tool_calls=False
                ),
                tools=[tide],
            )
            whole = await Runner.run(agent, QUESTION, max_turns=4)
            streamed = Runner.run_streamed(agent, QUESTION, max_turns=4)
            async for _ in streamed.stream_events():
                pass
            return whole, streamed

    whole, streamed = asyncio.run(run())
    assert called
    assert set(called) <= {"Oban", "Wick"}
    assert isinstance(whole.final_output, str)
    assert streamed.final_output == whole.final_output
    assert [type(item).__name__ for item in whole.new_items][:2] == ["ToolCallItem", "ToolCallOutputItem"]
