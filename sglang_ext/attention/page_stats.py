"""Page statistics of the KV pool, kept with the pages: whoever holds a page, now or through the prefix cache,
finds its statistics right.

The rule: statistics of a full page are made from the pool, for all layers at once, after the forward pass
that filled it. A page that is not full is its request's newest, which is attended to whatever it scores.
Freed pages need nothing: their next owner fills them first."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ragserve_kernels.dispatch import KVLayers, forced_naive
from ragserve_kernels.page_stats import PageStats, page_stats

_CHECKED_AT_ONCE = 512  # pages: a check of a large pool must not need much memory


class Statistics:
    """Over the pool of one rank."""

    def __init__(self, pool: Any, req_to_token: torch.Tensor, page_size: int, logical_page: int) -> None:
        self._table = req_to_token
        self._page = page_size
        self._stream: torch.cuda.Stream | None = None
        self._quantized = pool if hasattr(pool, "page_statistics") else None
        if self._quantized is None:
            self._kv = KVLayers(list(pool.k_buffer), list(pool.v_buffer))
            self.tables = PageStats.zeros(self._kv, page_size, logical_page)
        else:
            self.tables = pool.new_statistics(logical_page)

    @property
    def bytes(self) -> int:
        """Of all tables."""
        tables = (self.tables.k_min, self.tables.k_max, self.tables.k_center)
        return sum(table.numel() * table.element_size() for table in tables)

    def after_extend(self, spans: Iterable[tuple[int, int, int]]) -> None:
        """Pages filled by a forward pass: per request its row, and from and to which token its KV was
        written.

        The page before the first new token is made again as well: a request may end with a page just full,
        and nobody was there to do it."""
        filled = []
        for row, start, end in spans:
            first, last = max(0, start - 1) // self._page, end // self._page
            if last > first:
                filled.append(self._table[row, first * self._page : last * self._page : self._page])
        if filled:
            self._make((torch.cat(filled) // self._page).to(torch.int32))

    def after_request(self, row: int, tokens: int) -> None:
        """A request ends whose first ``tokens`` tokens may be cached: its last page may be just full.

        With the overlap scheduler the last token's KV is written by a step that may still run: hence after
        all that was launched there."""
        if not tokens or tokens % self._page:
            return
        page = (self._table[row, tokens - self._page : tokens - self._page + 1] // self._page).to(torch.int32)
        if self._stream is None:
            self._make(page)
            return
        self._stream.wait_stream(torch.cuda.current_stream(page.device))
        with torch.cuda.stream(self._stream):
            self._make(page)
        page.record_stream(self._stream)

    def follow(self) -> None:
        """Called on the stream of the forward passes, which is not the one on which requests end."""
        if self.tables.k_min.is_cuda:
            self._stream = torch.cuda.current_stream(self.tables.k_min.device)

    def before_decode(self, rows: torch.Tensor, lens: torch.Tensor, lens_cpu: torch.Tensor | None) -> None:
        """Pages that the step before filled: those of requests whose newest token, not yet written, begins a
        page.
        """
        if lens_cpu is not None and not bool(((lens_cpu > 1) & ((lens_cpu - 1) % self._page == 0)).any()):
            return
        pages = self._table[rows, (lens - 2).clamp_min(0)] // self._page
        full = (lens > 1) & ((lens - 1) % self._page == 0)
        self._make(pages.masked_fill(~full, -1).to(torch.int32))

    def _make(self, pages: torch.Tensor) -> None:
        """Statistics of full ``pages`` int32 [n] in all layers; negative ones are skipped."""
        if self._quantized is not None:
            self._quantized.page_statistics(pages, self.tables)
        else:
            page_stats(self._kv, pages, self.tables, page_size=self._page)

    def settle(self) -> None:
        """Wait for what the device has yet to write, before a check."""
        if self.tables.k_min.is_cuda:
            torch.cuda.synchronize(self.tables.k_min.device)

    def pages_of(self, row: int, count: int) -> torch.Tensor:
        """The first ``count`` pages of a request, int32 [count]."""
        return (self._table[row, : count * self._page : self._page] // self._page).to(torch.int32)

    def differing(self, pages: torch.Tensor) -> list[int]:
        """Those of the full ``pages`` [n] whose statistics are not what the pool gives, by the plain
        implementation.
        """
        return [
            page
            for some in torch.unique(pages.to(torch.int32)).split(_CHECKED_AT_ONCE)
            for page in self._differing(some)
        ]

    def _differing(self, pages: torch.Tensor) -> list[int]:
        if not len(pages):
            return []
        per = self.tables.per_page
        rows = (pages.long()[:, None] * per + torch.arange(per, device=pages.device)).flatten()
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
