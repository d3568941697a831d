"""Page statistics of the KV pool, kept with its pages: a page's owner, or the prefix cache, finds them right.

Statistics of a full page are made from the pool, for all layers at once, after the forward pass that filled
it. A page that is not full is its request's newest, and attended to whatever it scores. Freed pages need
nothing: their next owner fills them first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ragserve_kernels.dispatch import forced_naive
from ragserve_kernels.kv import KVLayers
from ragserve_kernels.page_stats import PageStats, page_stats

_CHECKED_AT_ONCE = 512  # pages: a check of a large pool must not need much memory


class PageStatistics:
    """The statistics of one rank's pool. Scheduler thread only.

    Raises:
        RuntimeError: the device has no room for them.
    """

    def __init__(
        self, pool: Any, req_to_token: torch.Tensor, page_size: int, logical_page: int, offloaded: int = 0
    ) -> None:
        """``offloaded``: pages on the host whose statistics are kept, behind those of the pool's pages."""
        self._table = req_to_token
        self.page_size = page_size
        self._stream: torch.cuda.Stream | None = None
        self._quantized = pool if hasattr(pool, "page_statistics") else None
        try:
            if self._quantized is None:
                self._kv = KVLayers(list(pool.k_buffer), list(pool.v_buffer))
                self.tables = PageStats.zeros(self._kv, page_size, logical_page, offloaded)
            else:
                self.tables = pool.new_statistics(logical_page)
        except torch.OutOfMemoryError as error:
            share = 1 / logical_page + 1 / (2 * page_size)
            raise RuntimeError(
                f"no room for the page statistics of sparse decoding, {share:.1%} of the KV pool and of "
                "what kv_offload_bytes or kv_offload_tokens holds: lower mem_fraction_static, "
                f"max_total_tokens or these ({error})"
            ) from error

    @property
    def bytes(self) -> int:
        """Size of all tables."""
        tables = (self.tables.k_min, self.tables.k_max, self.tables.k_center)
        return sum(table.numel() * table.element_size() for table in tables)

    def after_extend(self, spans: Iterable[tuple[int, int, int]]) -> None:
        """Make the statistics of the pages that a forward pass filled.

        ``spans``: per request its row, and from and to which token its KV was written. The page before the
        first new token is made again: a request may have ended with a page just full."""
        filled = []
        for row, start, end in spans:
            first, last = max(0, start - 1) // self.page_size, end // self.page_size
            if last > first:
                filled.append(
                    self._table[row, first * self.page_size : last * self.page_size : self.page_size]
                )
        if filled:
            self._make((torch.cat(filled) // self.page_size).to(torch.int32))

    def after_request(self, row: int, tokens: int) -> None:
        """Make the statistics of the last page of a request that ends, if its ``tokens`` tokens just fill it.

        With the overlap scheduler, a step that may still run writes the last token's KV: hence after all that
        was launched on the stream of the forward passes."""
        if not tokens or tokens % self.page_size:
            return
        page = (self._table[row, tokens - self.page_size : tokens - self.page_size + 1] // self.page_size).to(
            torch.int32
        )
        if self._stream is None:
            self._make(page)
            return
        self._stream.wait_stream(torch.cuda.current_stream(page.device))
        with torch.cuda.stream(self._stream):
            self._make(page)
        page.record_stream(self._stream)

    def follow(self) -> None:
        """Note the current stream, that of the forward passes; requests end on another one."""
        if self.tables.k_min.is_cuda:
            self._stream = torch.cuda.current_stream(self.tables.k_min.device)

    @contextmanager
    def on_forward_stream(self) -> Iterator[None]:
        """Launch work behind the forward passes so far, and before the next one."""
        if self._stream is None:
            yield
        else:
            with torch.cuda.stream(self._stream):
                yield

    def before_decode(self, rows: torch.Tensor, lens: torch.Tensor, lens_cpu: torch.Tensor | None) -> None:
        """Make the statistics of the pages that the step before filled.

        They are those of requests whose newest token, not yet written, begins a page. ``lens_cpu``: if given,
        it saves the launch in most steps."""
        if lens_cpu is not None and not bool(((lens_cpu > 1) & ((lens_cpu - 1) % self.page_size == 0)).any()):
            return
        pages = self._table[rows, (lens - 2).clamp_min(0)] // self.page_size
        full = (lens > 1) & ((lens - 1) % self.page_size == 0)
        self._make(pages.masked_fill(~full, -1).to(torch.int32))

    def _make(self, pages: torch.Tensor) -> None:
        """Make the statistics of full ``pages``, int32 [n], in all layers; negative ones are skipped."""
        if self._quantized is not None:
            self._quantized.page_statistics(pages, self.tables)
        else:
            page_stats(self._kv, pages, self.tables, page_size=self.page_size)

    def settle(self) -> None:
        """Wait for the device, before a check."""
        if self.tables.k_min.is_cuda:
            torch.cuda.synchronize(self.tables.k_min.device)

    def pages_of(self, row: int, count: int) -> torch.Tensor:
        """Return the first ``count`` pages of a request, int32 [count]."""
        return (self._table[row, : count * self.page_size : self.page_size] // self.page_size).to(torch.int32)

    def differing(self, pages: torch.Tensor) -> list[int]:
        """Return the full ``pages`` [n] whose statistics differ from what the plain forward makes."""
        return [
            page
            for some in torch.unique(pages.to(torch.int32)).split(_CHECKED_AT_ONCE)
            for page in self._differing(some)
        ]

    def _differing(self, pages: torch.Tensor) -> list[int]:
        if not len(pages):
            return []
        rows = self.tables.rows(pages)
        places = {"k_min": rows, "k_max": rows, "k_center": pages.long()}
        kept = {name: getattr(self.tables, name)[:, place].clone() for name, place in places.items()}
        with forced_naive():
            self._make(pages)
        bad = torch.zeros(len(pages), dtype=torch.bool, device=pages.device)
        for name, place in places.items():
            table = getattr(self.tables, name)
            bad |= (table[:, place] != kept[name]).view(len(table), len(pages), -1).any(-1).any(0)
            table[:, place] = kept[name]
        return [int(page) for page in pages[bad].tolist()]
