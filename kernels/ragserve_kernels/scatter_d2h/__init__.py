"""Save new KV to host blocks: one contiguous copy down, then CPU threads scatter (SparseServe, 3.2.2).

There is no Triton kernel on purpose: one that writes to the host takes SMs from the prefill that it should
hide behind.
"""

from __future__ import annotations

import torch

from ragserve_kernels.dispatch import FLOAT_DTYPES, INT_DTYPES, check, use_naive
from ragserve_kernels.kv import check_head_dim
from ragserve_kernels.scatter_d2h.naive import scatter_d2h_naive
from ragserve_kernels.scatter_d2h.saver import Saver

__all__ = ["Saver", "scatter_d2h", "scatter_d2h_naive"]


def scatter_d2h(
    src: torch.Tensor, host: torch.Tensor, index: torch.Tensor, *, saver: Saver | None = None
) -> None:
    """Write ``src``, tokens by heads, into per-head host blocks.

    Args:
        src: ``[tokens, kv_heads, head_dim]``, contiguous: the K or V that a prefill of one layer made.
        host: ``[blocks, block_tokens, head_dim]`` in host memory, the same dtype, contiguous; pinned if a GPU
            is to read it back. Rows of a last, partial block beyond ``tokens`` stay as they are.
        index: int32 or int64 ``[kv_heads, ceil(tokens / block_tokens)]`` on the CPU: the host block of each
            head's blocks, all different; a negative one is not saved.
        saver: saves a ``src`` on a GPU in the background: ``host`` is complete after ``saver.wait()``; until
            then ``src`` may be freed, but not written to. Without one ``host`` is complete on return.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices that do not fit, or an index beyond ``host``.
    """
    check("src", src, FLOAT_DTYPES, (None, None, None), dense=True)
    check_head_dim(src.shape[2])
    check("host", host, src.dtype, (None, None, src.shape[2]), dense=True)
    if host.is_cuda or index.is_cuda:
        raise TypeError("host and index must be in host memory.")
    if host.storage_offset() * host.element_size() % 16:
        raise ValueError("host must be aligned to 16 bytes.")
    if host.shape[1] < 1:
        raise ValueError("host blocks hold no tokens.")
    check("index", index, INT_DTYPES, (src.shape[1], -(-src.shape[0] // host.shape[1])))
    if index.numel() and int(index.max()) >= host.shape[0]:
        raise ValueError(f"index names block {int(index.max())}; host has {host.shape[0]}.")
    if src.numel() == 0:
        return
    if src.is_cuda and saver is not None and not use_naive():
        saver.submit(src, host, index)
    else:
        scatter_d2h_naive(src, host, index)
