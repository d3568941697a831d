"""What one request to SGLang's routes may cost, whoever sends it: bodies that SGLang would run, render, compile
or keep without a limit do not reach it.
"""

from __future__ import annotations

import httpx
import pytest

from tests.unit.api.scripted_server import Live


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/parse_function_call",
            {"text": "[f(" + "a=," * 40, "tools": [], "tool_call_parser": "pythonic"},
        ),
        ("/separate_reasoning", {"text": "<think>" * 40, "reasoning_parser": "qwen3"}),
    ],
)
def test_what_the_client_has_already_is_not_parsed(
    client: httpx.Client, live: Live, path: str, body: dict[str, object]
) -> None:
    """Regular expressions of SGLang's parsers are exponential, and they run in the event loop."""
    response = client.post(path, json=body)
    assert (response.status_code, response.json()["error"]["code"]) == (404, "route_not_found")
    assert path != "/parse_function_call" or path in response.json()["error"]["hint"]
    assert live.seen_upstream == []
