"""The fields of SGLang's requests that ragserve sets."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_ext.sglang_internals.sglang_requests import limit_answer


@pytest.mark.parametrize(
    ("wanted", "granted"), [(None, 99), (5000, 99), (99, 99), (7, 7)], ids=["all", "far", "just", "few"]
)
def test_an_answer_ends_within_the_context_whatever_is_kept(wanted: int | None, granted: int) -> None:
    """A prompt of 900 tokens in a context of 1000 leaves 99, since SGLang keeps one to itself."""
    params = SimpleNamespace(max_new_tokens=wanted)
    limit_answer(SimpleNamespace(origin_input_ids=[0] * 900, sampling_params=params), 1000)
    assert params.max_new_tokens == granted


def test_a_prompt_as_long_as_the_context_gets_no_answer() -> None:
    params = SimpleNamespace(max_new_tokens=None)
    limit_answer(SimpleNamespace(origin_input_ids=[0] * 1000, sampling_params=params), 1000)
    assert params.max_new_tokens == 0
