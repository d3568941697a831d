"""What grammars may cost. They are compiled in threads of the scheduler's process, and xgrammar fills their
masks on the scheduler's own thread, for the requests of everybody.

An ambiguous regular expression or EBNF of 500 characters takes seconds for each token, one of 74 KB
gigabytes. Neither a length nor a trial of some tokens bounds that, so they are refused unless the server's
operator opens them. JSON schemas have no such trouble but for their ``pattern``: each limit here was measured
with a vocabulary of 64,000 to keep a schema below some seconds of one core to compile and 50 ms for a token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

MAX_CHARS = 2**17
MAX_DEPTH = 100
MAX_SCHEMA_CHARS = 2**15  # without texts for people
MAX_LENGTHS = 512  # characters of all minLength and maxLength: 40 ms each
MAX_COUNTED = 2048  # properties x how many of them there may be

ANY_JSON = "$$ANY$$"  # SGLang's name for all of JSON
NAMES = ("json_schema", "regex", "ebnf", "structural_tag")

_CONTROL = re.compile(r"[\0-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")
_FOR_PEOPLE = frozenset({"$comment", "$id", "$schema", "default", "description", "examples", "title"})
_VALUES = frozenset({"const", "enum"})
_SKIPPED = _FOR_PEOPLE | _VALUES
_REF = re.compile(r"#(/[^/~%]+)*")
_NAMED = frozenset({"$defs", "definitions", "dependentSchemas", "properties"})
_EXPRESSIONS = ("pattern", "patternProperties")
_OPENED = "unless the server runs with --grammars all: some expressions stop it for everybody"


def check_grammar(name: str, text: Any, *, every: bool) -> None:
    """Check a grammar of a request; ``every``: expressions are open. A structural tag must be one that SGLang
    has made of tools, see `check_tags`. Raises ValueError.
    """
    if not isinstance(text, str):
        raise ValueError(f"{name} must be a string")
    if len(text) > MAX_CHARS:
        raise ValueError(f"{name} has {len(text)} characters, more than {MAX_CHARS}")
    if bad := _CONTROL.search(text):
        raise ValueError(f"{name} has the control character {bad[0]!r}; write it as an escape")
    depth = deepest = 0
    # Brackets inside of strings count too: a bound needs no parser.
    for bracket in re.findall(r"[\[\](){}]", text):
        depth += 1 if bracket in "[({" else -1
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH:
        raise ValueError(f"{name} is nested {deepest} levels deep, more than {MAX_DEPTH}")
    if name in ("regex", "ebnf"):
        if not every:
            raise ValueError(f"{name} is not served here, {_OPENED}; use json_schema")
        return
    if text == ANY_JSON:
        return
    try:
        value = json.loads(text, object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        raise ValueError(f"{name} is not JSON: {error}") from None
    if not every:
        _check_schema(name, list(_schemas_of_tags(value)) if name == "structural_tag" else value)


def check_tags(params: dict[str, Any], *, every: bool) -> None:
    """Refuse a structural tag of a client's own, unless ``every`` grammar is open: it may have expressions.
    Raises ValueError."""
    if params.get("structural_tag") is not None and not every:
        raise ValueError(f"structural_tag is not served here, {_OPENED}; use json_schema, or tools in chats")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Of two members of one name the compiler may take the other one."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a JSON schema has an object with two members of one name")
    return found


def _schemas_of_tags(value: Any) -> Iterator[Any]:
    """The JSON schemas of a structural tag."""
    values = [value]
    while values:
        match values.pop():
            case dict() as one:
                for name, inner in one.items():
                    if name in ("json_schema", "schema"):
                        yield inner
                    else:
                        values.append(inner)
            case list() as many:
                values += many


def _check_schema(name: str, schema: Any) -> None:
    chars = lengths = 0
    # (a schema or list of them; or of names with schemas)
    values: list[tuple[Any, bool]] = [(schema, False)]
    while values:
        value, named = values.pop()
        if isinstance(value, list):
            values += [(one, False) for one in value]
            chars += len(value)
            continue
        if not isinstance(value, dict):
            chars += len(value) if isinstance(value, str) else 4
            continue
        if not named:
            lengths += _check_limits(name, value)
        for key, inner in value.items():
            if not named and key in _FOR_PEOPLE:
                continue
            chars += len(key) + 4
            if not named and key in _VALUES:
                chars += len(json.dumps(inner))
            else:
                values.append((inner, not named and key in _NAMED))
    if chars > MAX_SCHEMA_CHARS:
        raise ValueError(
            f"{name} has {chars} characters without descriptions, more than {MAX_SCHEMA_CHARS}: have fewer "
            "properties or values"
        )
    if lengths > MAX_LENGTHS:
        raise ValueError(f"{name}: all minLength and maxLength make {lengths}, more than {MAX_LENGTHS}")


def _check_limits(name: str, schema: dict[str, Any]) -> int:
    """Check one level of a schema; return the characters of its minLength and maxLength."""
    for expression in _EXPRESSIONS:
        if expression in schema:
            raise ValueError(f"{name}: {expression} is not served here, {_OPENED}")
    target = schema.get("$ref", "#")
    if not isinstance(target, str) or not _REF.fullmatch(target) or _SKIPPED & set(target.split("/")):
        raise ValueError(f"{name}: $ref {target!r:.80} must name a schema of its own, such as #/$defs/item")
    counted = max(_count(name, schema, "minProperties"), _count(name, schema, "maxProperties"))
    properties = schema.get("properties")
    if isinstance(properties, dict) and len(properties) * counted > MAX_COUNTED:
        raise ValueError(
            f"{name}: minProperties or maxProperties {counted} of {len(properties)} properties is more than "
            f"{MAX_COUNTED} states"
        )
    return max(_count(name, schema, "minLength"), _count(name, schema, "maxLength"))


def _count(name: str, schema: dict[str, Any], key: str) -> int:
    value = schema.get(key, 0)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 2**31:
        raise ValueError(f"{name}: {key} must be a number of at least 0")
    return int(value)
