# mypy: disable-error-code="no-untyped-def"
"""The kernels of ``block_summary``. Positions are within the document; sampled query ``r`` is at ``STRIDE *
(r + 1) - 1``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ragserve_kernels.dot import dot

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


class DocumentRows(NamedTuple):
    """Documents one after another, T tokens in all, in one layer."""

    q: Any  # HeadRows of [T, Hq, D]
    k: Any  # HeadRows of [T, Hkv, D]
    p_lse: Any  # float32 [Hq, T], natural; written at sampled queries
    p_start: Any  # int32 [documents + 1]: first token
    scale_2: Any


@triton.jit(do_not_specialize=["n_all"])
def lse_kernel(
    documents,
    n_all,
    GROUP: tl.constexpr,
    B_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    B_ROWS: tl.constexpr,
    B_KEYS: tl.constexpr,
    STRIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    q, k, p_lse, p_doc_start, scale_2 = documents
    i_kv_head = tl.program_id(0)
    i_start = tl.load(p_doc_start + tl.program_id(1))
    n_tokens = tl.load(p_doc_start + tl.program_id(1) + 1) - i_start
    n_sampled = n_tokens // STRIDE
    # the last queries see the most keys: start them first
    i_tile = tl.cdiv(n_sampled, B_ROWS) - 1 - tl.program_id(2)
    if i_tile < 0:
        return
    o_m = tl.arange(0, B_ROWS * B_GROUP)
    i_query = STRIDE * (i_tile * B_ROWS + o_m // B_GROUP + 1) - 1
    i_head = i_kv_head * GROUP + o_m % B_GROUP
    m_q = (i_query < n_tokens) & (o_m % B_GROUP < GROUP)
    o_dim = tl.arange(0, HEAD_DIM)
    o_key = tl.arange(0, B_KEYS)
    o_row = (i_start + i_query).to(tl.int64)
    # [M, D], M = rows x group
    b_q = tl.load(
        q.p + o_row[:, None] * q.stride + i_head[:, None] * q.stride_head + o_dim[None, :],
        mask=m_q[:, None],
        other=0.0,
    )
    p_k = k.p + i_start.to(tl.int64) * k.stride + i_kv_head * k.stride_head
    b_max = tl.full([B_ROWS * B_GROUP], -float("inf"), tl.float32)
    b_sum = tl.zeros([B_ROWS * B_GROUP], tl.float32)
    n_keys = tl.minimum(STRIDE * (i_tile + 1) * B_ROWS, n_tokens)
    for i_key in tl.range(0, n_keys, B_KEYS):
        m_key = i_key + o_key < n_keys
        # [D, N]
        b_k = tl.load(
            p_k + (i_key + o_key).to(tl.int64)[None, :] * k.stride + o_dim[:, None],
            mask=m_key[None, :],
            other=0.0,
        )
        b_s = dot(b_q, b_k, tl.zeros([B_ROWS * B_GROUP, B_KEYS], tl.float32), PRECISION) * scale_2
        b_s = tl.where((i_key + o_key)[None, :] <= i_query[:, None], b_s, -float("inf"))
        b_new = tl.maximum(b_max, tl.max(b_s, 1))  # finite from the first tile on: key 0 is seen by all
        b_sum = b_sum * tl.exp2(b_max - b_new) + tl.sum(tl.exp2(b_s - b_new[:, None]), 1)
        b_max = b_new
    tl.store(p_lse + i_head.to(tl.int64) * n_all + o_row, (b_max + tl.log2(b_sum)) / LOG2E, mask=m_q)


@triton.jit(do_not_specialize=["n_all"])
def received_kernel(
    documents,
    n_all,
    p_received,  # float32 [Hkv, T]: weights summed over the group and over strictly later sampled queries
    GROUP: tl.constexpr,
    B_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    B_ROWS: tl.constexpr,
    B_KEYS: tl.constexpr,
    STRIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    q, k, p_lse, p_doc_start, scale_2 = documents
    i_kv_head = tl.program_id(0)
    i_start = tl.load(p_doc_start + tl.program_id(1))
    n_tokens = tl.load(p_doc_start + tl.program_id(1) + 1) - i_start
    i_first = tl.program_id(2) * B_KEYS
    if i_first >= n_tokens:
        return
    i_key = i_first + tl.arange(0, B_KEYS)
    m_key = i_key < n_tokens
    o_dim = tl.arange(0, HEAD_DIM)
    o_m = tl.arange(0, B_ROWS * B_GROUP)
    i_head = i_kv_head * GROUP + o_m % B_GROUP
    o_key = (i_start + i_key).to(tl.int64)
    # [N, D]
    b_k = tl.load(
        k.p + o_key[:, None] * k.stride + i_kv_head * k.stride_head + o_dim[None, :],
        mask=m_key[:, None],
        other=0.0,
    )
    b_received = tl.zeros([B_KEYS], tl.float32)
    for i_sampled in tl.range((i_first + 1) // STRIDE, n_tokens // STRIDE, B_ROWS):
        i_query = STRIDE * (i_sampled + o_m // B_GROUP + 1) - 1
        m_q = (i_query < n_tokens) & (o_m % B_GROUP < GROUP)
        o_row = (i_start + i_query).to(tl.int64)
        # [D, M]
        b_q = tl.load(
            q.p + o_row[None, :] * q.stride + i_head[None, :] * q.stride_head + o_dim[:, None],
            mask=m_q[None, :],
            other=0.0,
        )
        b_lse = tl.load(p_lse + i_head.to(tl.int64) * n_all + o_row, mask=m_q, other=0.0) * LOG2E
        b_s = dot(b_k, b_q, tl.zeros([B_KEYS, B_ROWS * B_GROUP], tl.float32), PRECISION) * scale_2
        b_p = tl.exp2(b_s - b_lse[None, :])
        b_received += tl.sum(tl.where((i_query[None, :] > i_key[:, None]) & m_q[None, :], b_p, 0.0), 1)
    tl.store(p_received + i_kv_head.to(tl.int64) * n_all + o_key, b_received, mask=m_key)


@triton.jit
def block_k_kernel(
    k,
    p_mean,
    p_min,
    p_max,
    p_block_start,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    B_ROW: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Mean, min and max K of one block, all heads: one thread keeps its dimensions, so that nothing is
    reduced across threads.
    """
    i_block = tl.program_id(0).to(tl.int64)
    i_first = tl.load(p_block_start + i_block)
    i_last = tl.load(p_block_start + i_block + 1)
    o_row = tl.arange(0, B_ROW)
    m_row = o_row < KV_HEADS * HEAD_DIM
    p_k = k.p + o_row // HEAD_DIM * k.stride_head + o_row % HEAD_DIM
    b_sum = tl.zeros([B_ROW], tl.float32)
    b_min = tl.full([B_ROW], float("inf"), tl.float32)
    b_max = tl.full([B_ROW], -float("inf"), tl.float32)
    for i_token in tl.range(i_first, i_last, UNROLL):
        for u in tl.static_range(UNROLL):
            # past the end the last token again: it changes neither min nor max
            i_row = tl.minimum(i_token + u, i_last - 1).to(tl.int64)
            b_k = tl.load(p_k + i_row * k.stride, mask=m_row, other=0.0).to(tl.float32)
            b_sum += tl.where(i_token + u < i_last, b_k, 0.0)
            b_min = tl.minimum(b_min, b_k)
            b_max = tl.maximum(b_max, b_k)
    o_out = i_block * KV_HEADS * HEAD_DIM + o_row
    tl.store(p_mean + o_out, b_sum / (i_last - i_first), mask=m_row)
    tl.store(p_min + o_out, b_min, mask=m_row)
    tl.store(p_max + o_out, b_max, mask=m_row)


@triton.jit
def local_q_kernel(
    q,
    p_local_q,
    p_doc_start,
    p_local_start,
    HEAD_DIM: tl.constexpr,
    B_TOKENS: tl.constexpr,
):
    """Mean Q of one document's local blocks and one head."""
    i_doc = tl.program_id(0)
    i_head = tl.program_id(1)
    i_first = tl.load(p_local_start + i_doc)
    i_last = tl.load(p_doc_start + i_doc + 1)
    o_dim = tl.arange(0, HEAD_DIM)
    b_sum = tl.zeros([HEAD_DIM], tl.float32)
    for i_token in tl.range(i_first, i_last, B_TOKENS):
        o_token = i_token + tl.arange(0, B_TOKENS)
        m_token = (o_token < i_last)[:, None]
        b_q = tl.load(
            q.p + o_token.to(tl.int64)[:, None] * q.stride + i_head * q.stride_head + o_dim[None, :],
            mask=m_token,
            other=0.0,
        )
        b_sum += tl.sum(b_q.to(tl.float32), 0)
    tl.store(
        p_local_q + (i_doc.to(tl.int64) * tl.num_programs(1) + i_head) * HEAD_DIM + o_dim,
        b_sum / tl.maximum(i_last - i_first, 1),
    )


@triton.jit(do_not_specialize=["n_all"])
def choose_kernel(
    p_by_head,  # float32 [Hkv, T]
    p_received,  # float32 [T]
    p_token,  # int32 [B]
    p_attention,  # float32 [B]
    p_doc_start,
    p_block_start,
    p_block_doc,
    n_all,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    MIN_QUERIES: tl.constexpr,
    STRIDE: tl.constexpr,
    B_TOKENS: tl.constexpr,
):
    """The most attended token of one block, among those with enough later queries."""
    i_block = tl.program_id(0)
    i_first = tl.load(p_block_start + i_block)
    i_last = tl.load(p_block_start + i_block + 1)
    i_doc = tl.load(p_block_doc + i_block)
    i_start = tl.load(p_doc_start + i_doc)
    n_tokens = tl.load(p_doc_start + i_doc + 1) - i_start
    o_token = i_first + tl.arange(0, B_TOKENS)
    m_token = o_token < i_last
    b_sum = tl.zeros([B_TOKENS], tl.float32)
    for i_head in range(KV_HEADS):
        b_sum += tl.load(p_by_head + tl.full([], i_head, tl.int64) * n_all + o_token, mask=m_token, other=0.0)
    b_sum = b_sum / QUERY_HEADS
    tl.store(p_received + o_token, b_sum, mask=m_token)
    n_later = n_tokens // STRIDE - (o_token - i_start + 1) // STRIDE
    b_mean = tl.where(m_token & (n_later >= MIN_QUERIES), b_sum / tl.maximum(n_later, 1), -1.0)
    b_best = tl.max(b_mean, 0)
    i_best = tl.argmax(b_mean, 0)
    tl.store(p_token + i_block, tl.where(b_best >= 0, i_first + i_best, -1))
    tl.store(p_attention + i_block, tl.where(b_best >= 0, b_best, float("inf")))


@triton.jit(do_not_specialize=["n_all", "n_blocks"])
def fit_kernel(
    documents,
    n_all,
    p_token,
    p_attention,
    p_parts,  # float32 [query tiles, 5, B]: n, sum x, sum y, sum x x, sum x y of the centred logarithms
    p_doc_block,
    n_blocks,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    B_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    B_ROWS: tl.constexpr,
    B_BLOCKS: tl.constexpr,
    STRIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Sum up the log-log fit of a tile of queries against the chosen tokens of ``B_BLOCKS`` blocks."""
    q, k, p_lse, p_doc_start, scale_2 = documents
    i_doc = tl.program_id(2)
    i_start = tl.load(p_doc_start + i_doc)
    n_tokens = tl.load(p_doc_start + i_doc + 1) - i_start
    i_block = tl.load(p_doc_block + i_doc) + tl.program_id(1) * B_BLOCKS + tl.arange(0, B_BLOCKS)
    i_block_last = tl.load(p_doc_block + i_doc + 1)
    m_block = i_block < i_block_last
    i_token = tl.load(p_token + i_block, mask=m_block, other=-1)
    m_token = i_token >= 0
    i_key = i_token - i_start
    b_base = tl.log(tl.load(p_attention + i_block, mask=m_token, other=1.0))
    o_dim = tl.arange(0, HEAD_DIM)
    o_m = tl.arange(0, B_ROWS * B_GROUP)
    i_sampled = tl.program_id(0) * B_ROWS
    i_query_m = STRIDE * (i_sampled + o_m // B_GROUP + 1) - 1
    m_q = (i_query_m < n_tokens) & (o_m % B_GROUP < GROUP)
    o_row = (i_start + i_query_m).to(tl.int64)
    i_query = STRIDE * (i_sampled + tl.arange(0, B_ROWS) + 1) - 1
    m_pair = (i_query[:, None] > i_key[None, :]) & m_token[None, :] & (i_query < n_tokens)[:, None]
    # a tile before all chosen tokens, or past the document's end, has nothing to add
    n_heads = tl.where(tl.max(m_pair.to(tl.int32)) > 0, KV_HEADS, 0)
    b_weight = tl.zeros([B_ROWS, B_BLOCKS], tl.float32)
    for i_kv_head in tl.range(0, n_heads):
        i_head = i_kv_head * GROUP + o_m % B_GROUP
        # [D, B]
        p_keys = (
            k.p
            + tl.maximum(i_token, 0).to(tl.int64)[None, :] * k.stride
            + i_kv_head * k.stride_head
            + o_dim[:, None]
        )
        b_k = tl.load(p_keys, mask=m_token[None, :], other=0.0)
        # [M, D], M = rows x group
        b_q = tl.load(
            q.p + o_row[:, None] * q.stride + i_head[:, None] * q.stride_head + o_dim[None, :],
            mask=m_q[:, None],
            other=0.0,
        )
        b_lse = tl.load(p_lse + i_head.to(tl.int64) * n_all + o_row, mask=m_q, other=0.0) * LOG2E
        b_s = dot(b_q, b_k, tl.zeros([B_ROWS * B_GROUP, B_BLOCKS], tl.float32), PRECISION) * scale_2
        # a query before the token does not see it: its score may exceed its log-sum-exp without bound
        m_seen = m_q[:, None] & (i_query_m[:, None] > i_key[None, :])
        b_p = tl.where(m_seen, tl.exp2(b_s - b_lse[:, None]), 0.0)
        b_weight += tl.sum(tl.reshape(b_p, [B_ROWS, B_GROUP, B_BLOCKS]), 1)
    # logarithms relative to about their means, so that the sums lose nothing to cancellation
    b_center = tl.log(tl.maximum(n_tokens - i_key, 1).to(tl.float32)) - 1.0
    b_x = tl.log(tl.where(m_pair, i_query[:, None] - i_key[None, :], 1).to(tl.float32)) - b_center[None, :]
    b_y = tl.log(tl.maximum(b_weight / QUERY_HEADS, 1e-30)) - b_base[None, :]
    b_x = tl.where(m_pair, b_x, 0.0)
    b_y = tl.where(m_pair, b_y, 0.0)
    p_parts += tl.program_id(0).to(tl.int64) * 5 * n_blocks + i_block
    tl.store(p_parts, tl.sum(m_pair.to(tl.float32), 0), mask=m_block)
    tl.store(p_parts + n_blocks, tl.sum(b_x, 0), mask=m_block)
    tl.store(p_parts + 2 * n_blocks, tl.sum(b_y, 0), mask=m_block)
    tl.store(p_parts + 3 * n_blocks, tl.sum(b_x * b_x, 0), mask=m_block)
    tl.store(p_parts + 4 * n_blocks, tl.sum(b_x * b_y, 0), mask=m_block)


@triton.jit(do_not_specialize=["n_blocks"])
def exponent_kernel(
    p_sums,  # float32 [5, B]
    p_token,
    p_exponent,  # float32 [B]
    p_outlier,  # int8 [B]
    p_doc_block,
    n_blocks,
    B_BLOCKS: tl.constexpr,
):
    """Slopes of one document, and the three-sigma rule on them, ``B_BLOCKS`` blocks at a time."""
    i_first = tl.load(p_doc_block + tl.program_id(0))
    i_last = tl.load(p_doc_block + tl.program_id(0) + 1)
    b_n_fit = tl.zeros([B_BLOCKS], tl.float32)
    b_sum = tl.zeros([B_BLOCKS], tl.float32)
    for i_block in tl.range(i_first, i_last, B_BLOCKS):
        o_block = i_block + tl.arange(0, B_BLOCKS)
        m_block = o_block < i_last
        m_fit = m_block & (tl.load(p_token + o_block, mask=m_block, other=-1) >= 0)
        b_n = tl.load(p_sums + o_block, mask=m_fit, other=1.0)
        b_x = tl.load(p_sums + n_blocks + o_block, mask=m_fit, other=0.0)
        b_y = tl.load(p_sums + 2 * n_blocks + o_block, mask=m_fit, other=0.0)
        b_xx = tl.load(p_sums + 3 * n_blocks + o_block, mask=m_fit, other=1.0)
        b_xy = tl.load(p_sums + 4 * n_blocks + o_block, mask=m_fit, other=0.0)
        b_exponent = -(b_n * b_xy - b_x * b_y) / (b_n * b_xx - b_x * b_x)
        tl.store(p_exponent + o_block, tl.where(m_fit, b_exponent, float("inf")), mask=m_block)
        b_n_fit += m_fit.to(tl.float32)
        b_sum += tl.where(m_fit, b_exponent, 0.0)
    n_fit = tl.maximum(tl.sum(b_n_fit, 0), 1.0)
    b_mean = tl.sum(b_sum, 0) / n_fit
    tl.debug_barrier()  # what this program has stored is read again
    b_square = tl.zeros([B_BLOCKS], tl.float32)
    for i_block in tl.range(i_first, i_last, B_BLOCKS):
        o_block = i_block + tl.arange(0, B_BLOCKS)
        b_exponent = tl.load(p_exponent + o_block, mask=o_block < i_last, other=float("inf"))
        b_off = tl.where(b_exponent < float("inf"), b_exponent - b_mean, 0.0)
        b_square += b_off * b_off
    b_least = b_mean - 3.0 * tl.sqrt(tl.sum(b_square, 0) / n_fit)
    for i_block in tl.range(i_first, i_last, B_BLOCKS):
        o_block = i_block + tl.arange(0, B_BLOCKS)
        m_block = o_block < i_last
        b_exponent = tl.load(p_exponent + o_block, mask=m_block, other=float("inf"))
        tl.store(p_outlier + o_block, (b_exponent < b_least).to(tl.int8), mask=m_block)
