# mypy: disable-error-code="no-untyped-def"
"""Attention to tiles of pages that may be anywhere. Import with Triton only.

Shapes in comments: M query rows of a group, N tokens of a tile, D head size, H = D / 2."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ragserve_kernels.context_gather.context_rows import context_pages, context_rows, store_context_rows
from ragserve_kernels.decode_tiles import Softmax, fold_scores
from ragserve_kernels.dot import dot

ON_HOST: tl.constexpr = tl.constexpr(1)  # bits of an address: rows lie one behind the other
IN_CONTEXT: tl.constexpr = tl.constexpr(2)  # it is that of the rows' places, see `HostContexts.tokens`
FILLS: tl.constexpr = tl.constexpr(4)  # it is that of a shared block, to which the page is written first
FLAGS: tl.constexpr = tl.constexpr(7)  # all of them: the page is read from the host


class Contexts(NamedTuple):
    """`HostContexts` as the kernel takes them."""

    p_base: Any
    p_turns: Any
    n_lists: Any  # layers times KV heads


class ContextQuery(NamedTuple):
    """Query rows by how keys rotate: both halves [M, B_HALF] and the rest [M, B_REST]."""

    b_1: Any
    b_2: Any
    b_rest: Any


@triton.jit
def _tile_pages(i_tile, walk, p_index, p_places, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the addresses of K and V of the pages of a tile of an indexed :class:`Walk`, one each or [N]
    each, and of its tokens the place in their page and which of them count, [N] each."""
    n_blocks, _, _, _, n_len = walk
    o_token = tl.arange(0, BLOCK_N)
    if PAGE % BLOCK_N == 0:  # a tile lies in one page: scalar look-ups
        i_step = i_tile * BLOCK_N // PAGE
        i_block = tl.load(p_index + i_step, mask=i_step < n_blocks, other=-1)
        i_first = i_tile * BLOCK_N % PAGE
        m_tile = (i_step < n_blocks) & (i_block >= 0) & (i_block * PAGE + i_first < n_len)
        a_k = tl.load(p_places + 2 * i_block, mask=m_tile, other=0)
        a_v = tl.load(p_places + 2 * i_block + 1, mask=m_tile, other=0)
        i_within = (i_first + o_token).to(tl.int64)
        m_row = m_tile & (i_block * PAGE + i_within < n_len)
    else:
        i_token = i_tile * BLOCK_N + o_token
        i_step = i_token // PAGE
        # [N]
        i_block = tl.load(p_index + i_step, mask=i_step < n_blocks, other=-1)
        i_within = (i_token % PAGE).to(tl.int64)
        m_row = (i_step < n_blocks) & (i_block >= 0) & (i_block * PAGE + i_within < n_len)
        # [N] each
        a_k = tl.load(p_places + 2 * i_block, mask=m_row, other=0)
        a_v = tl.load(p_places + 2 * i_block + 1, mask=m_row, other=0)
    return a_k, a_v, i_within, m_row


@triton.jit
def _fold(b_s, b_v_low, b_v_high, m_row, softmax, scale_2, PRECISION: tl.constexpr):
    """Fold scores [M, N] and values [N, H] of a tile into the softmax; return the scores and the new one."""
    b_s, b_p, b_decay, b_max, b_sum = fold_scores(b_s, m_row, scale_2, softmax.b_max, softmax.b_sum)
    b_p = b_p.to(b_v_low.dtype)
    b_low = dot(b_p, b_v_low, softmax.b_low * b_decay[:, None], PRECISION)
    b_high = dot(b_p, b_v_high, softmax.b_high * b_decay[:, None], PRECISION)
    return b_s, Softmax(b_low, b_high, softmax.b_zero, b_max, b_sum)


@triton.jit
def attend_placed(
    i_tile,
    walk,
    p_index,
    p_places,  # int64 [pages, 2]: addresses of K and V of a page and head, with the bits above
    stride,
    query,  # QueryGroup
    softmax,
    scale_2,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    CONTEXTS: tl.constexpr,  # some pages may be those of contexts
):
    """Fold the pages of a tile that are in the pool or in host pages of their request into the softmax.

    Return the scores [M, N], -inf for other tokens, and the new softmax."""
    DTYPE: tl.constexpr = query.b_low.dtype
    a_k, a_v, i_within, m_row = _tile_pages(i_tile, walk, p_index, p_places, PAGE, BLOCK_N)
    if CONTEXTS:
        m_k = m_row & ((a_k & IN_CONTEXT) == 0)
        m_v = m_row & ((a_v & IN_CONTEXT) == 0)
    else:
        m_k = m_row
        m_v = m_row
    o_k = i_within * tl.where((a_k & ON_HOST) != 0, D, stride)
    o_v = i_within * tl.where((a_v & ON_HOST) != 0, D, stride)
    p_k = tl.multiple_of((a_k & -16).to(tl.pointer_type(DTYPE)) + o_k, 16)
    p_v = tl.multiple_of((a_v & -16).to(tl.pointer_type(DTYPE)) + o_v, 16)
    HALF: tl.constexpr = D // 2
    o_half = tl.arange(0, HALF)
    # [N, H] each
    p_half = p_k[:, None] + o_half[None, :]
    b_low = tl.load(p_half, mask=m_k[:, None], other=0)
    b_high = tl.load(p_half + HALF, mask=m_k[:, None], other=0)
    b_s = dot(query.b_low, tl.trans(b_low), tl.zeros([query.b_low.shape[0], BLOCK_N], tl.float32), PRECISION)
    b_s = dot(query.b_high, tl.trans(b_high), b_s, PRECISION)
    # [N, H] each
    p_half = p_v[:, None] + o_half[None, :]
    b_low = tl.load(p_half, mask=m_v[:, None], other=0)
    b_high = tl.load(p_half + HALF, mask=m_v[:, None], other=0)
    return _fold(b_s, b_low, b_high, m_k, softmax, scale_2, PRECISION)


@triton.jit
def _shared_blocks(
    i_tile,
    walk,
    p_index,
    p_places,
    p_fills,
    stride,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Return where K and V of a tile's page, which fills a shared block, are on the host, with the bits
    above; and of its tokens the place in it, those of K and V in the shared block, and which of them
    count."""
    a_k, a_v, i_within, m_row = _tile_pages(i_tile, walk, p_index, p_places, PAGE, BLOCK_N)
    f_k, f_v, _, _ = _tile_pages(i_tile, walk, p_index, p_fills, PAGE, BLOCK_N)
    p_k = tl.multiple_of((a_k & -16).to(tl.pointer_type(DTYPE)) + i_within * stride, 16)
    p_v = tl.multiple_of((a_v & -16).to(tl.pointer_type(DTYPE)) + i_within * stride, 16)
    return f_k, f_v, i_within, p_k, p_v, m_row & ((a_k & FILLS) != 0)


@triton.jit
def fill_placed(
    i_tile,
    walk,
    p_index,
    p_places,
    p_fills,  # int64 [pages, 2]: addresses, likewise, of pages whose own say that they fill shared blocks
    stride,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,  # divides PAGE
    DTYPE: tl.constexpr,
):
    """Write the page of a tile to the shared block that is to have it, if it is in a host page of its
    request.
    """
    f_k, f_v, i_within, p_k, p_v, m_row = _shared_blocks(
        i_tile, walk, p_index, p_places, p_fills, stride, PAGE, BLOCK_N, DTYPE
    )
    o_dim = tl.arange(0, D)[None, :]
    m_row = (m_row & ((f_k & IN_CONTEXT) == 0))[:, None]
    q_k = tl.multiple_of((f_k & -16).to(tl.pointer_type(DTYPE)) + i_within * D, 16)
    q_v = tl.multiple_of((f_v & -16).to(tl.pointer_type(DTYPE)) + i_within * D, 16)
    # [N, D], both loads before their first use
    b_k = tl.load(q_k[:, None] + o_dim, mask=m_row)
    b_v = tl.load(q_v[:, None] + o_dim, mask=m_row)
    tl.store(p_k[:, None] + o_dim, b_k, mask=m_row)
    tl.store(p_v[:, None] + o_dim, b_v, mask=m_row)


@triton.jit
def fill_context(
    i_tile,
    walk,
    p_index,
    p_places,
    p_fills,
    stride,
    contexts,
    i_list,  # as `attend_context`
    form,  # RowForm of a document's pages
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """`fill_placed` for a page in documents' host pages, whose keys are turned on the way."""
    f_k, _, i_within, p_k, p_v, m_row = _shared_blocks(
        i_tile, walk, p_index, p_places, p_fills, stride, PAGE, BLOCK_N, DTYPE
    )
    m_row = m_row & ((f_k & IN_CONTEXT) != 0)
    rows = _context_tile(f_k, i_within, m_row, contexts, i_list, form, DTYPE)
    store_context_rows(p_k, p_v, rows, m_row[:, None], form)


@triton.jit
def _context_tile(
    a_token,  # address of the rows' places, with the bits above
    i_within,
    m_row,
    contexts,
    i_list,
    form,
    DTYPE: tl.constexpr,
):
    """Return K and V of a tile of a context's page, as `context_rows`."""
    p_token = (a_token & -16).to(tl.pointer_type(tl.int32)) + 2 * i_within
    p_host = context_pages(contexts.p_base, form, DTYPE)
    n_lists = contexts.n_lists.to(tl.int64)
    return context_rows(p_host, contexts.p_turns, p_token, m_row, i_list, n_lists, form, DTYPE)


@triton.jit
def load_context_query(
    p_group,  # the first row of a group
    stride_head,
    m_head,  # bool [M, 1]
    form,  # RowForm
    BLOCK_M: tl.constexpr,
):
    """Return the :class:`ContextQuery` of a request and KV head."""
    HALF: tl.constexpr = form.HALF
    p_row = p_group + tl.arange(0, BLOCK_M)[:, None] * stride_head
    o_half = tl.arange(0, form.B_HALF)
    m_half = m_head & (o_half < HALF)[None, :]
    b_1 = tl.load(p_row + o_half[None, :], mask=m_half, other=0.0)
    b_2 = tl.load(p_row + HALF + o_half[None, :], mask=m_half, other=0.0)
    b_rest = b_2
    if form.B_REST > 0:
        o_rest = 2 * HALF + tl.arange(0, form.B_REST)
        b_rest = tl.load(p_row + o_rest[None, :], mask=m_head & (o_rest < form.D)[None, :], other=0.0)
    return ContextQuery(b_1, b_2, b_rest)


@triton.jit
def attend_context(
    i_tile,
    walk,
    p_index,
    p_places,
    contexts,
    i_list,  # int64: layer * KV heads + head
    query,  # ContextQuery
    softmax,
    scale_2,
    form,  # RowForm of a document's pages
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`attend_placed` for the pages that are in documents' host pages, whose keys are turned on the way."""
    D: tl.constexpr = form.D
    DTYPE: tl.constexpr = query.b_1.dtype
    a_k, _, i_within, m_row = _tile_pages(i_tile, walk, p_index, p_places, PAGE, BLOCK_N)
    m_row = m_row & ((a_k & IN_CONTEXT) != 0)
    b_1, b_2, b_rest, b_v = _context_tile(a_k, i_within, m_row, contexts, i_list, form, DTYPE)
    b_s = dot(query.b_1, tl.trans(b_1), tl.zeros([query.b_1.shape[0], BLOCK_N], tl.float32), PRECISION)
    b_s = dot(query.b_2, tl.trans(b_2), b_s, PRECISION)
    if form.B_REST > 0:
        b_s = dot(query.b_rest, tl.trans(b_rest), b_s, PRECISION)
    b_low, b_high = tl.split(tl.permute(tl.reshape(b_v, [BLOCK_N, 2, D // 2]), [0, 2, 1]))
    return _fold(b_s, b_low, b_high, m_row, softmax, scale_2, PRECISION)
