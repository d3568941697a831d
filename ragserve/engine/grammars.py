"""What a grammar of a client's may cost, checked before its request goes to an engine, of whatever kind."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

ANY_OBJECT = '{"type": "object"}'


def check_schema(schema: Mapping[str, Any], *, every: bool = False) -> str:
    """Return a JSON schema as the engine takes it. ``every``: the operator has opened expressions.

    Raises ValueError for one that is no schema, or costs too much."""
    from sglang_ext.sglang_internals.grammar_checks import check_grammar

    text = json.dumps(schema)
    check_grammar("json_schema", text, every=every)
    from xgrammar import Grammar

    try:
        Grammar.from_json_schema(text)
    except RuntimeError as error:
        raise ValueError(f"it cannot be served: {str(error).splitlines()[-1][:200]}") from None
    return text


def check_constraint(params: Mapping[str, str], *, every: bool = False) -> None:
    """Check a constraint that SGLang has made of tools. Raises ValueError."""
    from sglang_ext.sglang_internals.grammar_checks import check_grammar

    for name, text in params.items():
        check_grammar(name, text, every=every)
