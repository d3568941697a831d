"""Which blocks of a long prompt a sparse prefill attends to, in the form that each kernel takes, and the
plain attention that all of them must give.

A pattern is drawn in blocks of 128 queries by 128 keys. Smaller blocks divide those, so that kernels of any
granularity compute the same attention."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

SIDE = 128  # queries and keys of a pattern's block


@dataclass(frozen=True, eq=False)
class Pattern:
    """Blocks of `SIDE` queries by `SIDE` keys that are attended to, causally.

    Attributes:
        mask: bool ``[heads, query blocks, key blocks]``; heads are query heads, KV heads, or one for all.
        prefix: Positions before the first query, a multiple of `SIDE`.
    """

    mask: torch.Tensor
    prefix: int

    def for_heads(self, heads: int) -> torch.Tensor:
        """Return the mask of so many heads, each as often as its group is large."""
        return self.mask.repeat_interleave(heads // self.mask.shape[0], 0)

    def divided(self, heads: int, block_q: int, block_k: int) -> torch.Tensor:
        """Return the pattern in smaller blocks, bool ``[heads, query blocks, key blocks]``, without blocks
        that begin after their queries' last position."""
        mask = self.for_heads(heads).repeat_interleave(SIDE // block_q, 1)
        mask = mask.repeat_interleave(SIDE // block_k, 2)
        return mask & visible(self.prefix, mask.shape[1], mask.shape[2], block_q, block_k, mask.device)

    @property
    def share(self) -> float:
        """The part of causal attention's blocks that is attended to."""
        seen = visible(self.prefix, *self.mask.shape[1:], SIDE, SIDE, self.mask.device)
        return float(self.mask.sum() / (seen.sum() * self.mask.shape[0]))


def visible(
    prefix: int, query_blocks: int, key_blocks: int, block_q: int, block_k: int, device: torch.device
) -> torch.Tensor:
    """Return bool ``[query blocks, key blocks]``, True where some query may see a key."""
    last = prefix + (torch.arange(query_blocks, device=device) + 1) * block_q - 1
    return torch.arange(key_blocks, device=device) * block_k <= last[:, None]


def random_pattern(prefix: int, new: int, heads: int, share: float, seed: int, device: str) -> Pattern:
    """Draw ``share`` of each query block's key blocks, the first and its own among them.

    Args:
        prefix, new: Positions before the queries, and queries; multiples of `SIDE`.
        share: From 0 to 1; 1 is dense attention.

    Raises:
        ValueError: Lengths that are no multiples of `SIDE`.
    """
    if prefix % SIDE or new % SIDE:
        raise ValueError(f"{prefix} cached and {new} new tokens must be multiples of {SIDE}.")
    draw = torch.Generator(device).manual_seed(seed)
    rows, width = new // SIDE, (prefix + new) // SIDE
    seen = visible(prefix, rows, width, SIDE, SIDE, torch.device(device))
    most = seen.sum(1)  # [query blocks]
    count = (most * share).round().long().clamp_min(1).maximum(most.clamp_max(2))
    score = torch.rand(heads, rows, width, generator=draw, device=device)
    step = torch.arange(width, device=device)
    score.masked_fill_((step == 0) | (step == most[:, None] - 1), 2.0).masked_fill_(~seen, -1.0)
    rank = score.argsort(-1, descending=True).argsort(-1)
    return Pattern(rank < count[:, None], prefix)


def packed(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the counts ``[...]`` and ascending numbers ``[..., largest count]`` of what is True in a bool
    ``[..., blocks]``, both int32; -1 behind a list's end."""
    count = mask.sum(-1, dtype=torch.int32)
    blocks = mask.shape[-1]
    step = torch.arange(blocks, dtype=torch.int32, device=mask.device)
    index = torch.where(mask, step, blocks).sort(-1).values[..., : max(1, int(count.max()))]
    return count, index.masked_fill(index == blocks, -1).contiguous()


def attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pattern: Pattern, block: int, scale: float
) -> torch.Tensor:
    """Return plain attention of one query block, float32 ``[SIDE, query heads, dim]``.

    Args:
        q: ``[new tokens, query heads, dim]``; k, v: ``[tokens, KV heads, dim]`` by position.
        block: Which block of `SIDE` queries.
    """
    heads, kv_heads = q.shape[1], k.shape[1]
    first = pattern.prefix + block * SIDE
    queries = q[block * SIDE :][:SIDE].float().unflatten(1, (kv_heads, heads // kv_heads))
    keys, values = (side[: first + SIDE].float() for side in (k, v))
    listed = pattern.for_heads(heads)[:, block].repeat_interleave(SIDE, -1)[:, : len(keys)]
    position = torch.arange(len(keys), device=q.device)
    seen = listed[:, None] & (position <= first + torch.arange(SIDE, device=q.device)[:, None])
    scores = torch.einsum("rhgd,khd->hgrk", queries, keys) * scale
    weights = scores.flatten(0, 1).masked_fill_(~seen, -math.inf).softmax(-1)
    found = torch.einsum("hgrk,khd->rhgd", weights.unflatten(0, (kv_heads, -1)), values)
    return found.flatten(1, 2)
