"""Requests with a seed draw the same tokens whatever runs beside them, and from the same probabilities."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ext.sglang_internals.seeded_sampling import Seed, before_sampling, draw, on_request
from sglang_ext.state import current

VOCABULARY = 40
ALL = 1 << 30  # SGLang's top_k for none


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The settings of SGLang's engine."""
    args = SimpleNamespace(enable_deterministic_inference=False, speculative_algorithm=None)
    runner = SimpleNamespace(server_args=args)
    monkeypatch.setattr(current, "runtime", SimpleNamespace(model_runner=runner))
    return args


def req(seed: int | None = None, top_k: int = ALL, top_p: float = 1.0, min_p: float = 0.0) -> Any:
    params = SimpleNamespace(sampling_seed=seed, top_k=top_k, top_p=top_p, min_p=min_p)
    made = SimpleNamespace(sampling_params=params, output_ids=[])
    assert on_request(made) is None
    return made


def step(*reqs: Any, extend: bool = False, decoding: tuple[Any, ...] = (), probs: torch.Tensor) -> list[int]:
    """Sample for a batch whose rows have these probabilities."""
    batch = SimpleNamespace(
        ragserve_reqs=reqs,
        ragserve_decoding=decoding,
        forward_mode=SimpleNamespace(is_extend=lambda: extend),
    )
    tokens = torch.full((len(reqs),), -1, dtype=torch.int32)
    before_sampling(batch)
    draw(probs.expand(len(reqs), -1), reqs, tokens)
    for one, token in zip(reqs, tokens.tolist(), strict=True):
        one.output_ids.append(token)
    return tokens.tolist()


def some_probs(seed: int = 0) -> torch.Tensor:
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed)).softmax(0)


def test_the_same_seed_draws_the_same_answer_beside_others_and_after_a_retraction() -> None:
    probs, alone = some_probs(), req(7)
    for number in range(12):
        step(alone, extend=number == 0, probs=probs)
    torch.manual_seed(1)
    other, plain, again = req(8), req(), req(7)
    step(plain, again, extend=True, probs=probs)
    for _ in range(4):
        step(again, other, plain, probs=probs)
    step(other, again, extend=True, decoding=(again,), probs=probs)  # a batch of prompts with its row
    again.output_ids.pop()  # the scheduler took it back before it saw this token
    step(again, extend=True, probs=probs)
    for _ in range(6):
        step(again, probs=probs)
    assert again.output_ids == alone.output_ids
    assert len(set(alone.output_ids)) > 3
    assert other.output_ids != alone.output_ids[: len(other.output_ids)]
    assert set(plain.output_ids) == {-1}, "a request without a seed keeps what SGLang drew"


def test_draws_follow_the_probabilities() -> None:
    probs, one, count = some_probs(), req(3), 20_000
    drawn = torch.tensor([step(one, extend=not i, probs=probs)[0] for i in range(count)])
    shares = torch.bincount(drawn, minlength=VOCABULARY) / count
    assert float((shares - probs).abs().max()) < 0.015


@pytest.mark.parametrize("params", [{"top_k": 3}, {"top_p": 0.3}, {"min_p": 0.5}], ids=str)
def test_what_the_request_leaves_out_is_never_drawn(params: dict[str, Any]) -> None:
    from sglang.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_torch as sglang

    probs, one = some_probs(2), req(5, **params)
    names = ("top_k", "top_p", "min_p")
    filters = (torch.tensor([getattr(one.sampling_params, name)] * 3000) for name in names)
    wanted = sglang(probs.expand(3000, -1).clone(), *filters, True, None, None)
    drawn = {step(one, extend=not i, probs=probs)[0] for i in range(3000)}
    assert drawn == set(wanted.tolist())
    assert len(drawn) < VOCABULARY / 2


def test_who_reads_the_seed(engine: Any) -> None:
    assert not hasattr(req(7, top_k=1), "ragserve_seed"), "a greedy request draws nothing"
    assert req(7).ragserve_seed == Seed(7)
    engine.enable_deterministic_inference = True
    assert not hasattr(req(7), "ragserve_seed"), "SGLang does it"
    engine.enable_deterministic_inference = False
    engine.speculative_algorithm = "EAGLE"
    made = SimpleNamespace(sampling_params=req().sampling_params)
    made.sampling_params.sampling_seed = 7
    assert "speculative" in str(on_request(made))
