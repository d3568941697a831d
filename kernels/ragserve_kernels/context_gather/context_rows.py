# mypy: disable-error-code="no-untyped-def"
"""Device functions of the kernels that read contexts in documents' host pages. Import with Triton only."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ragserve_kernels.context_gather.types import PAIR_BYTES, HostCodes
from ragserve_kernels.dispatch import next_power_of_2
from ragserve_kernels.quantize_kv.pairs import scale_and_zero


class RowForm(NamedTuple):
    """What rows of documents' pages look like, as kernels take it: a tuple of constants."""

    BLOCK: tl.constexpr  # tokens of a document's page
    D: tl.constexpr
    HALF: tl.constexpr  # half of the dimensions that rotate
    B_HALF: tl.constexpr  # HALF, rounded up
    B_REST: tl.constexpr  # the dimensions that do not rotate, rounded up; 0: none
    CODES: tl.constexpr  # the pages hold 8-bit codes
    PAIR: tl.constexpr  # bytes of a row's scale and zero point

    @classmethod
    def of(cls, host: torch.Tensor | HostCodes, turns: torch.Tensor, *, least: int = 1) -> RowForm:
        """Rows of ``host``, keys of which ``turns`` turn; ``least``: what sizes are rounded up to."""
        if isinstance(host, HostCodes):
            block, head_dim = host.block, host.head_dim
        else:
            block, head_dim = host.shape[4:]
        return _form(block, head_dim, turns.shape[2], isinstance(host, HostCodes), least)


NO_ROWS = RowForm(*map(tl.constexpr, [0] * 7))  # of kernels that read none


@lru_cache
def _form(block: int, head_dim: int, half: int, codes: bool, least: int) -> RowForm:
    rest = head_dim - 2 * half
    b_half = max(least, next_power_of_2(half))
    b_rest = max(least, next_power_of_2(rest)) if rest else 0
    return RowForm(*map(tl.constexpr, (block, head_dim, half, b_half, b_rest, codes, PAIR_BYTES)))


class ContextRows(NamedTuple):
    """Values of N rows: K in its two halves that rotate [N, B_HALF] and the rest [N, B_REST], V [N, D]."""

    b_1: Any
    b_2: Any
    b_rest: Any  # without a rest another tensor
    b_v: Any


@triton.jit
def context_pages(p_base, form, DTYPE: tl.constexpr):
    """Return the pointer to documents' pages whose address is at ``p_base``."""
    a_host = tl.load(p_base)
    return tl.multiple_of(a_host.to(tl.pointer_type(tl.int8 if form.CODES else DTYPE)), 16)


@triton.jit
def context_rows(
    p_host,  # [pages, 2, n_heads, BLOCK, D], and PAIR bytes more a row with CODES
    p_turns,  # float32 [n, 2, HALF]
    p_token,  # int32 [N]: host page * BLOCK + place in it, and behind it the row of the angles
    m_row,  # bool [N]: rows that are read; others are 0
    i_from,  # int64, one or [N]: layer * KV heads + head
    n_heads,  # int64: layers times KV heads, those of K, or V, of a page
    form,  # RowForm
    DTYPE: tl.constexpr,  # of values
):
    """Return :class:`ContextRows` of DTYPE, keys turned."""
    BLOCK: tl.constexpr = form.BLOCK
    D: tl.constexpr = form.D
    HALF: tl.constexpr = form.HALF
    # [N] each
    i_row = tl.load(p_token, mask=m_row, other=0).to(tl.int64)
    i_turn = tl.load(p_token + 1, mask=m_row, other=0).to(tl.int64)
    # half a row of codes is less than the link moves at once
    WHOLE: tl.constexpr = form.CODES and 2 * HALF == D
    o_dim = tl.arange(0, D)
    o_half = tl.arange(0, form.B_HALF)
    n_row = n_heads * BLOCK  # rows of K lie so many before those of V
    i_block = i_row // BLOCK
    i_place = i_from * BLOCK + i_row % BLOCK
    if form.CODES:
        o_page = i_block * 2 * n_row * (D + form.PAIR)
        o_pair = o_page // 4 + 2 * n_row * D // 4 + i_place
    else:
        o_page = i_block * 2 * n_row * D
    o_k = tl.multiple_of(o_page + i_place * D, 16)
    o_v = tl.multiple_of(o_k + n_row * D, 16)
    m_all = m_row[:, None]
    m_half = m_all & (o_half < HALF)[None, :]
    # all loads before their first use
    if WHOLE:
        b_k = tl.load(p_host + o_k[:, None] + o_dim[None, :], mask=m_all, other=0)
    else:
        b_1 = tl.load(p_host + o_k[:, None] + o_half[None, :], mask=m_half, other=0)
        b_2 = tl.load(p_host + o_k[:, None] + HALF + o_half[None, :], mask=m_half, other=0)
    if form.CODES:
        # [N] each, of words
        p_pairs = p_host.to(tl.pointer_type(tl.int32))
        b_k_pair = tl.load(p_pairs + o_pair, mask=m_row, other=0)
        b_v_pair = tl.load(p_pairs + o_pair + n_row, mask=m_row, other=0)
    b_v = tl.load(p_host + o_v[:, None] + o_dim[None, :], mask=m_all, other=0)
    p_turn = p_turns + i_turn[:, None] * (2 * HALF) + o_half[None, :]
    b_cos = tl.load(p_turn, mask=m_half, other=1.0)
    b_sin = tl.load(p_turn + HALF, mask=m_half, other=0.0)
    b_rest = b_v
    if form.B_REST > 0:
        o_rest = 2 * HALF + tl.arange(0, form.B_REST)
        m_rest = m_all & (o_rest < D)[None, :]
        b_rest = tl.load(p_host + o_k[:, None] + o_rest[None, :], mask=m_rest, other=0)
        if form.CODES:
            b_scale, b_zero = scale_and_zero(b_k_pair)
            b_rest = (b_rest.to(tl.float32) * b_scale[:, None] + b_zero[:, None]).to(DTYPE)
    if WHOLE:
        b_1, b_2 = tl.split(tl.permute(tl.reshape(b_k, [b_k.shape[0], 2, D // 2]), [0, 2, 1]))
    b_1 = b_1.to(tl.float32)
    b_2 = b_2.to(tl.float32)
    if form.CODES:
        b_scale, b_zero = scale_and_zero(b_k_pair)
        b_1 = b_1 * b_scale[:, None] + b_zero[:, None]
        b_2 = b_2 * b_scale[:, None] + b_zero[:, None]
        b_scale, b_zero = scale_and_zero(b_v_pair)
        b_v = (b_v.to(tl.float32) * b_scale[:, None] + b_zero[:, None]).to(DTYPE)
    b_turned = (b_1 * b_cos - b_2 * b_sin).to(DTYPE)
    return ContextRows(b_turned, (b_2 * b_cos + b_1 * b_sin).to(DTYPE), b_rest, b_v)


@triton.jit
def store_context_rows(
    p_k,  # [N]: where rows go
    p_v,
    rows,  # ContextRows
    m_row,  # bool [N, 1]: rows that are stored
    form,  # RowForm
):
    """Store rows of K and V."""
    D: tl.constexpr = form.D
    HALF: tl.constexpr = form.HALF
    o_half = tl.arange(0, form.B_HALF)
    m_half = m_row & (o_half < HALF)[None, :]
    p_half = p_k[:, None] + o_half[None, :]
    tl.store(p_half, rows.b_1, mask=m_half)
    tl.store(p_half + HALF, rows.b_2, mask=m_half)
    if form.B_REST > 0:
        o_rest = 2 * HALF + tl.arange(0, form.B_REST)
        tl.store(p_k[:, None] + o_rest[None, :], rows.b_rest, mask=m_row & (o_rest < D)[None, :])
    tl.store(p_v[:, None] + tl.arange(0, D)[None, :], rows.b_v, mask=m_row)
