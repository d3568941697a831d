"""Grammars whose masks or compilation would stop the engine for everybody are refused; usual schemas pass."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from ragserve.api.engine_bodies import served_body
from ragserve.errors import InvalidRequest
from sglang_ext.sglang_internals import request_checks
from sglang_ext.sglang_internals.grammar_checks import (
    MAX_LENGTHS,
    MAX_SCHEMA_CHARS,
    check_grammar,
    check_tags,
)

STRING = {"type": "string"}


def ambiguous(depth: int) -> str:
    return "[a-z]?" if depth == 0 else f"({ambiguous(depth - 1) * 2})?"


def tag(content: Any) -> dict[str, Any]:
    tags = [{"begin": "<f>", "content": content, "end": "</f>"}]
    return {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<f>"], "tags": tags}}


HOSTILE: dict[str, Any] = {
    "a pattern": {"type": "string", "pattern": ambiguous(6)},
    "one far below": {"anyOf": [{"items": {"properties": {"a": {"type": "string", "pattern": "a"}}}}]},
    "of a property that is called properties": {"properties": {"properties": {"pattern": "a"}}},
    "of names": {"propertyNames": {"pattern": "a"}},
    "patterns of names": {"patternProperties": {ambiguous(4): STRING}},
    "behind a reference to a default": {"$ref": "#/default", "default": {"pattern": "a"}},
    "behind an escaped one": {"$ref": "#/%64efault", "default": {"pattern": "a"}},
    "behind one to a value": {"$ref": "#/enum/0", "enum": [{"pattern": "a"}]},
    "elsewhere": {"$ref": "https://example.com/schema.json"},
    "a reference that is none": {"$ref": 5},
    "a long text": {"type": "string", "maxLength": 10**6},
    "at least so long": {"type": "string", "minLength": MAX_LENGTHS + 1},
    "many short ones": {"properties": {f"p{i}": {"type": "string", "maxLength": 50} for i in range(20)}},
    "lengths of names": {"propertyNames": {"maxLength": 1000}},
    "a length that is none": {"type": "string", "maxLength": "1"},
    "an endless length": {"type": "string", "maxLength": float("inf")},
    "some of many": {"properties": {f"p{i}": STRING for i in range(100)}, "maxProperties": 60},
    "values": {"enum": [f"value{i}" for i in range(10_000)]},
    "a long value": {"const": "a" * 100_000},
    "properties": {"properties": {f"property{i}": STRING for i in range(2_000)}},
    "alternatives": {"anyOf": [{"properties": {f"a{i}": STRING}} for i in range(2_000)]},
    "depth": json.loads('{"items":' * 101 + "{}" + "}" * 101),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_schema_that_is_slow_to_compile_or_to_mask_is_refused(name: str) -> None:
    text = json.dumps(HOSTILE[name])
    with pytest.raises(ValueError, match="json_schema"):
        check_grammar("json_schema", text, every=False)
    in_tag = json.dumps(tag({"type": "json_schema", "json_schema": HOSTILE[name]}))
    with pytest.raises(ValueError, match="structural_tag"):
        check_grammar("structural_tag", in_tag, every=False)


def test_members_that_hide_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="two members of one name"):
        check_grammar("json_schema", '{"properties": {"a": {"pattern": "a"}}, "properties": {}}', every=False)


@pytest.mark.parametrize(
    "schema",
    [
        {},
        True,
        {"type": "array", "items": STRING, "minItems": 10**6, "maxItems": 10**7},  # cheap: measured
        {"type": "number", "minimum": -1.5, "maximum": 1e9},
        {"properties": {"pattern": STRING, "enum": STRING, "title": {"type": "string", "maxLength": 200}}},
        {"properties": {"at": {"type": "string", "format": "date-time"}}, "additionalProperties": False},
        {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#"}, STRING]}}},
        {"properties": {"a": STRING, "b": {"$ref": "#/properties/a"}}, "required": ["a"]},
        {"enum": [f"value{i}" for i in range(1000)]},
        {"description": "x" * 2 * MAX_SCHEMA_CHARS, "properties": {"a": {"title": "A", "examples": ["x"]}}},
        {"properties": {f"p{i}": STRING for i in range(300)}, "required": [f"p{i}" for i in range(300)]},
    ],
    ids=lambda schema: str(schema)[:40],
)
def test_usual_schemas_pass(schema: Any) -> None:
    check_grammar("json_schema", json.dumps(schema), every=False)
    check_grammar(
        "structural_tag", json.dumps(tag({"type": "json_schema", "json_schema": schema})), every=False
    )
    legacy = {"structures": [{"begin": "<f>", "schema": schema, "end": "</f>"}], "triggers": ["<f"]}
    check_grammar("structural_tag", json.dumps(legacy), every=False)


def test_an_operator_opens_expressions() -> None:
    for name, text in (("regex", "[a-z]+"), ("ebnf", 'root ::= "a"')):
        with pytest.raises(ValueError, match=f"{name} is not served here, unless .* --grammars all"):
            check_grammar(name, text, every=False)
        check_grammar(name, text, every=True)
    check_grammar("json_schema", json.dumps(HOSTILE["a pattern"]), every=True)
    with pytest.raises(ValueError, match="nested"):
        check_grammar("json_schema", json.dumps(HOSTILE["depth"]), every=True)


def test_tags_are_those_that_chats_make_of_tools() -> None:
    """SGLang's parsers of tools use expressions of their own; a client's are refused where it sends them."""
    own = {"structural_tag": json.dumps(tag({"type": "regex", "pattern": ambiguous(6)}))}
    with pytest.raises(ValueError, match="structural_tag is not served here"):
        check_tags(own, every=False)
    check_tags(own, every=True)
    check_tags({}, every=False)
    check_grammar("structural_tag", own["structural_tag"], every=False)
    body = {"messages": [], "response_format": tag({"type": "regex", "pattern": "a"})}
    with pytest.raises(InvalidRequest, match="structural_tag is not served"):
        served_body("/v1/chat/completions", body)
    assert served_body("/v1/chat/completions", body, every_grammar=True) is body


@pytest.mark.parametrize(
    ("path", "every", "refused"),
    [
        ("/generate", False, True),
        ("/vertex_generate", False, True),
        ("/v1/chat/completions", False, False),
        ("/generate", True, False),
    ],
)
def test_a_tag_is_judged_by_the_route_that_it_came_by(path: str, every: bool, refused: bool) -> None:
    class Manager:
        context_len = 512

        async def generate_request(self, obj: Any, request: Any = None) -> Any:
            yield {"text": "x"}

        def _create_tokenized_object(
            self,
            obj: Any,
            input_text: Any,
            input_ids: Any,
            input_embeds: Any = None,
            mm_inputs: Any = None,
            token_type_ids: Any = None,
        ) -> Any: ...

    manager: Any = Manager()
    request_checks.install(manager, every_grammar=every)
    params = {"structural_tag": json.dumps(tag({"type": "any_text"}))}
    obj = SimpleNamespace(rid="request-1", text="x", input_ids=None, sampling_params=params)

    async def ask() -> Any:
        return await anext(manager.generate_request(obj, SimpleNamespace(url=SimpleNamespace(path=path))))

    if refused:
        with pytest.raises(ValueError, match="structural_tag is not served here"):
            asyncio.run(ask())
    else:
        assert asyncio.run(ask()) == {"text": "x"}
