"""The truth of ``rotate_gather`` in plain torch."""

from __future__ import annotations

import torch

from ragserve_kernels.kv import KVLayers
from ragserve_kernels.rotate_gather.kv_sources import DeviceSource, HostSource


def rotate_gather_naive(
    source: DeviceSource | HostSource,
    dst: KVLayers,
    moves: torch.Tensor,
    slots: torch.Tensor,
    shift: torch.Tensor,
    inv_freq: torch.Tensor,
    *,
    precision: torch.dtype = torch.float64,
) -> None:
    """See :func:`ragserve_kernels.rotate_gather.rotate_gather`. Angles are float64; K is rotated in
    ``precision``.
    """
    for layer in range(dst.layers):
        used = moves[layer][moves[layer, :, 0] >= 0].long()
        tokens = used[:, 2]
        run = torch.repeat_interleave(torch.arange(len(used), device=used.device), tokens)
        within = torch.arange(len(run), device=used.device) - torch.repeat_interleave(
            tokens.cumsum(0) - tokens, tokens
        )
        document, token = used[run, 0], used[run, 1] + within
        target = slots[used[run, 3] + within].long()
        k, v = source.read(layer, document, token)
        k, v = k.to(dst.device), v.to(dst.device)
        dst.k[layer][target] = rotate(k, shift[document], inv_freq, precision=precision).to(dst.dtype)
        dst.v[layer][target] = v.to(dst.dtype)


def rotate(
    k: torch.Tensor, shift: torch.Tensor, inv_freq: torch.Tensor, *, precision: torch.dtype = torch.float64
) -> torch.Tensor:
    """``k`` ``[n, heads, head_dim]`` rotated by ``shift`` ``[n]`` positions: (x1, x2) -> (x1 cos - x2 sin, x2
    cos + x1 sin).
    """
    half = inv_freq.shape[0]
    angle = shift.double()[:, None] * inv_freq.double()
    cos, sin = angle.cos().to(precision)[:, None, :], angle.sin().to(precision)[:, None, :]
    x1, x2, rest = k[..., :half].to(precision), k[..., half : 2 * half].to(precision), k[..., 2 * half :]
    return torch.cat([(x1 * cos - x2 * sin).to(k.dtype), (x2 * cos + x1 * sin).to(k.dtype), rest], -1)
