"""What a grammar of a client's may cost, checked before its request goes to an engine, of whatever kind."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_PLACE = re.compile(r"^\[[0-9:]+\] \S+: ")  # of xgrammar's source


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
        why = _PLACE.sub("", str(error).strip().partition("\n")[0])
        raise ValueError(f"the JSON schema cannot be served: {why:.200}") from None
    return text


def check_constraint(params: Mapping[str, str], *, every: bool = False) -> None:
    """Check a constraint that SGLang has made of tools. Raises ValueError."""
    from sglang_ext.sglang_internals.grammar_checks import check_grammar

    for name, text in params.items():
        check_grammar(name, text, every=every)
