"""Read the messages, tools and format of a chat as a query has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ragserve.answering.messages import Message
from ragserve.answering.query import ToolUse
from ragserve.api.chat_schemas import (
    ChatMessage,
    JsonSchemaFormat,
    NamedChoice,
    SentFunction,
    TextFormat,
    tools_of,
)
from ragserve.api.openai_schemas import ChatRequest
from ragserve.engine.tool_calls import ToolCall
from ragserve.errors import InvalidRequest

_ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True, slots=True)
class ChatTurns:
    """A question, what was said before it, and the calls of tools and their results behind it."""

    question: str
    history: tuple[Message, ...]
    turns: tuple[Message, ...]
    system: str | None


def read_dialogue(messages: Sequence[ChatMessage]) -> ChatTurns:
    """Read a chat. The question is the user's last message.

    Raises InvalidRequest if there is none, or if another message follows than the results of tools."""
    system = "\n\n".join(m.text for m in messages if m.role in ("system", "developer") and m.text)
    said = [m for m in messages if m.role not in ("system", "developer")]
    asked = max((place for place, m in enumerate(said) if m.role == "user"), default=None)
    ends = bool(said) and said[-1].role in ("user", "tool", "function")
    if asked is None or not ends or not said[asked].text.strip():
        raise InvalidRequest(
            "The last message must be the user's question, or the result of a tool called for it, and the "
            "question must not be empty.",
            param="messages",
        )
    names: dict[str, str] = {}
    return ChatTurns(
        said[asked].text,
        tuple(_messages(said[:asked], names)),
        tuple(_messages(said[asked + 1 :], names)),
        system or None,
    )


def _messages(said: Sequence[ChatMessage], names: dict[str, str]) -> list[Message]:
    """The messages that say something. ``names``: of the tools, by the ids of their calls."""
    found = []
    for message in said:
        if message.role in ("tool", "function"):
            call_id = message.tool_call_id or message.name or ""
            name = message.name or names.get(call_id, "")
            found.append(Message("tool", message.text, call_id=call_id, name=name))
            continue
        calls = tuple(map(_call, _calls(message))) if message.role == "assistant" else ()
        names |= {call.id: call.name for call in calls}
        if calls or message.text:
            found.append(Message("user" if message.role == "user" else "assistant", message.text, calls))
    return found


def _calls(message: ChatMessage) -> list[tuple[str, SentFunction]]:
    calls = [(call.id or "", call.function) for call in message.tool_calls or ()]
    older = message.function_call
    return [*calls, *([(older.name, older)] if older is not None else [])]


def _call(call: tuple[str, SentFunction]) -> ToolCall:
    call_id, function = call
    return ToolCall(call_id, function.name, function.arguments or "")


def read_tools(body: ChatRequest) -> ToolUse | None:
    """The tools that the model may call; None for none. Raises InvalidRequest."""
    choice = body.tool_choice
    if not body.tools:
        if choice in (None, "none", "auto"):
            return None
        raise InvalidRequest("tool_choice: there are no tools to call.", param="tool_choice")
    try:
        tools = tools_of(body.tools)
    except ValueError as error:
        raise InvalidRequest(f"tools: {error}.", param="tools") from None
    if choice == "none":
        return None
    name = choice.function.name if isinstance(choice, NamedChoice) else choice or "auto"
    if isinstance(choice, NamedChoice):
        tools = tuple(tool for tool in tools if tool["function"]["name"] == name)
        if not tools:
            raise InvalidRequest(f"tool_choice: there is no tool {name!r}.", param="tool_choice")
    return ToolUse(tools, name, parallel=body.parallel_tool_calls is not False)


def read_schema(body: ChatRequest) -> Mapping[str, Any] | None:
    """The JSON schema that the answer must keep; None for plain text."""
    form = body.response_format
    if form is None or isinstance(form, TextFormat):
        return None
    schema = form.json_schema.schema_ if isinstance(form, JsonSchemaFormat) else None
    return _ANY_OBJECT if schema is None else schema
