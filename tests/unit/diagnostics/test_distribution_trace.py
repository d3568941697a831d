"""Distributions and forced tokens in the scheduler: chunks, decode steps, mixed batches, retraction, and
requests that are refused."""

from __future__ import annotations

import base64
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sglang_ext.diagnostics.distribution import before_sampling, on_request
from sglang_ext.wire.protocol import DISTRIBUTION_FIELD, FORCED_FIELD, MAX_TRACED

VOCABULARY = 5


def req(**params: Any) -> Any:
    made = SimpleNamespace(
        sampling_params=SimpleNamespace(custom_params=params or None),
        vocab_size=VOCABULARY,
        output_ids=[],
        customized_info=None,
    )
    assert on_request(made) is None
    return made


def step(*reqs: Any, extend: bool = False, decoding: tuple[Any, ...] = (), seed: int = 0) -> torch.Tensor:
    """Sample for a batch greedily and append the tokens; return the logits as they were."""
    batch = SimpleNamespace(
        ragserve_reqs=reqs,
        ragserve_decoding=decoding,
        forward_mode=SimpleNamespace(is_extend=lambda: extend),
    )
    logits = torch.randn(len(reqs), VOCABULARY, generator=torch.Generator().manual_seed(seed))
    before = logits.clone()
    before_sampling(batch, logits)
    for one, token in zip(reqs, logits.argmax(-1).tolist(), strict=True):
        one.output_ids.append(token)
    return before


def sent(one: Any) -> list[np.ndarray]:
    texts = (one.customized_info or {}).get(DISTRIBUTION_FIELD, [])
    return [np.frombuffer(base64.b64decode(text), dtype="<f4") for text in texts]


def test_a_request_says_what_it_is_forced_to_and_sends_what_it_would_have_said() -> None:
    one, other = req(**{DISTRIBUTION_FIELD: 2, FORCED_FIELD: "[3, 1, 4]"}), req()
    logits = [step(one, other, extend=number == 0, seed=number) for number in range(4)]
    assert one.output_ids[:3] == [3, 1, 4]
    assert other.output_ids == [int(row[1].argmax()) for row in logits], "others are left alone"
    assert one.output_ids[3] == int(logits[3][0].argmax()), "and so is what follows"
    found = sent(one)
    assert len(found) == 2
    for got, row in zip(found, logits, strict=False):
        np.testing.assert_allclose(got, row[0].log_softmax(-1).numpy(), rtol=1e-6)
    assert not sent(other)


def test_the_last_chunk_of_a_prompt_counts() -> None:
    one = req(**{DISTRIBUTION_FIELD: 1})
    step(one, extend=True, seed=1)
    one.output_ids.clear()  # of a chunk before the last, which has no token
    last = step(one, extend=True, seed=2)
    assert len(sent(one)) == 1
    np.testing.assert_allclose(sent(one)[0], last[0].log_softmax(-1).numpy(), rtol=1e-6)


def test_a_request_that_was_retracted_goes_on_where_it_was() -> None:
    one = req(**{DISTRIBUTION_FIELD: 3, FORCED_FIELD: "[3, 1, 4]"})
    step(one, extend=True)
    step(one)
    one.output_ids.pop()  # the step after whose launch it was retracted
    again = step(one, extend=True, seed=5)
    step(one)
    assert one.output_ids == [3, 1, 4]
    assert len(sent(one)) == 3
    np.testing.assert_allclose(sent(one)[1], again[0].log_softmax(-1).numpy(), rtol=1e-6)


def test_a_row_that_decodes_in_a_mixed_batch_counts_on() -> None:
    one, new = req(**{FORCED_FIELD: "[3, 1]"}), req(**{FORCED_FIELD: "[2]"})
    step(one, extend=True)
    one.output_ids.clear()  # with overlap, a token is known only after the next step was launched
    step(new, one, extend=True, decoding=(one,))
    assert (new.output_ids, one.output_ids) == ([2], [1])


@pytest.mark.parametrize(
    "params",
    [
        {DISTRIBUTION_FIELD: "many"},
        {DISTRIBUTION_FIELD: -1},
        {DISTRIBUTION_FIELD: MAX_TRACED + 1},
        {FORCED_FIELD: "3"},
        {FORCED_FIELD: "[3,"},
        {FORCED_FIELD: "[[3]]"},
        {FORCED_FIELD: f"[{VOCABULARY}]"},
        {FORCED_FIELD: "[-1]"},
        {FORCED_FIELD: str([1] * (MAX_TRACED + 1))},
    ],
)
def test_what_cannot_be_sampled_is_refused(params: dict[str, Any]) -> None:
    made = SimpleNamespace(
        sampling_params=SimpleNamespace(custom_params=params), vocab_size=VOCABULARY, output_ids=[]
    )
    assert on_request(made)
    assert not hasattr(made, "ragserve_trace")
