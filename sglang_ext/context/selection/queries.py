"""The question's queries at each document, and their products with the mean keys of blocks (docs/methods.md,
section 1).

    q_i = q + 1/(D-1) * sum_{j != i} |cos(q, loc_j)| loc_j          (1), the personalised query
    s_b = <q_i, mean K of block b> / sqrt(head_dim)"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from sglang_ext.analysis.document_analysis import Analysis
from sglang_ext.context.selection.blocks import Blocks
from sglang_ext.tensors.buffers import Ints, upload
from sglang_ext.tensors.rope import Rotation
from sglang_ext.wire.request_options import SamKvOptions

CHUNK_BYTES = 256 * 2**20  # of float32 numbers in one product at a time


def document_queries(
    options: SamKvOptions,
    blocks: Blocks,
    analyses: Sequence[Analysis],
    query: torch.Tensor,
    question_start: int,
    rotation: Rotation,
    reduce: Callable[[torch.Tensor], torch.Tensor],
    heads: Ints | None = None,
) -> torch.Tensor:
    """Each document's query, f32 [layers, D, heads, head_dim], rotated to where the document's keys are
    stored. With ``heads``, see `of_heads`: [found, D, group, head_dim]."""
    shifts = shifts_of(options, blocks, question_start)
    queries = (
        personalised(query, analyses, shifts, rotation, reduce)
        if options.personalised
        else query[:, None].expand(-1, len(shifts), -1, -1)
    )
    if heads is not None:
        queries = of_heads(queries, heads, analyses[0].mean_k.shape[2])
    return moved(queries, -shifts, rotation)


def shifts_of(options: SamKvOptions, blocks: Blocks, question_start: int) -> torch.Tensor:
    """int64 [D], on the host: how far each document's keys are from where they are stored."""
    if options.score_positions == "adjacent":  # every document right before the question
        return question_start - blocks.length.sum(1)
    return blocks.start[:, 0]


def of_heads(queries: torch.Tensor, heads: Ints, kv_heads: int) -> torch.Tensor:
    """The query groups of ``heads`` int64 [found, 2], pairs of a layer and a KV head, out of [layers, n,
    heads, head_dim]: [found, n, group, head_dim]."""
    layer, head = upload(np.ascontiguousarray(heads.T), queries.device)
    return queries.unflatten(2, (kv_heads, -1))[layer, :, head]


def personalised(
    query: torch.Tensor,
    analyses: Sequence[Analysis],
    shifts: torch.Tensor,
    rotation: Rotation,
    reduce: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Equation 1: f32 [layers, D, heads, head_dim]. The cosine takes all heads of all ranks as one vector."""
    documents = len(analyses)
    if documents == 1:
        return query[:, None]
    local = torch.stack([a.local_q.to(query.device) for a in analyses], dim=1).float()
    local = (
        local * torch.stack([a.local_q_scale.to(query.device) for a in analyses], dim=1).float()[..., None]
    )
    local = moved(local, shifts, rotation)
    whole = query[:, None].expand_as(local)
    parts = reduce(
        torch.stack([(a * b).sum((-1, -2)) for a, b in ((whole, local), (whole, whole), (local, local))])
    )
    weight = (parts[0] / (parts[1] * parts[2]).sqrt().clamp(min=1e-12)).abs()
    biased = weight[..., None, None] * local
    return query[:, None] + (biased.sum(1, keepdim=True) - biased) / (documents - 1)


def moved(queries: torch.Tensor, shifts: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """[layers, D, heads, head_dim] rotated by each document's shift, int64 [D] on the host."""
    angles = upload(torch.stack(rotation.angles(shifts)).numpy(), queries.device)
    cos, sin = angles.repeat(1, len(queries), 1)
    return rotation.turn(queries.flatten(0, 1), cos, sin).view_as(queries)


def block_products(
    queries: torch.Tensor, analyses: Sequence[Analysis], blocks: Blocks, *, fold: bool
) -> torch.Tensor:
    """<q_i, mean K> / sqrt(head_dim): f32 [layers, D, M, heads], or [layers, D, M, kv_heads] summed over
    query groups (``fold``). 0 where there is no block."""
    layers, documents, heads, dim = queries.shape
    kv_heads = analyses[0].mean_k.shape[2]
    grouped = queries.unflatten(2, (kv_heads, heads // kv_heads))
    if fold:
        grouped = grouped.sum(3, keepdim=True)
    counts = torch.tensor([analysis.blocks for analysis in analyses])
    document = torch.repeat_interleave(torch.arange(documents), counts).to(queries.device)
    keys = torch.cat([a.mean_k.to(queries.device) for a in analyses], dim=1)
    scale = torch.cat([a.mean_k_scale.to(queries.device) for a in analyses], dim=1)
    step = max(1, CHUNK_BYTES // (4 * len(document) * grouped.shape[2] * grouped.shape[3] * dim))
    found = []
    for at in range(0, layers, step):
        rows = slice(at, min(at + step, layers))
        # [rows, blocks, kv_heads, group]
        products = (keys[rows].float()[:, :, :, None] * grouped[rows][:, document]).sum(-1)
        found.append((products * scale[rows].float()[..., None]).flatten(2))
    flat = torch.cat(found) / dim**0.5
    padded = torch.zeros(layers, documents, blocks.start.shape[1], flat.shape[-1], device=queries.device)
    padded[:, (blocks.length > 0).to(queries.device)] = flat
    return padded


def block_attention(products: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """f32 [layers, D, M]: largest share of attention that a head gives a block, with every key of a block
    taken as its mean; softmax over all blocks."""
    length = blocks.length.to(products.device)
    logits = products + length.float().log()[..., None]  # -inf where there is no block
    return logits.flatten(1, 2).softmax(1).amax(-1).view(products.shape[:-1])
