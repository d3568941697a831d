"""Plain types of the document cache: shapes, document metadata, load tickets, configuration.

A *page* holds one *block* (``block`` consecutive tokens) of one document, over all layers, K and V. A
*document* is identified by its key, a digest of namespace, model, tokenizer and token ids; lookups compare
the token ids as well."""

from __future__ import annotations

import math
import threading
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from sglang_ext.documents.pages.page_format import PageLayout, valid_key, valid_namespace

DTYPE_CODES = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}
_CODES_8 = 4  # dtype code of pages of 8 bits
PAGE_BITS = (16, 8)
OWN_BACKEND = "file"
SGLANG_FILE = "sglang-file"  # SGLang's own backend called `file`, which checks nothing


class IntegrityError(RuntimeError):
    """A page has no owner or two, or a counter is wrong: a bug, never the user's fault."""


class StoreInUse(RuntimeError):
    """Another process owns the folder; two would break each other's byte budget."""


@dataclass(frozen=True)
class KvShape:
    """Shape of one rank's KV: ``kv_heads`` of this rank, ``block`` tokens per page. Raises ValueError.

    ``bits``: 16 stores the values as they are, in their ``dtype``; 8 stores codes, see `StoredPages`."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    block: int = 16
    bits: int = 16

    def __post_init__(self) -> None:
        if min(self.layers, self.kv_heads, self.head_dim, self.block) < 1:
            raise ValueError(f"every size of a KV shape is at least 1: {self}")
        if self.dtype not in DTYPE_CODES:
            raise ValueError(
                f"KV of {self.dtype} cannot be kept: supported are float32, float16 and bfloat16"
            )
        if self.bits not in PAGE_BITS or (self.bits == 8 and self.head_dim % 4):
            raise ValueError(f"pages have 16 bits, or 8 with heads of a multiple of 4: {self}")

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """Values of a page: [2 (K, V), layers, kv_heads, block, head_dim]; one head's block of one layer is
        contiguous."""
        return (2, self.layers, self.kv_heads, self.block, self.head_dim)

    @property
    def page_rows(self) -> int:
        """Rows of ``head_dim`` values in a page."""
        return 2 * self.layers * self.kv_heads * self.block

    @property
    def value_bytes(self) -> int:
        """Bytes of a page's values in ``dtype``."""
        return self.page_rows * self.head_dim * self.dtype.itemsize

    @property
    def page_bytes(self) -> int:
        """Bytes of a page: its values, or a code for each and 4 bytes for each row."""
        return self.value_bytes if self.bits != 8 else self.page_rows * (self.head_dim + 4)

    @property
    def page_shape(self) -> tuple[int, ...]:
        """Shape of a page in a pool of ``page_dtype``."""
        return self.block_shape if self.bits != 8 else (self.page_bytes,)

    @property
    def page_dtype(self) -> torch.dtype:
        return self.dtype if self.bits != 8 else torch.uint8

    def empty_pages(self, count: int, device: torch.device | None = None) -> torch.Tensor:
        """Return uninitialised memory for so many pages, [count, *page_shape]."""
        return torch.empty((count, *self.page_shape), dtype=self.page_dtype, device=device)

    def blocks(self, n_tokens: int) -> int:
        """Number of pages of a document of ``n_tokens``; the last one is padded with zeros."""
        return -(-n_tokens // self.block)

    def layout(self, fingerprint: str, rank: int, world: int) -> PageLayout:
        """Layout that a record must have for this rank to use its pages."""
        sizes = (self.layers, self.kv_heads, self.head_dim, self.block)
        code = DTYPE_CODES[self.dtype] if self.bits != 8 else _CODES_8
        return PageLayout(fingerprint, rank, world, *sizes, code, self.page_bytes)


@dataclass(frozen=True)
class DocumentMeta:
    """Identity of a document: its own ``token_ids`` and the ``fingerprint`` of model, tokenizer and KV
    dtype. Raises ValueError when malformed.
    """

    key: str
    namespace: str
    token_ids: Sequence[int]
    n_tokens: int
    fingerprint: str

    def __post_init__(self) -> None:
        if not valid_key(self.key):
            raise ValueError(f"not a document key: {self.key!r} (1 to 128 letters, digits, '_' or '-')")
        if not valid_namespace(self.namespace):
            raise ValueError(f"not a namespace: {self.namespace!r}")
        if self.n_tokens < 1 or self.n_tokens != len(self.token_ids):
            raise ValueError(
                f"document {self.key}: n_tokens {self.n_tokens}, but {len(self.token_ids)} token ids"
            )


@dataclass(frozen=True)
class DiskConfig:
    """The disk tier of one rank."""

    path: Path | None
    """Folder of `file` and `sglang-file`; None where the backend keeps its pages elsewhere."""
    budget_bytes: int = 64 * 2**30
    """File bytes that this rank may use, records included. Other backends keep their own limits."""
    backend: str = OWN_BACKEND
    """`file` (ours: checked document files), `sglang-file` (SGLang's), or another name of SGLang's
    StorageBackendFactory: nixl, mooncake, hf3fs, aibrix, eic, simm, mori, dynamic."""
    queue_bytes: int = 256 * 2**20
    """Limit of the write queue, in page bytes. Beyond it documents wait on host until there is room."""
    fsync: Literal["none", "document"] = "none"
    """`none`: after a power cut a torn file is a miss, recognised by its CRCs. `document`: each file is
    synced before it counts as stored.
    """
    extra: dict[str, Any] | None = None
    """Passed to other backends as SGLang's ``hicache_storage_backend_extra_config``."""

    def __post_init__(self) -> None:
        if self.budget_bytes < 0 or self.queue_bytes < 0:
            raise ValueError("the disk budget and the write queue cannot be negative")
        if self.backend in (OWN_BACKEND, SGLANG_FILE) and self.path is None:
            raise ValueError(f"the {self.backend} backend needs a folder: set DiskConfig.path")


@dataclass(frozen=True)
class RemoteConfig:
    """The remote tier of one rank: a store that engines share."""

    store: str
    """`mooncake`, or `shared` for a folder."""
    options: dict[str, Any]
    """Of `mooncake_options`; ``folder`` and ``bytes`` of a folder."""
    journal: Path | None = None
    """File of the deletions that the store has not confirmed; None keeps them in memory."""
    min_value: float = 1.0
    """Threshold of `DocumentValues`, milliseconds per MiB."""
    prefill_ms: tuple[float, float, float] | None = None
    """Coefficients of exact prefill; None without a cost profile."""
    queue_bytes: int = 256 * 2**20
    """Limit of documents on their way to the store, in page bytes."""
    retry_s: float = 1.0
    """Seconds between two attempts to reach a store that is away."""


class LoadTicket:
    """Progress of one ``load``. ``ok`` and ``bytes_`` are final once ``done()``."""

    def __init__(self, parts: Sequence[LoadPart] = (), reason: str = "") -> None:
        self._parts = tuple(parts)
        self._reason = reason

    def done(self) -> bool:
        """True once every part has ended."""
        return all(part.finished.is_set() for part in self._parts)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until done; False on timeout. Not for the scheduler's loop."""
        return all(part.finished.wait(timeout_s) for part in self._parts)

    @property
    def ok(self) -> bool:
        """True when all requested blocks are on host."""
        return not self.reason and self.done()

    @property
    def reason(self) -> str:
        """Reason of failure: no_room, unknown, not_on_disk, removed, closed or a fault; empty otherwise."""
        return self._reason or next((part.reason for part in self._parts if part.reason), "")

    @property
    def late(self) -> bool:
        """True for a load from the shared store that is not worth waiting for any longer."""
        now = time.monotonic()
        return any(now > part.late_at and not part.finished.is_set() for part in self._parts)

    @property
    def tier(self) -> str:
        """The slowest tier that it reads: disk or remote; host where all is there already."""
        if not self._parts:
            return "host"
        return "remote" if any(part.tier == "remote" for part in self._parts) else "disk"

    @property
    def bytes_(self) -> int:
        """Page bytes moved to host for this ticket, without those that an earlier ticket requested."""
        return sum(part.bytes_ for part in self._parts if part.counted_by is self)


@dataclass(eq=False)
class LoadPart:
    """Blocks of one document being loaded together; several tickets may wait for one part."""

    blocks: list[int]
    pages: list[int]
    finished: threading.Event = field(default_factory=threading.Event)
    reason: str = ""
    bytes_: int = 0
    counted_by: LoadTicket | None = None
    tier: str = "disk"
    late_at: float = math.inf  # on the clock of time.monotonic


def whole_pages(ids: array[int], page_size: int) -> array[int]:
    """A document's ids with padding up to a whole page, which is all that the tree keeps. No token attends to
    what is behind it, so the document's KV is the same.
    """
    return ids + array("q", bytes(8 * (-len(ids) % page_size)))
