"""`samkv` without options over few passages is answered by exact prefill."""

from __future__ import annotations

from typing import Any

import pytest

from ragserve.answering.small_contexts import better_exact
from ragserve.engine.base import GenerateRequest
from sglang_ext.wire.protocol import SessionPart, Span


def asked(tokens: int, strategy: str = "samkv", **fields: Any) -> GenerateRequest:
    spans = (Span(0, 40), Span(40, 40 + tokens // 2), Span(40 + tokens // 2, 40 + tokens))
    return GenerateRequest("q", [1] * (tokens + 60), "n", strategy, spans=spans, **fields)


@pytest.mark.parametrize("tokens", [300, 1024, 1365])
def test_where_nearly_all_would_be_kept(tokens: int) -> None:
    reason = better_exact(asked(tokens), {})
    assert reason is not None
    assert "at least 1,024 tokens" in reason
    assert f"of {tokens:,} here" in reason


@pytest.mark.parametrize(
    ("request_", "defaults"),
    [
        (asked(1366), {}),
        (asked(300, "concat"), {}),
        (asked(300, options={"keep": 0.3}), {}),
        (asked(300, options={"share": 0.1}), {}),
        (asked(300, session=SessionPart("session:n:x")), {}),
        (asked(300), {"selection": "shared"}),
        (asked(300), {"keep": 0.2}),
        (asked(300), {"min_tokens": 100}),
    ],
    ids=["many", "another", "keep", "share", "session", "blocks", "own keep", "own floor"],
)
def test_other_requests_are_composed(request_: GenerateRequest, defaults: dict[str, Any]) -> None:
    assert better_exact(request_, defaults) is None
