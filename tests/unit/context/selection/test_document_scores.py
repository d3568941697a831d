"""Scores of documents for a question against their definition, written out token by token."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from sglang_ext.analysis.document_analysis import Analysis
from sglang_ext.context.selection import document_scores as module
from sglang_ext.context.selection.document_scores import document_scores
from sglang_ext.context.selection.sentences import SINKS
from tests.unit.context.selection.test_samkv import (
    DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    ROTATION,
    analysis_of,
    turned,
)

START, TOKENS = 11, 5
GROUP = HEADS // KV_HEADS


def documents() -> list[Analysis]:
    return [analysis_of(n, 8, torch.Generator().manual_seed(n)) for n in (30, 63, 9)]


def by_definition(queries: torch.Tensor, document: Analysis) -> float:
    keys = document.token_k.double() * document.token_k_scale.double()[..., None]
    total = 0.0
    for number, (layer, kv_head) in enumerate(document.heads.tolist()):
        for token in range(TOKENS):
            for head in range(kv_head * GROUP, (kv_head + 1) * GROUP):
                # the question's first token stands where the document ends
                query = turned(queries[layer, token, head], document.n_tokens - START)
                products = [float(query @ keys[n, number]) for n in range(SINKS, document.n_tokens)]
                total += max(products) / math.sqrt(DIM)
    return total


def test_scores_are_those_of_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    queries = torch.randn(LAYERS, TOKENS, HEADS, DIM, generator=torch.Generator().manual_seed(0))
    every = documents()
    scores = document_scores(queries, START, every, ROTATION)
    assert scores.tolist() == pytest.approx([by_definition(queries, each) for each in every], abs=1e-4)
    alone = document_scores(queries, START, every[2:], ROTATION)
    assert alone.item() == pytest.approx(scores[2].item(), abs=1e-4), "the others change nothing"
    monkeypatch.setattr(module, "CHUNK_BYTES", 1)  # a token at a time
    torch.testing.assert_close(document_scores(queries, START, every, ROTATION), scores)


def test_a_long_document_does_not_make_short_ones_cost_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    queries = torch.randn(LAYERS, TOKENS, HEADS, DIM, generator=torch.Generator().manual_seed(0))
    lengths = [*range(20, 40), 3000, *range(40, 20, -1)]
    every = [analysis_of(n, 8, torch.Generator().manual_seed(at)) for at, n in enumerate(lengths)]
    alone = torch.cat([document_scores(queries, START, [each], ROTATION) for each in every])
    padded: list[int] = []

    def counted(parts: list[torch.Tensor], **options: Any) -> torch.Tensor:
        whole = pad_sequence(parts, **options)
        padded.append(whole.shape[0] * whole.shape[1])
        return whole

    monkeypatch.setattr(module, "pad_sequence", counted)
    scores = document_scores(queries, START, every, ROTATION)
    torch.testing.assert_close(scores, alone)
    assert max(padded) <= 65_536
    assert sum(padded) <= 2 * 2 * sum(lengths), "keys and their scales with little padding"


def test_a_document_of_the_first_tokens_only_has_a_score() -> None:
    queries = torch.randn(LAYERS, TOKENS, HEADS, DIM, generator=torch.Generator().manual_seed(0))
    short = analysis_of(SINKS, 8, torch.Generator().manual_seed(1))
    assert bool(document_scores(queries, START, [short, *documents()], ROTATION).isfinite().all())
