"""Calls of tools that a model writes in a code fence, or bare, in place of the marks of its template.

Qwen2.5-Coder is asked for ``<tool_call>{...}</tool_call>`` and mostly writes the same JSON in a fence.
SGLang's parsers read the marks alone."""

from __future__ import annotations

import json
import re
from collections.abc import Collection

_BEGIN = re.compile(
    r'\A\s*+(?P<fence>```(?:json|tool_call)?+\s*+)?+(?P<call>\{)\s*+"name"\s*+:\s*+"(?P<name>[^"\\]*+)"'
    r'\s*+,\s*+"arguments"\s*+:\s*+\{'
)
_INFO = ("json", "tool_call")
_LONGEST_BEGIN = 400  # characters, of which a name has 128


class FencedCalls:
    """Puts the template's marks around such calls. Only those count with which an answer begins, or which
    follow another one, and which name a tool of the request.

    Args:
        names: Of the tools.
        begin: The mark before a call.
        end: The mark behind it.
        most: Characters of a call; what is longer stays text.
    """

    def __init__(self, names: Collection[str], *, begin: str, end: str, most: int) -> None:
        self._most = most
        self._names, self._begin_mark, self._end_mark = names, begin, end
        self._held = ""
        self._is_open = True  # a call may begin here
        self._fenced = False  # by a fence that is not closed yet
        self._start = -1  # of the call in what is held
        self._at = self._depth = 0  # characters and braces that were read of it
        self._in_text = self._escaped = False

    def feed(self, text: str) -> str:
        """Return what is certain after ``text``."""
        if not self._is_open:
            return text
        self._held += text
        given = ""
        while self._is_open:
            if self._start < 0 and not self._begins():
                break
            if self._start >= 0:
                call = self._call()
                if call is None:
                    break
                given += call
        return given if self._is_open else given + self.end()

    def end(self) -> str:
        """Return what is left."""
        held, self._held, self._is_open = self._held, "", False
        return "" if self._fenced and held.strip() in ("", "```") else held

    def _begins(self) -> bool:
        """Find where a call begins; close if none can."""
        if self._fenced and self._held.lstrip().startswith("```"):
            self._held, self._fenced = self._held.lstrip()[3:], False
        found = _BEGIN.match(self._held)
        if found is None:
            self._is_open = len(self._held) <= _LONGEST_BEGIN and _may_begin(self._held)
            return False
        if found["name"] not in self._names:
            self._is_open = False
            return False
        self._fenced = self._fenced or found["fence"] is not None
        self._start = self._at = found.start("call")
        self._depth = 0
        return True

    def _call(self) -> str | None:
        """The call between marks; None while it is not complete. Reads each character once."""
        held = self._held
        for place in range(self._at, len(held)):
            character = held[place]
            if self._in_text:
                self._in_text = self._escaped or character != '"'
                self._escaped = character == "\\" and not self._escaped
            elif character == '"':
                self._in_text = True
            elif character in "{}":
                self._depth += 1 if character == "{" else -1
                if not self._depth:
                    return self._complete(place + 1)
        self._at = len(held)
        self._is_open = len(held) <= self._most
        return None

    def _complete(self, end: int) -> str | None:
        call = self._held[self._start : end]
        try:
            json.loads(call)
        except (ValueError, RecursionError):
            self._is_open = False
            return None
        self._held, self._start = self._held[end:], -1
        return f"{self._begin_mark}\n{call}\n{self._end_mark}"


def _may_begin(text: str) -> bool:
    """Whether a call may begin with what is only the beginning of a text."""
    text = text.lstrip()
    if text.startswith("```"):
        info, brace, rest = text[3:].partition("{")
        if not brace:
            return any(each.startswith(info.strip()) for each in _INFO)
        return info.strip() in ("", *_INFO) and '"name"'.startswith(rest.lstrip()[:6])
    if text.startswith("{"):
        return '"name"'.startswith(text[1:].lstrip()[:6])
    return "```".startswith(text)
