"""The truth of ``context_gather`` and ``context_shared_gather`` in plain torch."""

from __future__ import annotations

import torch

from ragserve_kernels.context_gather.types import HostCodes, HostContexts
from ragserve_kernels.kv import KVLayers
from ragserve_kernels.quantize_kv.naive import dequantize


def context_gather_naive(
    host: torch.Tensor | HostCodes,
    dst: KVLayers,
    tokens: torch.Tensor,
    turns: torch.Tensor,
    source: torch.Tensor,
    target: torch.Tensor,
    *,
    first_layer: int = 0,
) -> None:
    """See :func:`ragserve_kernels.context_gather.context_gather`."""
    page = tokens.shape[1]
    within = torch.arange(page, device=source.device)
    used = source >= 0
    for layer in range(dst.layers):
        head, entry = used[layer].nonzero(as_tuple=True)
        there = tokens[source[layer, head, entry].long()].long()  # [n, page, 2]
        slots = target[layer, head, entry].long()[:, None] * page + within
        k, v = context_rows(host, turns, there, first_layer + layer, head[:, None], dst.dtype)
        dst.k[layer][slots, head[:, None]] = k
        dst.v[layer][slots, head[:, None]] = v


def context_shared_gather_naive(
    contexts: HostContexts, dst: KVLayers, source: torch.Tensor, target: torch.Tensor, count: torch.Tensor
) -> None:
    """See :func:`ragserve_kernels.context_gather.context_shared_gather`."""
    page, heads, lists = contexts.tokens.shape[1], dst.kv_heads, dst.layers * dst.kv_heads
    n = int(count)
    taken, shared_blocks = source[:n].long(), target[:n].long()
    within = torch.arange(page, device=shared_blocks.device)
    there = contexts.tokens[taken // lists].long()
    layer, head = (each[:, None] for each in (taken % lists // heads, taken % heads))
    values = context_rows(contexts.host, contexts.turns, there, layer, head, dst.dtype)
    for number in (shared_blocks % lists).unique().tolist():
        here = shared_blocks % lists == number
        slots = shared_blocks[here, None] // lists * page + within
        for each, buffers in zip(values, (dst.k, dst.v), strict=True):
            buffers[number // heads][slots, number % heads] = each[here]


def context_rows(
    host: torch.Tensor | HostCodes,
    turns: torch.Tensor,
    there: torch.Tensor,
    layer: int | torch.Tensor,
    head: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K, turned, and V ``[..., head_dim]`` of ``dtype`` on the device of ``turns``.

    ``there``: int64 ``[..., 2]``: row and row of ``turns``; ``layer`` and ``head``: of each, by broadcast."""
    rows = host.codes if isinstance(host, HostCodes) else host
    pairs = host.pairs if isinstance(host, HostCodes) else None
    block, half = rows.shape[4], turns.shape[2]
    row = there[..., 0].cpu()
    of = layer.cpu() if isinstance(layer, torch.Tensor) else layer
    where = row // block, of, head.cpu(), row % block
    k, v = (_read(rows, pairs, part, *where).to(turns.device) for part in (0, 1))
    cos, sin = turns[there[..., 1]].unbind(-2)
    x1, x2, rest = k[..., :half].float(), k[..., half : 2 * half].float(), k[..., 2 * half :]
    turned = torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1).to(dtype)
    return torch.cat((turned, rest.to(dtype)), -1), v.to(dtype)


def _read(
    rows: torch.Tensor,
    pairs: torch.Tensor | None,
    part: int,
    page: torch.Tensor,
    layer: int | torch.Tensor,
    head: torch.Tensor,
    within: torch.Tensor,
) -> torch.Tensor:
    """Return rows of K (0) or V (1); those of codes in float32."""
    found = rows[page, part, layer, head, within]
    return found if pairs is None else dequantize(found, pairs[page, part, layer, head, within])
