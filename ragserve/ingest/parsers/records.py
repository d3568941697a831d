"""JSON lines, and JSON arrays of objects: a paragraph per record, with a line per field."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from ragserve.ingest.parsers.base import Parsed, Raw, unreadable, without_controls
from ragserve.ingest.parsers.charset import decode


def parse(raw: Raw) -> Parsed:
    text, note = decode(raw.data, raw.charset)
    try:
        records = [_record(value) for value in _values(text)]
    except RecursionError as error:
        raise unreadable("corrupt", "not readable as JSON (nested too deeply)") from error
    return Parsed(without_controls("\n\n".join(filter(None, records))), "application/json", note=note)


def _values(text: str) -> Iterator[Any]:
    if text.lstrip().startswith("["):
        try:
            yield from json.loads(text)
            return
        except ValueError as error:
            if "\n" not in text.strip() or not _is_json(text.strip().split("\n", 1)[0]):
                raise unreadable("corrupt", f"not readable as JSON ({error})") from error
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield json.loads(line)
            except ValueError as error:
                raise unreadable("corrupt", f"line {number} is not readable as JSON ({error})") from error


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _record(value: Any) -> str:
    return "\n".join(f"{name}: {text}" if name else text for name, text in _fields(value, "") if text)


def _fields(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """Yield the names and texts of a value's scalars; ``address.city`` is a field of a field."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _fields(part, f"{name}.{key}" if name else key)
    elif isinstance(value, list) and any(isinstance(part, dict | list) for part in value):
        for number, part in enumerate(value, 1):
            yield from _fields(part, f"{name}.{number}" if name else str(number))
    elif isinstance(value, list):
        yield name, ", ".join(map(_text, value))
    else:
        yield name, _text(value)


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value)
