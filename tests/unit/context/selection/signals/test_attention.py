"""Signal `attention` over documents of any length, against shares computed one head at a time."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.analysis.document_analysis import Analysis
from sglang_ext.context.selection.signals import Evidence
from sglang_ext.context.selection.signals.attention import attention, begin_attention, head_attention
from tests.unit.context.selection.signals.evidence import evidence_of
from tests.unit.context.selection.test_samkv import DIM, HEADS, KV_HEADS, LAYERS, analysis_of

MODULE = import_module(head_attention.__module__)  # its package has a function of the same name
GROUP = HEADS // KV_HEADS
LENGTHS = st.one_of(st.integers(1, 5), st.sampled_from([127, 128, 129, 256, 300]))


def by_head(queries: torch.Tensor, analyses: list[Analysis]) -> torch.Tensor:
    """The definition: one retrieval head after the other, all its tokens in one row."""
    counts = torch.cat([torch.arange(analysis.n_tokens) >= 3 for analysis in analyses])
    total = torch.zeros(len(counts))
    for number, own in enumerate(queries):
        logits = torch.cat(
            [
                query @ (analysis.token_k[:, number].T * analysis.token_k_scale[:, number].float()) / DIM**0.5
                for query, analysis in zip(own, analyses, strict=True)
            ],
            dim=1,
        )  # [group, tokens]
        total += logits.masked_fill(~counts, -1e9).softmax(1).amax(0)
    return total * counts


@given(st.lists(LENGTHS, min_size=1, max_size=5), st.integers(0, 10_000), st.booleans())
def test_every_token_has_its_largest_share(lengths: list[int], seed: int, one_tile_at_a_time: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    analyses = [analysis_of(n, 8, generator) for n in lengths]
    queries = torch.randn(2, len(lengths), GROUP, DIM, generator=generator) * 3
    with pytest.MonkeyPatch.context() as patch:
        if one_tile_at_a_time:
            patch.setattr(MODULE, "_CPU_BYTES", 1)
        found = head_attention(queries, [analyses])
    assert torch.allclose(found, by_head(queries, analyses), atol=1e-6)


def asked(lengths: list[int], seed: int, **options: Any) -> Evidence:
    made = evidence_of([["x" * 5] * (n // 5) + ["y" * (n % 5 or 1)] for n in lengths], "", **options)
    return replace(made, query=torch.randn(LAYERS, HEADS, DIM, generator=torch.Generator().manual_seed(seed)))


@given(
    st.lists(st.lists(st.integers(1, 300), min_size=1, max_size=4), min_size=1, max_size=5),
    st.lists(
        st.sampled_from(
            [
                {},
                {"personalised": True},
                {"experimental": {"scoring": "attention"}},
                {"score_positions": "adjacent"},
            ]
        ),
        min_size=5,
        max_size=5,
    ),
    st.integers(0, 10_000),
    st.sampled_from([1, 5, 4096]),
)
@settings(deadline=None)
def test_requests_are_scored_together_as_each_alone(
    requests: list[list[int]], options: list[dict[str, Any]], seed: int, tiles: int
) -> None:
    evidences = [
        asked(lengths, seed + n, **own)
        for n, (lengths, own) in enumerate(zip(requests, options, strict=False))
    ]
    bare = replace(evidences[0], query=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MODULE, "_JOINT_TILES", tiles)
        ends = begin_attention([bare, *evidences])
    assert ends[0]() is None
    for evidence, end in zip(evidences, ends[1:], strict=True):
        want, found = attention(evidence), end()
        assert want is not None
        assert found is not None
        torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-4)


def test_a_rank_without_retrieval_heads_adds_nothing() -> None:
    analyses = [analysis_of(n, 8, torch.Generator().manual_seed(0)) for n in (5, 130)]
    bare = [
        Analysis.of_sentences(a.begins, 8, token_k=a.token_k[:, :0], token_k_scale=a.token_k_scale[:, :0])
        for a in analyses
    ]
    assert head_attention(torch.empty(0, 2, GROUP, DIM), [bare]).tolist() == [0.0] * 135
