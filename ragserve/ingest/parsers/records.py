"""JSON lines, and JSON arrays of objects: a paragraph per record, with a line per field."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from ragserve.ingest.parsers.base import Parsed, Raw, joined_notes, unreadable, without_controls
from ragserve.ingest.parsers.charset import decode

_BETWEEN = (" ", "\n", "\r", "\t", ",")
_MOST_NAMED = 20  # lines that a note names


Path = tuple[str, ...]


def parse(raw: Raw) -> Parsed:
    text, note = decode(raw.data, raw.charset)
    try:
        values, lost = _values(text)
        records = [_record(value) for value in values]
    except RecursionError as error:
        raise unreadable("corrupt", "not readable as JSON (nested too deeply)") from error
    body = without_controls("\n\n".join(filter(None, records)))
    return Parsed(body, "application/json", note=joined_notes(note, lost))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; of a name that stands twice, both values."""
    found: dict[str, Any] = {}
    twice = {name for name, n in Counter(name for name, _ in pairs).items() if n > 1}
    for name, value in pairs:
        if name in twice:
            found.setdefault(name, []).append(value)
        else:
            found[name] = value
    return found


# numbers stay as they were written: 1.10 and 1e400 are no floats
_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_float=str, parse_int=str, parse_constant=str)


def _values(text: str) -> tuple[list[Any], str]:
    """The values of a file, and a note about what could not be read. Raises ``UnsupportedDocument`` if
    nothing could."""
    text = text.strip()
    if text.startswith("["):
        try:
            return list(_DECODER.decode(text)), ""
        except ValueError as error:
            if "\n" not in text or not _is_json(text.split("\n", 1)[0]):
                return _cut_off(text, error)
    values, bad = [], []
    first: ValueError | None = None
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                values += _in_a_row(line)
            except ValueError as error:
                bad.append(number)
                first = first or error
    if first is not None and not any(isinstance(value, dict) for value in values):
        with suppress(ValueError):  # records over several lines
            return _in_a_row(text), ""
    if first is not None and not values:
        raise unreadable("corrupt", f"line {bad[0]} is not readable as JSON ({first})") from first
    named = ", ".join(map(str, bad[:_MOST_NAMED])) + (", ..." if len(bad) > _MOST_NAMED else "")
    return values, f"{len(bad):,} lines are not readable as JSON and left out: {named}" if bad else ""


def _in_a_row(text: str) -> list[Any]:
    """The values that follow each other in a text, commas between them or not. Raises ``ValueError``."""
    values, at = [], 0
    while at < len(text):
        if text[at] in _BETWEEN:
            at += 1
            continue
        value, at = _DECODER.raw_decode(text, at)
        values.append(value)
    return values


class _Uncounted(str):
    """A text whose lines `JSONDecodeError` does not count from its start, for each bad record anew."""

    def count(self, *_: object) -> int:
        return 0

    def rfind(self, *_: object) -> int:
        return 0


def _cut_off(text: str, error: ValueError) -> tuple[list[Any], str]:
    """The whole values of an array that is damaged or cut off. Behind a damaged one it goes on at the next
    line that begins as the records before it do."""
    values: list[Any] = []
    uncounted = _Uncounted(text)
    bad, at, begin, ended, seen = 0, 1, "", False, 0
    while at < len(text):
        while text[at : at + 1] in _BETWEEN and at < len(text):
            at += 1
        start, seen = text.rfind("\n", seen, at), at
        begin = begin or (text[start:at] + "{" if start >= 0 else "")
        try:
            value, at = _DECODER.raw_decode(uncounted, at)
            values.append(value)
        except ValueError:
            ended = text[at : at + 1] == "]"
            if ended or at >= len(text):
                break
            bad += 1
            at = text.find(begin, at) if begin else -1
            if at < 0:
                break
    if not values:
        raise unreadable("corrupt", f"not readable as JSON ({error})") from error
    if ended and not bad:  # a comma behind the last record
        return values, ""
    return values, f"{bad or 1:,} records are not readable as JSON and left out ({error})"


def _is_json(line: str) -> bool:
    try:
        _DECODER.decode(line.strip())
    except ValueError:
        return False
    return True


def _record(value: Any) -> str:
    fields = [(path, text) for path, text in _fields(value, ()) if text]
    names = Counter(".".join(path) for path, _ in fields)
    return "\n".join(f"{_name(path, names)}: {text}" if path else text for path, text in fields)


def _name(path: Path, names: Counter[str]) -> str:
    """``address.city`` for a field of a field; ``"address.city"`` for one that is named so beside it."""
    name = ".".join(path)
    if names[name] > 1:
        return ".".join(f'"{part}"' if "." in part else part for part in path)
    return name


def _fields(value: Any, path: Path) -> Iterator[tuple[Path, str]]:
    """Yield the places and texts of a value's scalars."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _fields(part, (*path, key))
    elif isinstance(value, list) and any(isinstance(part, dict | list) for part in value):
        for number, part in enumerate(value, 1):
            yield from _fields(part, (*path, str(number)))
    elif isinstance(value, list):
        yield path, ", ".join(map(_text, value))
    else:
        yield path, _text(value)


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value)
