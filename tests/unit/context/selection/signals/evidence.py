"""Evidence about documents of given sentences, for the tests of the signals."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from sglang_ext.analysis.texts import Texts
from sglang_ext.context.selection.blocks import Blocks
from sglang_ext.context.selection.sentences import Sentences
from sglang_ext.context.selection.signals import Evidence
from sglang_ext.wire.protocol import RetrievalScores, Span
from sglang_ext.wire.request_options import SamKvOptions
from tests.unit.context.selection.test_samkv import ROTATION, analysis_of


def characters(batch: Sequence[Sequence[int]]) -> list[str]:
    """Read token ids that are code points."""
    return ["".join(map(chr, ids)) for ids in batch]


def evidence_of(
    documents: Sequence[Sequence[str]],
    question: str,
    scores: RetrievalScores | None = None,
    **options: Any,
) -> Evidence:
    """Documents of sentences, a token for every character, without the model's queries."""
    generator = torch.Generator().manual_seed(0)
    analyses, lengths = [], [0]
    for document in documents:
        analysis = analysis_of(sum(map(len, document)), 8, generator)
        analysis.begins[:] = 0
        at = 0
        for text in document:
            analysis.begins[at] = 1
            at += len(text)
        analyses.append(analysis)
        lengths.append(lengths[-1] + analysis.n_tokens)
    blocks = Blocks.build([Span(a, b) for a, b in pairwise(lengths)], [8] * len(analyses), initial=0, local=0)
    return Evidence(
        SamKvOptions(**options),
        blocks,
        analyses,
        Sentences.of(analyses),
        torch.tensor([ord(c) for document in documents for text in document for c in text]),
        torch.tensor([ord(c) for c in question], dtype=torch.int64),
        Texts([], torch.zeros(1, dtype=torch.bool), characters),
        None,
        lengths[-1],
        ROTATION,
        scores,
    )
