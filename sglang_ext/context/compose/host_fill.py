"""Composes a context on host pages, of which the device sees one piece at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from sglang_ext.context.compose.gather import Filling, Gather
from sglang_ext.tensors.buffers import Buffers


class Target(Protocol):
    """Takes KV in whole pages, as `sglang_ext.kv_offload.host_target.HostTarget` does."""

    piece: int
    """Tokens at a time, at most."""

    @property
    def tokens(self) -> int:
        """The first tokens of the context, which it takes."""

    @property
    def is_there(self) -> bool:
        """True if they are where it reads them already."""

    def write(self, first: int, k: Sequence[torch.Tensor], v: Sequence[torch.Tensor]) -> None:
        """Take the KV from token ``first`` on, per layer [tokens, kv_heads, head_dim]."""


def gather_to_host(gather: Gather, pool: Any, filling: Filling, target: Target) -> None:
    """Bring what a context keeps, the same in all layers, to ``target``, and what it leaves to slots.

    ``pool``: SGLang's; beside it the device needs room for one piece. ``filling``: only its slots behind
    those tokens are written."""
    end = target.tokens
    if not target.is_there:
        _write(gather, pool, filling, target, end)
    if len(filling.kept) > end:
        gather([replace(filling, kept=filling.kept[end:], slots=filling.slots[end:])])


def _write(gather: Gather, pool: Any, filling: Filling, target: Target, end: int) -> None:
    k, v = (
        [each.new_empty((min(target.piece, end), *each.shape[1:])) for each in half]
        for half in (pool.k_buffer, pool.v_buffer)
    )
    places = torch.arange(len(k[0]), device=filling.slots.device)
    for first in range(0, end, target.piece):
        count = min(target.piece, end - first)
        part = replace(filling, kept=filling.kept[first : first + count], slots=places[:count])
        own = Buffers(*([each[:count] for each in half] for half in (k, v)))
        gather([part], own)
        target.write(first, own.k, own.v)
