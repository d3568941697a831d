"""FlashInfer as a rival of the attention kernels, where it is installed and its kernels compile."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from ragserve.bench.kernels.decode_cases import DecodeCase

WORKSPACE_BYTES = 512 << 20


class RivalMissing(Exception):
    """FlashInfer cannot be measured here; the message says why and goes into the report."""


def flashinfer() -> Any:
    """Return the module. Raise RivalMissing if it is not installed or does not load."""
    try:
        return importlib.import_module("flashinfer")
    # RuntimeError: versions of its parts that do not fit
    except (ImportError, OSError, RuntimeError) as error:
        raise RivalMissing(
            f"FlashInfer is not measured: {type(error).__name__}: {str(error).splitlines()[0]}"
        ) from error


def decode(case: DecodeCase, *, page_size: int, tensor_cores: bool) -> Callable[[int], torch.Tensor]:
    """Plan FlashInfer's paged decode of ``case``; return ``call(layer)`` -> [batch, heads, head_dim].

    ``page_size`` is the case's, or 1: SGLang plans FlashInfer with a page per token. ``tensor_cores``: its
    prefill kernel with one query row per head group, which SGLang takes from a group of 4 on, instead of its
    decode kernel.

    Raises:
        RivalMissing: not installed, or its kernels (compiled at first use) cannot be built.
    """
    import torch

    module = flashinfer()
    layer = case.layers[0]
    batch, heads, head_dim = layer.q.shape
    pages = -(-case.lens.long() // page_size)
    indptr = torch.zeros(batch + 1, dtype=torch.int32)
    indptr[1:] = pages.cumsum(0)
    table = case.table
    if page_size == 1:
        table = (table[:, :, None] * case.page + torch.arange(case.page, device=table.device)).flatten(1)
    indices = torch.cat([table[b, : int(pages[b])] for b in range(batch)]).int()
    last = (case.lens - 1) % page_size + 1
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=layer.q.device)
    wrapper = module.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=tensor_cores)
    sizes = (heads, case.kv_heads, head_dim, page_size)
    dtype = layer.q.dtype
    try:
        wrapper.plan(indptr, indices, last.int().cpu(), *sizes, q_data_type=dtype, kv_data_type=dtype)
    except (OSError, RuntimeError) as error:  # no compiler, or a build that failed
        raise RivalMissing(f"FlashInfer's kernels do not build: {str(error).splitlines()[0]}") from error

    def call(i: int) -> Any:
        at = case.layers[i]
        shape = (-1, page_size, case.kv_heads, head_dim)
        return wrapper.run(at.q, (at.k.view(shape), at.v.view(shape)))

    return call
