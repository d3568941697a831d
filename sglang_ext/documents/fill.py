"""Copies a document's KV from where the model left it into pages, in steps of bounded memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache

import torch

from ragserve_kernels.gather_pages import gather_pages, gather_pages_naive
from ragserve_kernels.kv import HEAD_DIMS, PAGE_SIZES, KVLayers
from sglang_ext.documents.disk.page_files import runs
from sglang_ext.documents.pages.stored_pages import StoredPages
from sglang_ext.documents.pages.types import KvShape

COPY_BYTES = 64 * 2**20  # values of pages put together at a time, on the device of the KV
STAGED = 2  # so many are there at once: one that is put together, and one that is copied


@dataclass(frozen=True, eq=False)
class DocumentKv:
    """KV of one document in buffers that hold others, too.

    Attributes:
        k, v: per layer [slots, kv_heads, head_dim].
        slots: int64 [n], the document's slots in order, on the device of the buffers.
        layers: ``k`` and ``v`` as kernels take them, where at hand: making them waits for the device.
    """

    k: Sequence[torch.Tensor]
    v: Sequence[torch.Tensor]
    slots: torch.Tensor
    layers: KVLayers | None = None

    @classmethod
    def of(
        cls,
        k: Sequence[torch.Tensor] | torch.Tensor,
        v: Sequence[torch.Tensor] | torch.Tensor,
        slots: torch.Tensor | None = None,
    ) -> DocumentKv:
        """Take each layer's buffer; without ``slots`` the buffers hold the document alone."""
        k, v = list(k), list(v)
        return cls(k, v, torch.arange(len(k[0]), device=k[0].device) if slots is None else slots)

    @property
    def is_cuda(self) -> bool:
        return self.slots.is_cuda

    def check(self, shape: KvShape, n_tokens: int) -> None:
        """Raise ValueError unless this is KV of ``n_tokens`` in that shape."""
        expected = f"expected {shape.layers} layers of {shape.dtype} [{shape.kv_heads}, {shape.head_dim}]"
        for name, layers in (("k", self.k), ("v", self.v)):
            got = {(layer.dtype, tuple(layer.shape[1:])) for layer in layers}
            if len(layers) != shape.layers or got != {(shape.dtype, (shape.kv_heads, shape.head_dim))}:
                raise ValueError(f"{name} is {len(layers)} layers of {got}, {expected}")
        if any(len(layer) != len(self.k[0]) for layer in (*self.k, *self.v)):
            raise ValueError("the layers of k and v differ in length, expected one length")
        if len(self.slots) != n_tokens:
            raise ValueError(f"KV of {len(self.slots)} tokens, expected {n_tokens}")

    def pages(self, shape: KvShape, blocks: Sequence[int]) -> torch.Tensor:
        """Gather these blocks into new pages on the device, zero behind the document's end.

        Beside the pages it takes memory for one layer of them without ``layers``, and for all of their values
        if they are quantised.
        """
        size = shape.block
        parts = [
            self.slots[blocks[first] * size : (blocks[first] + count) * size] for first, count in runs(blocks)
        ]
        padding = len(blocks) * size - sum(map(len, parts))  # only the document's last block is not full
        if padding:
            parts.append(self.slots.new_full((padding,), -1))
        slots = torch.cat(parts)
        if self.layers is not None and self.layers.head_dim in HEAD_DIMS and size in PAGE_SIZES:
            pages = gather_pages(self.layers, slots, page_size=size)
        else:
            pages = gather_pages_naive(self.k, self.v, slots, page_size=size)
        return StoredPages.of(pages, shape).pool


def fill_pages(
    pool: torch.Tensor,
    shape: KvShape,
    blocks: Sequence[int],
    pages: Sequence[int],
    kv: DocumentKv,
    *,
    copy_bytes: int | None = None,
) -> None:
    """Copy these blocks of a document, ascending, into pool pages, ``copy_bytes`` of values at a time
    (``COPY_BYTES`` by default, at least one page).

    From a CUDA device the copies are only enqueued: what the current stream is given next waits for them,
    also where this raises. Pages are put together there while those before them are copied on a stream of
    their own; it takes memory for ``STAGED`` times ``copy_bytes`` of pages, beside what `DocumentKv.pages`
    takes.
    """
    step = max(1, (COPY_BYTES if copy_bytes is None else copy_bytes) // shape.value_bytes)
    steps = range(0, len(blocks), step)
    with _copies_beside(kv.slots.device if kv.is_cuda and len(steps) > 1 else None) as copies:
        for at in steps:
            copies.make_room()
            staged = kv.pages(shape, blocks[at : at + step])
            numbers = pages[at : at + step]
            with copies.of(staged):
                for first, count in runs(numbers):
                    target = pool[numbers[first] : numbers[first] + count]
                    target.copy_(staged[first : first + count], non_blocking=True)


class _Copies:
    """Copies of staged pages, at once or in the order of the current stream."""

    def make_room(self) -> None:
        """Do what is needed before the next pages are staged."""

    def of(self, staged: torch.Tensor) -> AbstractContextManager[None]:
        """Copy from ``staged``, which the current stream makes."""
        return nullcontext()

    def join(self) -> None:
        """Let the current stream wait for all copies."""


class _CopiesBeside(_Copies):
    """Copies on a stream beside the current one, which puts the next pages together meanwhile."""

    def __init__(self, device: torch.device) -> None:
        self._current = torch.cuda.current_stream(device)
        self._stream = _stream_beside(self._current)
        self._under_way: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()

    def make_room(self) -> None:
        """Let the current stream wait until fewer than ``STAGED`` copies are under way: the memory of the
        others' pages is its own again."""
        if len(self._under_way) == STAGED:
            staged, copied = self._under_way.popleft()
            self._current.wait_event(copied)
            del staged  # only now: another thread may allocate for the current stream, too

    @contextmanager
    def of(self, staged: torch.Tensor) -> Iterator[None]:
        self._stream.wait_stream(self._current)
        with torch.cuda.stream(self._stream):
            yield
        self._under_way.append((staged, self._stream.record_event()))

    def join(self) -> None:
        self._current.wait_stream(self._stream)


@lru_cache(maxsize=64)
def _stream_beside(stream: torch.cuda.Stream) -> torch.cuda.Stream:
    """The stream of copies beside ``stream``, always the same: torch hands out 32 in turn, so a new one for
    each fill would now and then be the one of the forward passes."""
    return torch.cuda.Stream(stream.device)


@contextmanager
def _copies_beside(device: torch.device | None) -> Iterator[_Copies]:
    """Copies beside the current stream of ``device``, which waits for them at the end, whatever happens;
    None: no stream of their own."""
    copies = _Copies() if device is None else _CopiesBeside(device)
    try:
        yield copies
    finally:
        copies.join()
