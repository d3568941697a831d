"""Whole pages of a composed context whose KV stays in its documents' host pages, without a copy of it.

A page of the context is any tokens of any documents: one reads them by the row of each token, so that
documents of any length lie one behind another, and a page of the context across their borders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from ragserve_kernels.context_gather import context_gather
from ragserve_kernels.kv import KVLayers
from sglang_ext.kv_offload.documents.host_documents import HostDocuments
from sglang_ext.tensors.buffers import Ints, upload


@dataclass(eq=False, slots=True)
class ContextEntry:
    """What a context has in `ContextTable`.

    Attributes:
        drop: gives it back.
        turns: rows of the table's angles, one for each document.
        numbers: int32 [pages], on the device: of the pages that are told there; None before they are.
    """

    drop: Callable[[list[int], torch.Tensor | None], None]
    turns: list[int]
    numbers: torch.Tensor | None = None


@dataclass(eq=False, slots=True)
class ContextPages:
    """The context of one request, from `HostDocuments.hold` until `release`.

    Attributes:
        keys: of its documents, in the order of the prompt.
        sources: host pages of each, int64 [blocks].
        kept: int64 [tokens], ascending positions in the prompt; whole pages of them are read.
        starts: int64 [documents]: position of each one's first token.
        shifts: int64 [documents]: positions by which its keys are moved.
        page_size: tokens of a page of the context.
        described: layers, from the first on, whose pages have got their statistics.
        entry: of a progressive request, whose attention finds pages by their numbers; None for others.
    """

    documents: HostDocuments
    keys: list[str]
    sources: list[Ints]
    kept: Ints
    starts: Ints
    shifts: Ints
    page_size: int
    described: int = 0
    entry: ContextEntry | None = None
    _tables: tuple[torch.Tensor, ...] = field(default=())

    @property
    def count(self) -> int:
        """Whole pages."""
        return len(self.kept) // self.page_size

    @property
    def head_bytes(self) -> int:
        """K and V of a page of one layer and head, as they cross the link: values, or codes."""
        shape = self.documents.pages.shape
        return shape.page_bytes * self.page_size // (shape.block * shape.layers * shape.kv_heads)

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What `gather` reads, made at the first use: `context_gather`'s ``tokens`` and ``turns``, and the
        pages' own numbers, int32 [count]."""
        if not self._tables:
            device, turns = self.documents.device, self.documents.turns(self.shifts)
            numbers = torch.arange(self.count, dtype=torch.int32, device=device)
            self._tables = upload(self._tokens(), device), upload(turns.numpy(), device), numbers
        tokens, turns, numbers = self._tables
        return tokens, turns, numbers

    def gather(
        self,
        into: KVLayers,
        source: torch.Tensor,
        target: torch.Tensor,
        *,
        first_layer: int = 0,
        programs: int | None = None,
    ) -> None:
        """Load pages, ``source`` by their numbers in the context: see `context_gather`."""
        tokens, turns, _ = self.tensors
        context_gather(
            *(self.documents.host, into, tokens, turns, source, target),
            first_layer=first_layer,
            programs=programs,
        )

    def release(self) -> None:
        """Let the documents go, once the device has read what it was given to read."""
        entry, self.entry = self.entry, None
        if entry is not None:
            entry.drop(entry.turns, entry.numbers)
        keys, self.keys = self.keys, []
        self.documents.let_go(keys)

    def _tokens(self) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
        kept, block = self.kept[: self.count * self.page_size], self.documents.pages.shape.block
        document = np.searchsorted(self.starts, kept, side="right") - 1
        token = kept - self.starts[document]
        first = np.cumsum([0, *map(len, self.sources[:-1])], dtype=np.int64)
        pages = np.concatenate(self.sources)[first[document] + token // block]
        rows = np.stack((pages * block + token % block, document), -1).astype(np.int32)
        return rows.reshape(self.count, self.page_size, 2)
