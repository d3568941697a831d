"""Contexts in documents' host pages as progressive attention knows them: by the numbers of their pages.

It reads pages on the host itself, those of all requests in one launch, within a CUDA graph that is older than
any document. So rows and angles of the contexts' tokens lie at addresses that never change."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from ragserve_kernels.context_gather import HostCodes, HostContexts
from sglang_ext.documents.pages.types import IntegrityError, KvShape
from sglang_ext.kv_offload.documents.context_pages import ContextEntry, ContextPages
from sglang_ext.kv_offload.documents.host_documents import as_host
from sglang_ext.tensors.buffers import upload


class ContextTable:
    """Scheduler thread only. Numbers are those of `HostPages`.

    Attributes:
        shape: of the documents' pages. contexts: what kernels read. is_open: documents may be read.
    """

    def __init__(self, shape: KvShape, half: int, numbers: int, page: int, device: torch.device) -> None:
        """``shape``: of the documents' pages. ``half``: angles of a key. ``numbers``: of pages; ``page``:
        tokens of each. A context has angles for each of its documents: there is room for as many documents as
        there are pages of theirs, of all contexts together."""
        rows = numbers * max(1, page // shape.block)
        self.shape = shape
        self.is_open = False
        self.contexts = HostContexts(
            as_host(shape.empty_pages(0), shape),
            torch.zeros(1, dtype=torch.int64, device=device),
            torch.full((numbers, page, 2), -1, dtype=torch.int32, device=device),
            torch.zeros(rows, 2, half, device=device),
        )
        self._free = list(range(rows - 1, -1, -1))  # of the angles
        self._dropped: list[torch.Tensor] = []

    @property
    def used(self) -> int:
        """Rows of angles that contexts have."""
        return len(self.contexts.turns) - len(self._free)

    def open(self, host: torch.Tensor | HostCodes) -> None:
        """Let contexts lie in these pages, before the first of them."""
        self.contexts = replace(self.contexts, host=host)
        self.contexts.base.fill_(self.contexts.pool.data_ptr())
        self.is_open = True

    def take(self, context: ContextPages) -> bool:
        """Reserve what a context needs here until it is released. Return False, the same on all ranks, if
        there is less, and nothing is reserved."""
        count = len(context.keys)
        if count > len(self._free):
            return False
        context.entry = ContextEntry(self.drop, [self._free.pop() for _ in range(count)])
        return True

    def enter(self, context: ContextPages, numbers: torch.Tensor) -> None:
        """Let kernels find the context's pages by ``numbers``, int32 [pages] on the device.

        On the stream of the forward passes, behind `settle`: steps that have been launched may read what
        these rows were before."""
        entry = context.entry
        if entry is None:
            raise IntegrityError("a context is to be read by its pages' numbers and has no angles")
        tokens, turns, _ = context.tensors
        rows = upload(np.array(entry.turns, dtype=np.int64), numbers.device)
        entry.numbers = numbers
        self.contexts.turns.index_copy_(0, rows, turns)
        placed = torch.stack((tokens[..., 0], rows[tokens[..., 1].long()].int()), -1)
        self.contexts.tokens.index_copy_(0, numbers.long(), placed)

    def drop(self, turns: list[int], numbers: torch.Tensor | None) -> None:
        """Undo `take` and `enter`; kernels find the pages until the next `settle`."""
        self._free += reversed(turns)
        if numbers is not None:
            self._dropped.append(numbers)

    def settle(self) -> None:
        """Forget the pages that were dropped, before the next forward pass and behind the loads that read
        them."""
        for numbers in self._dropped:
            if numbers.is_cuda:  # made on the stream of the allocator
                numbers.record_stream(torch.cuda.current_stream())
            self.contexts.tokens.index_fill_(0, numbers.long(), -1)
        self._dropped.clear()

    def check(self, contexts: list[ContextPages]) -> None:
        """Raise IntegrityError unless just these contexts have angles here, each of them its own, and their
        pages are told by number."""
        self.settle()
        entries = [each.entry for each in contexts if each.entry is not None]
        rows = [row for entry in entries for row in entry.turns]
        if sorted([*rows, *self._free]) != list(range(len(self.contexts.turns))):
            raise IntegrityError(f"{len(rows)} rows of angles are in use and {len(self._free)} are free")
        told = set((self.contexts.tokens[:, 0, 0] >= 0).nonzero().flatten().tolist())
        wanted = [n for entry in entries if entry.numbers is not None for n in entry.numbers.tolist()]
        if told != set(wanted) or len(wanted) != len(told):
            raise IntegrityError(f"{len(told)} pages are told as those of contexts, which have {len(wanted)}")
