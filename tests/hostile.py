"""Hostile requests: each field and parameter of each route that a key without admin may call, with values
that parsers, expressions, compilers and stores like least. Routes and fields are the app's own tables, so a
new one is among them."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from ragserve.api.access import NEEDS
from ragserve.api.engine_bodies import FIELDS, REFUSED
from ragserve.api.upstream import SERVED
from sglang_ext.sglang_internals import request_checks
from tests.integration.route_fuzz import BODIES

CLOSED = ("inspect", "operate")
_PLACE = "\N{OBJECT REPLACEMENT CHARACTER}here"


def _text(value: str) -> bytes:
    return json.dumps(value).encode()


HEAVY: dict[str, bytes] = {
    "nested lists": b"[" * 100_000 + b"]" * 100_000,
    "nested objects": b'{"a":' * 100_000 + b"0" + b"}" * 100_000,
    "not closed": b"[" * 500_000,
    "a MiB": _text("x" * 2**20),
    "a MiB of words": _text("why " * 2**18),
    "a MiB of numbers": _text("1 " * 2**19),
    "a MiB of blanks": _text("x" + " " * 2**20 + "x"),
    "quotes": _text("\N{LEFT-POINTING DOUBLE ANGLE QUOTATION MARK}" * 2**17),
    "brackets": _text("[1](" * 2**16),
    "comments": _text("<!--" * 2**16),
    "accents": _text("e" + "\N{COMBINING ACUTE ACCENT}" * 2**17),
    "many keys": b"{%s}" % b",".join(b'"k%d":0' % i for i in range(50_000)),
    "a long key": b'{"%s": 0}' % (b"k" * 2**20),
    "many items": b"[%s]" % b",".join([b"0"] * 200_000),
    "many texts": b"[%s]" % b",".join([b'"x"'] * 100_000),
    "many objects": b"[%s]" % b",".join([b"{}"] * 50_000),
}
LIGHT: dict[str, bytes] = {
    "150 levels": b"[" * 150 + b"]" * 150,
    "90 levels of objects": b'{"a":' * 90 + b"0" + b"}" * 90,
    "5,000 digits": b"9" * 5_000,
    "300 digits": b"9" * 300,
    "below int64": b"-9223372036854775809",
    "a large exponent": b"1e400",
    "a large number": b"1e308",
    "a tiny number": b"5e-324",
    "NaN": b"NaN",
    "infinity": b"-Infinity",
    "minus zero": b"-0.0",
    "NUL": b'"a\\u0000b"',
    "a lone surrogate": b'"\\ud800"',
    "a surrogate in a key": b'{"\\udfff": 1}',
    "NUL in a key": b'{"\\u0000": 1}',
    "no UTF-8": b'"\xff\xfe"',
    "an overlong NUL": b'"\xc0\x80"',
    "one key twice": b'{"a": 1, "a": 2}',
    "a key without name": b'{"": ""}',
    "null": b"null",
    "true": b"true",
    "zero": b"0",
    "minus one": b"-1",
    "half": b"0.5",
    "an empty text": b'""',
    "a blank": b'" "',
    "an empty list": b"[]",
    "an empty object": b"{}",
    "a list of lists": b"[[[]], [null], [{}]]",
    "a list of kinds": b'[1, "a", null, true, {"a": []}]',
    "an object of kinds": b'{"a": {"b": [1, {"c": null}]}, "type": 5}',
    "a path": b'"../../../etc/passwd"',
    "a template": b"\"{{ cycler.__init__.__globals__ }}{% for a in range(99999) %}{% endfor %}\"",
    "a statement": b"\"x'; DROP TABLE documents; --\"",
    "an expression": b'"(a+)+$"',
    "a direction": _text("\N{RIGHT-TO-LEFT OVERRIDE}abc\N{ZERO WIDTH SPACE}\r\nX: y"),
    "an address": b'"http://127.0.0.1:1/x"',
}  # fmt: skip
VALUES = LIGHT | HEAVY
_WORDS: dict[str, str] = {
    "NUL": "%00",
    "no UTF-8": "%ff%fe",
    "a surrogate": "%ed%a0%80",
    "a path": "..%2f..%2fetc%2fpasswd",
    "dots": "..",
    "a newline": "a%0d%0ab",
    "long": "x" * 8_000,
    "digits": "9" * 5_000,
    "nested": quote("[" * 3_000),
    "objects": quote('{"op":"not","filter":' * 200),
    "percent": "%25%25%",
    "a slash": "a%2fb",
    "nothing": "",
    "negative": "-1",
    "NaN": "nan",
    "a statement": quote("'; DROP TABLE jobs; --"),
    "accents": quote("e" + "\N{COMBINING ACUTE ACCENT}" * 500),
    "full width": quote("\N{FULLWIDTH DIGIT ONE}\N{SUPERSCRIPT TWO}"),
}


@dataclass(frozen=True)
class Target:
    """A route: valid bodies that values are put into, and the names of its fields and parameters."""

    method: str
    path: str
    bodies: tuple[dict[str, Any], ...] = ()
    fields: tuple[str, ...] = ()
    query: tuple[str, ...] = ()
    is_ours: bool = True

    @property
    def name(self) -> str:
        return f"{self.method} {self.path}"


@dataclass(frozen=True)
class Hostile:
    """A request. ``what``: the value and its place, for messages. ``template``: its body, in which ``value``
    of `VALUES`, if any, has a place."""

    method: str
    url: str
    what: str
    template: bytes | None = None
    value: str = ""
    type: str = "application/json"

    @property
    def content(self) -> bytes | None:
        """The body."""
        if self.template is None or not self.value:
            return self.template
        return self.template.replace(_text(_PLACE), VALUES[self.value], 1)


def targets(description: dict[str, Any], space: str) -> list[Target]:
    """All routes that a key without admin may call, of ``description``, the app's OpenAPI document, and of
    the tables of those that it does not describe. ``space``: namespace of the bodies."""
    open_ = {name for name, need in NEEDS.items() if need not in CLOSED}
    found = {}
    for path, operations in description["paths"].items():
        for method, operation in operations.items():
            if (name := f"{method.upper()} {path}") in open_:
                found[name] = _described(method.upper(), path, operation, description, space)
    served = {f"POST {path}" for path, need in SERVED.items() if need not in CLOSED and path in BODIES}
    served |= {f"GET {path}" for path, need in SERVED.items() if need not in CLOSED and path not in BODIES}
    for name in sorted((open_ | served) - found.keys()):
        method, _, path = name.partition(" ")
        fields = FIELDS.get(path, frozenset())
        if path == "/generate":
            fields = request_checks.SERVED | request_checks.REFUSED
        bodies = tuple(BODIES.get(path, ())) if method == "POST" else ()
        names = tuple(sorted(fields | REFUSED)) if bodies else ()
        found[name] = Target(method, path.replace(":path", ""), bodies, names, is_ours=path not in SERVED)
    return list(found.values())


def _described(
    method: str, path: str, operation: dict[str, Any], description: dict[str, Any], space: str
) -> Target:
    json_body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    bodies = [example["value"] for example in json_body.get("examples", {}).values()]
    fields: dict[str, None] = {}
    schemas = [json_body.get("schema", {})]
    while schemas:
        schema = schemas.pop()
        if "$ref" in schema:
            schemas.append(description["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]])
        schemas += schema.get("oneOf", []) + schema.get("anyOf", [])
        fields |= dict.fromkeys(schema.get("properties", {}))
    if json_body and not bodies:
        bodies = [dict.fromkeys(fields)]
    own = {"namespace": space, "model": f"ragserve/{space}"}
    bodies = [body | {name: own[name] for name in own.keys() & fields.keys()} for body in bodies]
    names = [one["name"] for one in operation.get("parameters", []) if one["in"] == "query"]
    return Target(method, path.replace(":path", ""), tuple(bodies), tuple(fields), tuple(names))


def requests(target: Target) -> Iterator[Hostile]:
    """All hostile requests to a route."""
    path = target.path
    for name, word in _WORDS.items():
        if "{" in path:
            start, end = path.index("{"), path.rindex("}") + 1
            yield Hostile(target.method, path[:start] + word + path[end:], f"{name} in the path")
        for parameter in target.query:
            yield Hostile(target.method, f"{plain(path)}?{parameter}={word}", f"{name} as {parameter}")
    yield Hostile(target.method, f"{plain(path)}?{'a=1&' * 2_000}", "many parameters")
    yield Hostile("PATCH", plain(path), "another method", b"{}")
    if target.method not in ("POST", "PUT"):
        return
    url, whole = plain(path), _text(_PLACE)
    for value in VALUES:
        yield Hostile(target.method, url, f"{value} as the body", whole, value)
    for name, body in _places(target):
        for value in VALUES:
            yield Hostile(target.method, url, f"{value} as {name}", body, value)
    for kind in ("text/plain", "application/json; charset=utf-16", "multipart/form-data; boundary=x", ";;="):
        yield Hostile(target.method, url, f"type {kind}", b"{}", type=kind)


def plain(path: str) -> str:
    """The path with something in place of its parameter."""
    return path if "{" not in path else path[: path.index("{")] + "none" + path[path.rindex("}") + 1 :]


def _places(target: Target) -> Iterator[tuple[str, bytes]]:
    """A body for each place where a value may be put, with `_PLACE` there."""
    seen = set()
    for body in target.bodies:
        for place in _within(body):
            if place not in seen:
                seen.add(place)
                yield ".".join(map(str, place)), json.dumps(_put(body, place)).encode()
    first = target.bodies[0] if target.bodies else {}
    for name in target.fields:
        if (name,) not in seen:
            yield name, json.dumps(first | {name: _PLACE}).encode()
    if any("sampling_params" in body for body in target.bodies):
        for name in sorted(request_checks.SAMPLING | {"unknown"}):
            sampling = {"max_new_tokens": 2, name: _PLACE}
            yield f"sampling_params.{name}", json.dumps(first | {"sampling_params": sampling}).encode()


def _within(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    if path:
        yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield from _within(one, (*path, key))


def _put(body: Any, place: tuple[str | int, ...]) -> Any:
    body = copy.deepcopy(body)
    inner = body
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = _PLACE
    return body


SCHEMAS: tuple[Any, ...] = (
    "",
    "{",
    "[" * 5_000,
    "null",
    "5",
    '"a"',
    {"type": "banana"},
    {"type": ["string", 7]},
    {"type": 5},
    {"enum": []},
    {"enum": "a"},
    {"enum": list(range(20_000))},
    {"const": "x" * 100_000},
    {"$ref": "#"},
    {"$ref": "#/$defs/a"},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    {"$ref": "https://example.com/x.json"},
    {"type": "string", "pattern": "(a+)+$"},
    {"type": "string", "maxLength": 10**6},
    {"type": "string", "minLength": 5, "maxLength": 2},
    {"type": "string", "format": "banana"},
    {"type": "string", "format": "date-time"},
    {"type": "array", "items": 5},
    {"type": "array", "items": {"type": "array", "items": {"type": "array"}}, "minItems": 10**9},
    {"type": "array", "minItems": -1},
    {"type": "array", "prefixItems": [{}] * 5_000},
    {"type": "object", "properties": 5},
    {"type": "object", "properties": {"a": 5}},
    {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(3_000)}},
    {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(200)}},
    {"type": "object", "properties": {}, "required": ["a"] * 500, "additionalProperties": False},
    {"type": "object", "required": 5},
    {"type": "object", "patternProperties": {"(a+)+": {}}},
    {"type": "object", "minProperties": 10**9},
    {"type": "integer", "minimum": 10**30, "maximum": -(10**30)},
    {"type": "integer", "minimum": -(10**18), "maximum": 10**18},
    {"type": "number", "multipleOf": 0},
    {"anyOf": []},
    {"anyOf": [{"type": "string"}] * 2_000},
    {"allOf": [{"type": "string"}, {"type": "integer"}]},
    {"oneOf": [{"type": "object", "properties": {f"a{i}": {}}} for i in range(300)]},
    {"not": {}},
    {"if": {"type": "string"}, "then": {"maxLength": 3}, "else": {}},
    {"type": "object", "properties": {"a\0b": {}}},
    {"type": "object", "properties": {"\ud800": {}}},
    {"definitions": {"a": {"anyOf": [{"$ref": "#/definitions/a"}] * 50}}, "$ref": "#/definitions/a"},
)
"""JSON schemas that are broken, endless or huge."""
