"""Signal `attention`: what the question's last token looks at, by stored keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_ext.analysis.document_analysis import Analysis
from sglang_ext.context.selection.queries import (
    CHUNK_BYTES,
    block_attention,
    block_products,
    document_queries,
)
from sglang_ext.context.selection.sentences import SINKS
from sglang_ext.context.selection.signals.base import Evidence, scaled


def attention(evidence: Evidence) -> torch.Tensor | None:
    """The highest attention to a token of each sentence, to the power of option `attention_power`: the best
    sentence takes nearly all of a head's attention.

    The keys are those of the retrieval heads, by token, or the mean keys of blocks in the upper half of the
    layers (option `scoring`)."""
    if evidence.query is None:
        return None
    options, blocks = evidence.options, evidence.blocks
    queries = document_queries(
        options,
        blocks,
        evidence.analyses,
        evidence.query,
        evidence.question_start,
        evidence.rotation,
        evidence.reduce,
    )
    if options.scoring == "keys":
        token = evidence.reduce(head_attention(queries, evidence.analyses)).cpu()
    else:
        products = block_products(queries, evidence.analyses, blocks, fold=False)
        share = evidence.highest(block_attention(products, blocks))
        token = share[len(share) // 2 :].sum(0).flatten().cpu()[blocks.token_block]
    return scaled(evidence.sentences.best(token)) ** options.experimental.attention_power


def head_attention(queries: torch.Tensor, analyses: Sequence[Analysis]) -> torch.Tensor:
    """f32 [N]: for every document token, the largest share of attention over all N that a query head gives
    it, summed over this rank's retrieval heads. The first `SINKS` tokens of a document get none.

    ``queries`` f32 [layers, D, heads, head_dim]: each document's, rotated to where its keys are stored."""
    device, dim = queries.device, queries.shape[-1]
    lengths = torch.tensor([analysis.n_tokens for analysis in analyses], device=device)
    document = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths)
    parked = torch.arange(len(document), device=device) - (lengths.cumsum(0) - lengths)[document] < SINKS
    group = queries.shape[2] // analyses[0].mean_k.shape[2]
    keys, scale = (
        torch.cat([getattr(a, name).to(device) for a in analyses]) for name in ("token_k", "token_k_scale")
    )
    total = torch.zeros(len(document), device=device)
    step = max(1, CHUNK_BYTES // (4 * group * dim))  # tokens, each with its queries
    for number, (layer, head) in enumerate(analyses[0].heads.tolist()):
        grouped = queries[layer, :, head * group : (head + 1) * group]  # [D, group, head_dim]
        logits = torch.cat(
            [
                (grouped[document[at : at + step]] @ keys[at : at + step, number, :, None].float())[..., 0]
                for at in range(0, len(document), step)
            ]
        )  # [N, group]
        logits = logits * scale[:, number, None].float() / dim**0.5
        total += logits.masked_fill(parked[:, None], -1e9).softmax(0).amax(1)
    return total.masked_fill(parked, 0.0)
