# mypy: disable-error-code="no-untyped-def"
"""Where K and V of pages lie that may be anywhere: in the pool, in shared blocks of it, on the host, or in
documents there."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ragserve_kernels.context_gather.context_rows import NO_ROWS, RowForm
from ragserve_kernels.kv import rows_of
from ragserve_kernels.paged import KVPair, PagedBatch, PageSelection, kv_rows
from ragserve_kernels.progressive_decode.placed_tiles import FILLS, IN_CONTEXT, ON_HOST, Contexts
from ragserve_kernels.progressive_decode.types import PagePlaces

RESOLVED = 256  # pages of a head whose addresses one program finds
# bits of what such a program notes of its pages
SOME_CONTEXT: tl.constexpr = tl.constexpr(1)  # some are those of contexts
SOME_FILL: tl.constexpr = tl.constexpr(2)  # some, in host pages of their request, fill shared blocks
SOME_CONTEXT_FILL: tl.constexpr = tl.constexpr(4)  # some of contexts do


@triton.jit(do_not_specialize=["stride_places", "stride_places_head", "i_layer", "n"])
def _resolve(
    p_places,  # int32 [batch, kv_heads, n]: see `PagePlaces`
    stride_places,
    stride_places_head,
    p_lens,  # int32 [batch]
    p_counts,  # int32 [batch, kv_heads]
    kv,  # KVRows of [slots, kv_heads, D]
    host_k,  # HeadRows of [host pages, kv_heads, PAGE, D]
    host_v,
    p_shared,  # int32 [host pages, layers, kv_heads] with CELLS, as what follows; else not read
    p_layers_k,  # int64 [layers]: addresses
    p_layers_v,
    i_layer,
    n_layers,
    kv_heads,
    n,
    p_tokens,  # int32 [numbers, PAGE, 2] with CONTEXTS, as what follows; else not read
    p_kinds,  # int32 [items, parts]: the bits above; written with either
    p_out,  # int64 [batch, kv_heads, n, 2]: see `attend_placed`
    # likewise: with CELLS, of pages that fill shared blocks where they are, as p_out has the shared blocks
    p_fills,
    PAGE: tl.constexpr,
    BYTES: tl.constexpr,  # of an element
    CELLS: tl.constexpr,
    CONTEXTS: tl.constexpr,
    STEP: tl.constexpr,
):
    i_item = tl.program_id(0)
    i_b = (i_item // kv_heads).to(tl.int64)
    i_h = (i_item % kv_heads).to(tl.int64)
    n_pages = tl.where(tl.load(p_counts + i_item) > 0, (tl.load(p_lens + i_b) + PAGE - 1) // PAGE, 0)
    o_page = tl.program_id(1) * STEP + tl.arange(0, STEP)
    m_page = o_page < tl.minimum(n_pages, n)
    # [STEP] each
    i_place = tl.load(
        p_places + i_b * stride_places + i_h * stride_places_head + o_page, mask=m_page, other=0
    ).to(tl.int64)
    m_host = i_place < 0
    i_page = tl.where(m_host, -1 - i_place, i_place)
    o_k = i_page * PAGE * kv.k.stride + i_h * kv.k.stride_head
    o_v = i_page * PAGE * kv.v.stride + i_h * kv.v.stride_head
    a_k = (kv.k.p + o_k).to(tl.int64)
    a_v = (kv.v.p + o_v).to(tl.int64)
    a_k = tl.where(
        m_host, (host_k.p + i_page * host_k.stride + i_h * host_k.stride_head).to(tl.int64) | ON_HOST, a_k
    )
    a_v = tl.where(
        m_host, (host_v.p + i_page * host_v.stride + i_h * host_v.stride_head).to(tl.int64) | ON_HOST, a_v
    )
    if CONTEXTS:
        p_token = p_tokens + i_page * (2 * PAGE)
        m_context = tl.load(p_token, mask=m_page & m_host, other=-1) >= 0
        a_token = p_token.to(tl.int64) | IN_CONTEXT
        a_k = tl.where(m_context, a_token, a_k)
        a_v = tl.where(m_context, a_token, a_v)
    if CELLS:
        i_shared_of = tl.load(
            p_shared + (i_page * n_layers + i_layer) * kv_heads + i_h, mask=m_page & m_host, other=-1
        )
        m_shared = i_shared_of >= 0
        # on its way to a shared block; a page that is not whole would leave a part of it as it was
        m_fill = (i_shared_of < -1) & ((o_page + 1) * PAGE <= tl.load(p_lens + i_b))
        i_shared = tl.where(m_shared, i_shared_of, tl.where(m_fill, -2 - i_shared_of, 0)).to(tl.int64)
        i_of = i_shared // kv_heads % n_layers
        i_row = i_shared // kv_heads // n_layers * PAGE
        c_k = tl.load(p_layers_k + i_of, mask=m_shared | m_fill, other=0)
        c_v = tl.load(p_layers_v + i_of, mask=m_shared | m_fill, other=0)
        c_k += (i_row * kv.k.stride + i_shared % kv_heads * kv.k.stride_head) * BYTES
        c_v += (i_row * kv.v.stride + i_shared % kv_heads * kv.v.stride_head) * BYTES
        p_fills += (i_item.to(tl.int64) * n + o_page) * 2
        tl.store(p_fills, a_k, mask=m_fill)
        tl.store(p_fills + 1, a_v, mask=m_fill)
        a_k = tl.where(m_shared, c_k, tl.where(m_fill, c_k | FILLS, a_k))
        a_v = tl.where(m_shared, c_v, tl.where(m_fill, c_v | FILLS, a_v))
    if CONTEXTS or CELLS:
        b_bits = tl.zeros([STEP], tl.int32)
        if CONTEXTS:
            b_bits = tl.where(m_context, SOME_CONTEXT, b_bits)
        if CELLS:
            b_bits = tl.where(m_fill, tl.where(b_bits > 0, SOME_CONTEXT_FILL, SOME_FILL), b_bits)
            b_bits = tl.where(m_shared, 0, b_bits)
        n_fills = tl.max(tl.where(b_bits == SOME_FILL, b_bits, 0), 0)
        n_fills += tl.max(tl.where(b_bits == SOME_CONTEXT_FILL, b_bits, 0), 0)
        n_bits = n_fills + tl.max(tl.where(b_bits == SOME_CONTEXT, b_bits, 0), 0)
        tl.store(p_kinds + i_item * tl.num_programs(1) + tl.program_id(1), n_bits)
    p_out += (i_item.to(tl.int64) * n + o_page) * 2
    tl.store(p_out, a_k, mask=m_page)
    tl.store(p_out + 1, a_v, mask=m_page)


class Reading(NamedTuple):
    """How contexts are read, as the kernel takes it."""

    contexts: Contexts
    form: RowForm

    @classmethod
    def of(cls, places: PagePlaces | None, unused: torch.Tensor) -> Reading:
        """``unused``: any tensor, in place of those of contexts where there are none."""
        if places is None or (found := places.contexts) is None:
            return cls(Contexts(unused, unused, 0), NO_ROWS)
        layers, kv_heads = found.sizes[:2]
        form = RowForm.of(found.host, found.turns, least=16)  # the matrix units want so many
        return cls(Contexts(found.base, found.turns, layers * kv_heads), form)


class Addresses(NamedTuple):
    """Where K and V of every page that may be read lie."""

    pages: torch.Tensor  # int64 [batch, kv_heads, n, 2]
    fills: torch.Tensor  # likewise: where pages are that fill the shared blocks there; undefined for others
    kinds: torch.Tensor  # int32 [batch * kv_heads, parts]: bits of the pages in each part of such a list


def addresses(batch: PagedBatch, ranking: PageSelection, kv: KVPair, places: PagePlaces) -> Addresses:
    """Look every page up."""
    cache, (requests, kv_heads, n) = kv_rows(kv), places.places.shape
    found = torch.empty(requests, kv_heads, n, 2, dtype=torch.int64, device=places.places.device)
    host_k, host_v = (rows_of(places.host[:, half, places.layer]) for half in range(2))
    shared_blocks, contexts = places.shared_blocks, places.contexts
    of, layers_k, layers_v, fills = (found,) * 4
    if shared_blocks is not None:
        of, layers_k, layers_v, fills = (
            shared_blocks.of,
            shared_blocks.pool.k_ptrs,
            shared_blocks.pool.v_ptrs,
            torch.empty_like(found),
        )
    items, parts = requests * kv_heads, triton.cdiv(n, RESOLVED)
    kinds = torch.empty(items, parts, dtype=torch.int32, device=found.device)
    _resolve[(items, parts)](
        places.places,
        places.places.stride(0),
        places.places.stride(1),
        batch.seq_lens,
        ranking.counts,
        cache,
        host_k,
        host_v,
        of,
        layers_k,
        layers_v,
        places.layer,
        places.host.shape[2],
        kv_heads,
        n,
        found if contexts is None else contexts.tokens,
        kinds,
        found,
        fills,
        PAGE=batch.page_size,
        BYTES=places.host.element_size(),
        CELLS=shared_blocks is not None,
        CONTEXTS=contexts is not None,
        STEP=RESOLVED,
        num_warps=4,
    )
    return Addresses(found, fills, kinds)
