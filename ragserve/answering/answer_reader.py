"""Turn the text that the engine generates into the pieces of an answer: text, and calls of tools."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ragserve.answering.citations import Marker, MarkerFilter
from ragserve.engine.tool_calls import CallReader, ToolCall

_JSON_PART = re.compile(r'"((?:[^"\\]|\\.)*+)("?)(\s*+:)?|[\[\]{},:]', re.DOTALL)
_ESCAPE = re.compile(r"\\u[0-9a-fA-F]{4}|\\.", re.DOTALL)
_MARKER = re.compile(r"\[([0-9]{1,3})\]")


@dataclass(frozen=True, slots=True)
class MessageDelta:
    """A piece of the answer, without invalid markers. ``by_model``: false if the model was not asked."""

    text: str
    by_model: bool = True


class AnswerReader:
    """Reads one answer over ``n_passages``.

    Args:
        as_json: The answer is JSON, of which nothing is taken away.
        calls: Splits off calls of tools; None without tools.
    """

    def __init__(self, n_passages: int, *, as_json: bool = False, calls: CallReader | None = None) -> None:
        self._n_passages = n_passages
        self._filter = None if as_json else MarkerFilter(n_passages)
        self._calls = calls
        self._pieces: list[str] = []
        self._made: list[ToolCall] = []

    def feed(self, text: str) -> Iterator[MessageDelta | ToolCall]:
        """Yield what is certain after ``text``."""
        yield from self._read([text] if self._calls is None else self._calls.feed(text))

    def end(self) -> Iterator[MessageDelta | ToolCall]:
        """Yield what is left at the end."""
        if self._calls is not None:
            yield from self._read(self._calls.end())
        if self._filter is not None:
            yield from self._message(self._filter.end())

    def _read(self, parts: Iterable[str | ToolCall]) -> Iterator[MessageDelta | ToolCall]:
        for part in parts:
            if isinstance(part, str):
                yield from self._message(
                    self._trimmed(part) if self._filter is None else self._filter.feed(part)
                )
                continue
            self._made.append(part)
            yield part

    def _trimmed(self, text: str) -> str:
        return text if self._pieces else text.lstrip()

    def _message(self, text: str) -> Iterator[MessageDelta]:
        if text:
            self._pieces.append(text)
            yield MessageDelta(text)

    @property
    def answer(self) -> str:
        return "".join(self._pieces)

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        return tuple(self._made)

    @property
    def spoken(self) -> str:
        """The answer with what of JSON is no value as line ends, so that each value is a sentence in its
        place."""
        return self.answer if self._filter is not None else spoken_json(self.answer)

    @property
    def markers(self) -> list[Marker]:
        """Places of the markers in `answer`, those in texts of JSON too."""
        if self._filter is not None:
            return self._filter.markers
        found = ((int(each[1]), each) for each in _MARKER.finditer(self.spoken))
        return [Marker(index, *each.span()) for index, each in found if 1 <= index <= self._n_passages]


def spoken_json(text: str) -> str:
    """The values of a JSON text, each in its place, and line ends in place of all other characters."""

    def blank(part: re.Match[str]) -> str:
        value, end, name = part.groups()
        if value is None or name is not None:
            return "\n" * len(part[0])
        return "\n" + _ESCAPE.sub(lambda escape: " " * len(escape[0]), value) + "\n" * len(end)

    return _JSON_PART.sub(blank, text)
