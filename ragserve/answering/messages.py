"""Messages of a dialogue, with the calls of tools and their results, as chat templates read them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ragserve.engine.tool_calls import ToolCall

_PRIVATE = "[\ue000\ue001]"


def mark(name: str) -> str:
    """Stands for a text while a template is rendered."""
    return f"\ue000{name}\ue001"


@dataclass(frozen=True, slots=True)
class Message:
    """An earlier message of a dialogue. One with role ``tool`` is the result of the call ``call_id`` of the
    tool ``name``."""

    role: Literal["user", "assistant", "system", "tool"]
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    name: str = ""

    @property
    def chars(self) -> int:
        """Characters that a template may write."""
        calls = sum(len(call.name) + len(call.arguments) for call in self.tool_calls)
        return len(self.content) + len(self.name) + calls


class HiddenText:
    """Takes out of values what must not be rendered as it is: texts of special tokens, which would count as
    such, and the characters of marks. ``contents``: what stands behind each mark."""

    def __init__(self, special_tokens: re.Pattern[str] | None, name: str = "turn") -> None:
        """``name``: of the marks."""
        self._name = name
        special = f"{special_tokens.pattern}|{_PRIVATE}" if special_tokens else _PRIVATE
        self._special = re.compile(special)
        self.contents: dict[str, str] = {}

    def of(self, value: Any) -> Any:
        """The same value with marks in its texts and names."""
        match value:
            case str():
                return self._special.sub(lambda found: self.put(found[0]), value)
            case Mapping():
                return {self.of(name): self.of(inner) for name, inner in value.items()}
            case list() | tuple():
                return [self.of(inner) for inner in value]
        return value

    def put(self, text: str) -> str:
        """A mark that stands for a text."""
        name = f"{self._name}{len(self.contents)}"
        self.contents[name] = text
        return mark(name)

    def message(self, message: Message) -> dict[str, Any]:
        """A message as OpenAI's API has it; the arguments of its calls are objects where they can be read."""
        sent: dict[str, Any] = {"role": message.role, "content": self.put(message.content)}
        if message.tool_calls:
            if not message.content:  # templates ask whether there is some
                sent["content"] = ""
            sent["tool_calls"] = [
                {
                    "id": self.of(call.id),
                    "type": "function",
                    "function": {"name": self.of(call.name), "arguments": self.of(_object(call.arguments))},
                }
                for call in message.tool_calls
            ]
        if message.role == "tool":
            sent |= {"tool_call_id": self.of(message.call_id), "name": self.of(message.name)}
        return sent


def _object(arguments: str) -> Any:
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def spoken(messages: Sequence[Message]) -> list[Message]:
    """The messages without calls of tools and their results."""
    return [message for message in messages if message.role != "tool" and message.content]


def without_tool_turns(
    history: Sequence[Message], question: str, turns: Sequence[Message]
) -> tuple[list[Message], str]:
    """History and question for a template that knows no tools: results stand behind the question that they
    are for, as text, and calls are left out."""
    *earlier, asked = _as_text([*history, Message("user", question), *turns])
    return earlier, asked.content


def _as_text(messages: Sequence[Message]) -> list[Message]:
    said: list[Message] = []
    for message in messages:
        if message.role == "tool":
            text = f"{message.name or 'A tool'} returned: {message.content}"
            at = next((i for i in range(len(said) - 1, -1, -1) if said[i].role == "user"), None)
            if at is None:
                said.append(Message("user", text))
            else:
                said[at] = replace(said[at], content=f"{said[at].content}\n\n{text}")
        elif message.content:
            said.append(replace(message, tool_calls=()))
    return said
