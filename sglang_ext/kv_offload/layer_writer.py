"""Copies layers of a prompt's K and V to its host pages, and makes their statistics."""

from __future__ import annotations

import torch

from ragserve_kernels.scatter_d2h import Saver, scatter_d2h
from sglang_ext.kv_offload.host_prefix import HostPrefix
from sglang_ext.kv_offload.offloaded_rows import OffloadedRows

_BUFFERS = 4  # chunks of K or V on their way to host pages


class LayerWriter:
    """FlashD2H (SparseServe, section 3.2.2): one contiguous copy down for K and for V of a chunk, then CPU
    threads spread them over the host pages. Scheduler thread only."""

    def __init__(self, rows: OffloadedRows, chunk: int) -> None:
        """``chunk``: tokens that `write` takes, at most."""
        self._rows = rows
        self._chunk = chunk
        self._saver: Saver | None = None  # made at its first use: its staging buffers are pinned

    def write(self, prefix: HostPrefix, layer: int, first: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Copy K and V of tokens from ``first`` on, which begins a page, into the request's host pages.

        ``k``, ``v``: [tokens, kv_heads, head_dim] on the device, whole pages, contiguous. They must not be
        written to before the copies are done, but may be freed. Host pages are complete after `wait`."""
        rows, shape = self._rows, self._rows.pages.shape
        some = slice(first // shape.block, (first + len(k)) // shape.block)
        numbers, heads = torch.tensor(prefix.numbers[some]), torch.arange(shape.kv_heads)[:, None]
        blocks = rows.pages.pool.view(-1, shape.block, shape.head_dim)
        for half, each in enumerate((k, v)):
            index = ((numbers * 2 + half) * shape.layers + layer) * shape.kv_heads + heads
            scatter_d2h(each, blocks, index, saver=self._saving(each))
        where = rows.first_host + prefix.host[some].long()
        rows.statistics.store(layer, where, k.unflatten(0, (-1, shape.block)))

    def wait(self) -> None:
        """Return when all that has been written is in its host pages; raises what has failed meanwhile."""
        if self._saver is not None:
            self._saver.wait()

    def _saving(self, each: torch.Tensor) -> Saver | None:
        if each.is_cuda and self._saver is None:
            staging = self._chunk * each[0].nbytes
            self._saver = Saver(device=each.device, staging_bytes=staging, buffers=_BUFFERS)
        return self._saver
