"""Messages, tools and formats of a chat, as the clients of OpenAI's API send them.

Clients send many fields that ask for nothing (``tools: []``, ``logit_bias: {}``, null): these are accepted. A
field that asks for what a namespace cannot do is refused in one sentence. Unknown fields of messages, parts
and tools are ignored: a history is not the client's to choose."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from ragserve.api.body import RequestModel, Text
from ragserve.api.schemas import Stop

MAX_TOOLS = 128
MAX_TOOL_CHARS = 2**16  # of all of a request as JSON
_MAX_CALLS = 128  # of one message
_NAME = r"^[a-zA-Z0-9_.:-]{1,128}$"

Content = Annotated[Text, Field(max_length=65_536)]
ToolName = Annotated[str, Field(pattern=_NAME)]
CallId = Annotated[Text, Field(max_length=256)]
Ignored = Annotated[Any, Field(default=None, description="Accepted and ignored.")]
_NOTHING: tuple[Any, ...] = (None, [], {}, "", "none", "auto", 0, False, ["text"])


def _asks_for_nothing(value: Any) -> None:
    if not any(type(value) is type(nothing) and value == nothing for nothing in _NOTHING):
        raise ValueError("is not served by models of namespaces: leave it out")


Unserved = Annotated[
    Any,
    BeforeValidator(_asks_for_nothing),
    Field(default=None, description="Not served; accepted where it asks for nothing, as null and empty."),
]
Seed = Annotated[
    Annotated[int, Field(ge=0, le=2**31 - 1)] | None,
    BeforeValidator(lambda value: None if value == -1 else value),  # what some clients say for "any"
]
Stops = Annotated[
    Stop | Annotated[list[Stop], Field(max_length=16)] | None,
    BeforeValidator(lambda value: None if value in ("", []) else value),
]


class _Sent(RequestModel):
    """What frameworks send back or make of their own objects, with fields of their own."""

    model_config = ConfigDict(extra="ignore")


_NO_CONTENT = "Input should be text, or a list of text parts"


def _kind_of_content(content: Any) -> str | None:
    if content is None:
        return "none"
    if isinstance(content, str):
        return "str"
    return "list[TextPart]" if isinstance(content, (list, tuple)) else None


class TextPart(_Sent):
    """A part of text; a refusal, too, is text."""

    type: Literal["text", "refusal"]
    text: Content

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, part: Any) -> Any:
        """Say one sentence about an image, not one for each field of its that a text part lacks."""
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "refusal":
            return {"type": kind, "text": part.get("refusal")}
        if kind != "text":
            name = f"a part of type {kind!r:.40}" if isinstance(kind, str) else "a part without a type"
            raise ValueError(f"{name} cannot be answered: models of namespaces read text only")
        return part


class SentFunction(_Sent):
    name: ToolName
    arguments: Content | None = Field(None, description="JSON.")


class SentCall(_Sent):
    """A call of a tool, as the model made it."""

    id: CallId | None = None
    function: SentFunction


class ChatMessage(_Sent):
    """A message. An assistant's message may be sent back as received; one without content says nothing."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[
        Annotated[None, Tag("none")]
        | Annotated[Content, Tag("str")]
        | Annotated[list[TextPart], Field(max_length=256), Tag("list[TextPart]")],
        Discriminator(_kind_of_content, custom_error_type="content", custom_error_message=_NO_CONTENT),
    ] = None
    name: Annotated[Text, Field(max_length=256)] | None = None
    tool_calls: list[SentCall] | None = Field(None, max_length=_MAX_CALLS)
    tool_call_id: CallId | None = None
    function_call: SentFunction | None = Field(None, description="Older form of one tool call.")

    @property
    def text(self) -> str:
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "\n".join(part.text for part in self.content)


class StreamOptions(_Sent):
    include_usage: bool | None = False


class FunctionDefinition(_Sent):
    name: ToolName
    description: Content | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of an object.")
    strict: bool | None = None


def _function_only(tool: Any) -> Any:
    kind = tool.get("type", "function") if isinstance(tool, dict) else "function"
    if kind != "function":
        raise ValueError(
            f"a tool of type {kind!r:.40} is not served: models of namespaces call functions only"
        )
    return tool


class _FunctionTool(_Sent):
    type: Literal["function"] = "function"
    function: FunctionDefinition

    def as_sent(self) -> dict[str, Any]:
        """The tool as templates and SGLang read it."""
        return {"type": "function", "function": self.function.model_dump(exclude_none=True)}


FunctionTool = Annotated[_FunctionTool, BeforeValidator(_function_only)]


class _Named(_Sent):
    name: ToolName


class NamedChoice(_Sent):
    type: Literal["function"] = "function"
    function: _Named


def _choice(value: Any) -> Any:
    if value is None or (isinstance(value, str) and value in ("none", "auto", "required")):
        return value
    if isinstance(value, dict) and value.get("type") == "function" and "function" in value:
        return value
    raise ValueError(
        'Input should be "none", "auto", "required", or {"type": "function", "function": {"name": ...}}'
    )


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedChoice | None,
    BeforeValidator(_choice),
    Field(description="`auto` by default; `none` leaves the tools out."),
]


class TextFormat(_Sent):
    type: Literal["text"]


class JsonObjectFormat(_Sent):
    type: Literal["json_object"]


class NamedSchema(_Sent):
    name: Annotated[Text, Field(max_length=256)] | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="JSON schema of the answer.")


class JsonSchemaFormat(_Sent):
    type: Literal["json_schema"]
    json_schema: NamedSchema


def _kind_of_format(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"[{kind}]" if isinstance(kind, str) else None  # brackets: no part of the field's path


ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("[text]")]
    | Annotated[JsonObjectFormat, Tag("[json_object]")]
    | Annotated[JsonSchemaFormat, Tag("[json_schema]")],
    Discriminator(
        _kind_of_format,
        custom_error_type="format",
        custom_error_message="type should be text, json_object or json_schema",
    ),
]


def tools_of(tools: list[_FunctionTool]) -> tuple[dict[str, Any], ...]:
    """The tools as templates and SGLang read them. Raises ValueError for too much of them, or two of a
    name."""
    sent = tuple(tool.as_sent() for tool in tools)
    if (size := len(json.dumps(sent, ensure_ascii=False))) > MAX_TOOL_CHARS:
        raise ValueError(f"they have {size:,} characters together, and the limit is {MAX_TOOL_CHARS:,}")
    names = [tool.function.name for tool in tools]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"two are named {twice!r}")
    return sent
