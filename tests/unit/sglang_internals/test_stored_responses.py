"""Stored responses stay within a bound."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_ext.sglang_internals.stored_responses import KEPT, install


def test_the_newest_responses_are_kept_with_their_messages() -> None:
    serving = SimpleNamespace(response_store={}, msg_store={})
    install(SimpleNamespace(openai_serving_responses=serving))
    for number in range(1000):
        serving.msg_store[f"resp_{number}"] = ["text"]
        serving.response_store[f"resp_{number}"] = number
        serving.response_store["resp_0"] = "used again"
    assert len(serving.response_store) == KEPT
    assert len(serving.msg_store) == 2 * KEPT
    assert "resp_999" in serving.response_store
    assert "resp_0" in serving.response_store
    assert "resp_700" not in serving.response_store


def test_another_sglang_is_noticed_and_models_without_are_left() -> None:
    install(SimpleNamespace())
    with pytest.raises(RuntimeError, match="no empty msg_store"):
        install(SimpleNamespace(openai_serving_responses=SimpleNamespace(response_store={})))
    from sglang.srt.entrypoints.openai.serving_responses import OpenAIServingResponses

    names = OpenAIServingResponses.__init__.__code__.co_names
    assert {"response_store", "msg_store"} <= set(names)
