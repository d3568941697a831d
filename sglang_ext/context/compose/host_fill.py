"""Composes a context on host pages, of which the device sees one piece at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from sglang_ext.context.compose.gather import Filling, Gather
from sglang_ext.kv_offload.host_target import HostTarget
from sglang_ext.tensors.buffers import Buffers


def gather_to_host(gather: Gather, pool: Any, filling: Filling, target: HostTarget) -> None:
    """Bring what a context keeps, the same in all layers, to ``target``, and what it leaves to slots.

    ``pool``: SGLang's; beside it the device needs room for one piece. ``filling``: only its slots behind
    those tokens are written."""
    end = target.tokens
    if not target.is_there:
        _write(gather, pool, filling, target, end)
    if len(filling.kept) > end:
        gather([replace(filling, kept=filling.kept[end:], slots=filling.slots[end:])])


def _write(gather: Gather, pool: Any, filling: Filling, target: HostTarget, end: int) -> None:
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
