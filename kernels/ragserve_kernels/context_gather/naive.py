"""The truth of ``context_gather`` in plain torch."""

from __future__ import annotations

import torch

from ragserve_kernels.context_gather.types import HostCodes
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
    rows = host.codes if isinstance(host, HostCodes) else host
    pairs = host.pairs if isinstance(host, HostCodes) else None
    block, page, half = rows.shape[4], tokens.shape[1], turns.shape[2]
    within = torch.arange(page, device=source.device)
    used = source >= 0
    for layer in range(dst.layers):
        head, entry = used[layer].nonzero(as_tuple=True)
        there = tokens[source[layer, head, entry].long()].long()  # [n, page, 2]
        slots = target[layer, head, entry].long()[:, None] * page + within
        row, of = there[..., 0].cpu(), head[:, None].cpu()
        where = row // block, first_layer + layer, of, row % block
        k, v = (_read(rows, pairs, part, *where).to(dst.device) for part in (0, 1))
        cos, sin = turns[there[..., 1]].unbind(-2)
        x1, x2, rest = k[..., :half].float(), k[..., half : 2 * half].float(), k[..., 2 * half :]
        turned = torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1).to(dst.dtype)
        dst.k[layer][slots, head[:, None]] = torch.cat((turned, rest.to(dst.dtype)), -1)
        dst.v[layer][slots, head[:, None]] = v.to(dst.dtype)


def _read(
    rows: torch.Tensor,
    pairs: torch.Tensor | None,
    part: int,
    page: torch.Tensor,
    layer: int,
    head: torch.Tensor,
    within: torch.Tensor,
) -> torch.Tensor:
    """Return rows of K (0) or V (1); those of codes in float32."""
    found = rows[page, part, layer, head, within]
    return found if pairs is None else dequantize(found, pairs[page, part, layer, head, within])
