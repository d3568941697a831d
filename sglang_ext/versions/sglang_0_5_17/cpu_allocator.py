"""KV slot allocators of the CPU platform: SGLang's own, with PyTorch instead of Triton kernels."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator, alloc_extend_naive
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.utils import get_num_new_pages


class _TorchPagedAllocator(PagedTokenToKVPoolAllocator):
    """SGLang's page-aligned allocator with PyTorch instead of its two Triton kernels."""

    free_pages: torch.Tensor  # int64, page numbers

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> torch.Tensor | None:
        """Slots int64 [extend_num_tokens] that continue each request's last page; None when the
        pool is full.
        """
        if self.need_sort and extend_num_tokens // self.page_size + len(prefix_lens) + 1 > len(
            self.free_pages
        ):
            self.merge_and_sort_free()
        if num_new_pages is None:
            num_new_pages = get_num_new_pages(
                seq_lens=seq_lens_cpu, page_size=self.page_size, prefix_lens=prefix_lens_cpu
            )
        if num_new_pages > len(self.free_pages):
            return None
        slots = torch.empty((extend_num_tokens,), dtype=torch.int64, device=self.device)
        alloc_extend_naive(
            prefix_lens, seq_lens, last_loc, self.free_pages, slots, self.page_size, self.device
        )
        self.free_pages = self.free_pages[num_new_pages:]
        return slots

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        """Allocate a slot per request, int64 [batch]: the next one of its last page, or the first of a new
        page."""
        if self.need_sort and len(seq_lens) > len(self.free_pages):
            self.merge_and_sort_free()
        starts_page = (seq_lens - 1) % self.page_size == 0
        new_pages = int(starts_page.sum())
        if new_pages > len(self.free_pages):
            return None
        slots = last_loc.to(torch.int64) + 1
        slots[starts_page] = self.free_pages[:new_pages] * self.page_size
        self.free_pages = self.free_pages[new_pages:]
        return slots


def make_allocator(
    size: int, *, page_size: int, **kwargs: Any
) -> TokenToKVPoolAllocator | PagedTokenToKVPoolAllocator:
    """The allocator for a page size, with the signature that SGLang expects of an out-of-tree platform."""
    if page_size == 1:
        return TokenToKVPoolAllocator(size, **kwargs)
    return _TorchPagedAllocator(size, page_size=page_size, **kwargs)
