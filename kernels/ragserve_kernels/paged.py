"""Host side of the decode operations: the batch, its KV, selections of pages, and launch sizes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from ragserve_kernels.dispatch import FLOAT_DTYPES, check, next_power_of_2
from ragserve_kernels.kv import HeadRows, check_head_dim, check_page_size, query_group, rows_of
from ragserve_kernels.quantize_kv.types import QuantizedKV

__all__ = [
    "CPU_PROGRAMS",
    "KV",
    "KVPair",
    "KVRows",
    "PageSelection",
    "PagedBatch",
    "check_attention",
    "check_query",
    "check_selection",
    "code_precision",
    "kv_rows",
    "resident_programs",
    "tile_rows",
    "tile_tokens",
]

KV = torch.Tensor | QuantizedKV
"""K or V of one layer, ``[slots, kv_heads, head_dim]`` as in SGLang's pool, plain or quantised."""

KVPair = tuple[KV, KV]

CPU_PROGRAMS = 6
"""Programs per launch in Triton's interpreter: enough that requests are split and merged."""


@dataclass(frozen=True, eq=False)
class PagedBatch:
    """The requests of a decode step and where their KV lies; checked once, when it is made.

    The tensors may be views of static buffers whose contents change: only shapes, dtypes and devices are
    checked.

    Attributes:
        page_table: int32 ``[batch, max_pages]``: physical pages; a token's slot is page * page_size + offset.
            Only entries of pages that hold a token are read.
        seq_lens: int32 ``[batch]``: tokens of each request, the newest included; 0 gives a zero output.
        page_size: tokens per page.
        block_size: tokens per block, the unit of a :class:`PageSelection`; a power of two up to 512. Default:
            a page.

    Raises:
        ValueError, TypeError: sizes, shapes, dtypes or devices that do not fit.
    """

    page_table: torch.Tensor
    seq_lens: torch.Tensor
    page_size: int
    block_size: int = 0

    def __post_init__(self) -> None:
        check_page_size(self.page_size)
        block = self.block_size or self.page_size
        if block < 1 or block & (block - 1) or block > 512:
            raise ValueError(f"Block size {block} is not supported; expected a power of two up to 512.")
        object.__setattr__(self, "block_size", block)
        check("seq_lens", self.seq_lens, torch.int32, (None,))
        check("page_table", self.page_table, torch.int32, (self.size, None), like=self.seq_lens)

    @property
    def size(self) -> int:
        """Requests."""
        return self.seq_lens.shape[0]


class PageSelection(NamedTuple):
    """Logical blocks per request and KV head, as ``page_select`` chooses or ranks them."""

    blocks: torch.Tensor
    """int32 [batch, kv_heads, capacity], distinct; entries past the count are unspecified. With several
    layers [layers, batch, ...].
    """
    counts: torch.Tensor
    """int32 [batch, kv_heads] or [layers, batch, kv_heads]: how many of the entries are valid."""


def check_query(q: torch.Tensor, batch: PagedBatch) -> None:
    """Check queries ``[batch, heads, head_dim]``, or ``[layers, batch, ...]``, against the batch."""
    check("q", q, FLOAT_DTYPES, (*q.shape[:-3], batch.size, None, None), like=batch.page_table)
    check_head_dim(q.shape[-1])


def check_attention(q: torch.Tensor, kv: KVPair, batch: PagedBatch) -> int:
    """Check the inputs of one layer's attention; return the bits of quantised K and V, 0 for plain ones.

    Raises:
        ValueError, TypeError: named after the argument that does not fit.
    """
    check_query(q, batch)
    head_dim = q.shape[2]
    k, v = kv
    bits, dtype = 0, q.dtype
    if isinstance(k, QuantizedKV) and isinstance(v, QuantizedKV):
        if k.bits != v.bits:
            raise ValueError(f"k has {k.bits} bits and v has {v.bits}; expected the same.")
        bits, dtype = k.bits, k.codes.dtype
    elif not (isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)):
        raise TypeError("k and v must both be tensors or both be QuantizedKV.")
    for name, cache in (("k", k), ("v", v)):
        values = cache.codes if isinstance(cache, QuantizedKV) else cache
        check(name, values, dtype, (None, None, None), like=q)
    if tuple(k.shape) != tuple(v.shape) or k.shape[2] != head_dim:
        raise ValueError(
            f"k and v have shapes {list(k.shape)} and {list(v.shape)}; "
            f"expected the same, ending in {head_dim}."
        )
    query_group(q.shape[1], k.shape[1])
    return bits


def check_selection(
    selection: PageSelection, q: torch.Tensor, kv_heads: int, capacity: int | None = None
) -> None:
    """Check a selection for the queries ``q``; ``capacity`` None stands for any."""
    shape = (*q.shape[:-2], kv_heads)
    for name, tensor, wanted in (
        ("blocks", selection.blocks, (*shape, capacity)),
        ("counts", selection.counts, shape),
    ):
        check(name, tensor, torch.int32, wanted, like=q)
        # layers may lie in wider tables
        if not (tensor[:1] if q.dim() == 4 else tensor).is_contiguous():
            raise ValueError(f"{name} must be contiguous.")


class KVRows(NamedTuple):
    """K and V of a layer as kernels take them, and their parameters: a scale and a zero point packed into
    one int32. Plain caches repeat the values."""

    k: HeadRows
    v: HeadRows
    k_params: HeadRows
    v_params: HeadRows


def kv_rows(kv: KVPair) -> KVRows:
    """Return K and V as an argument of a kernel."""
    values = [rows_of(each.codes if isinstance(each, QuantizedKV) else each) for each in kv]
    packed = [rows_of(each.params.view(torch.int32)[..., 0]) for each in kv if isinstance(each, QuantizedKV)]
    return KVRows(*values, *(packed or values))


def code_precision(dtype: torch.dtype, bits: int) -> str:
    """Return the precision of the matrix products; codes with float16 queries are multiplied as bfloat16."""
    from ragserve_kernels.dot import dot_precision  # imports Triton

    return dot_precision(torch.bfloat16 if bits and dtype == torch.float16 else dtype)


def tile_rows(group: int) -> int:
    """Return the rows of a query tile: the matrix units want at least 16."""
    return max(16, next_power_of_2(group))


def tile_tokens(head_dim: int, itemsize: int) -> int:
    """Return the tokens of a K tile: 16 KiB, but 16 to 128 tokens."""
    return max(16, min(128, 16384 // (head_dim * itemsize)))


@lru_cache(maxsize=16)
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def resident_programs(tensor: torch.Tensor, per_multiprocessor: int) -> int:
    """Return how many programs run at once on the device of ``tensor``."""
    if not tensor.is_cuda:
        return CPU_PROGRAMS
    return _multiprocessors(tensor.device.index or 0) * per_multiprocessor
