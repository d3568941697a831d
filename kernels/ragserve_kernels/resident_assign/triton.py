# mypy: disable-error-code="no-untyped-def"
"""The kernel of ``resident_assign``: a program per layer and KV head. Resident blocks are found by comparing,
not by
sorting: there are few."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ragserve_kernels.dispatch import next_power_of_2
from ragserve_kernels.paged import PageSelection
from ragserve_kernels.resident_assign.types import ResidentBlocks, ResidentState

_STEP = 64  # resident blocks, or pages, at a time: one kernel serves any number of them


@triton.jit(do_not_specialize=["n", "resident_blocks", "pages", "number", "oldest"])
def _assign(
    p_blocks,  # int32 [lists, n]
    p_counts,  # int32 [lists]
    p_held,  # int32 [lists, resident_blocks]
    p_used,
    p_named,  # int32 [lists, pages]
    p_host,  # int32 [pages]
    p_resident_block_pages,  # int32 [resident_blocks]
    p_age,  # int32 [lists, resident_blocks]: working memory
    p_out,  # int32 [5, lists, n]: see `Resident blocks`
    p_tally,  # int32 [lists, 4]
    n,
    resident_blocks,
    pages,
    number,
    oldest,  # selections behind it are recent
    N: tl.constexpr,
    STEP: tl.constexpr,
):
    i_list = tl.program_id(0).to(tl.int64)
    n_lists = tl.num_programs(0).to(tl.int64)
    o_n = tl.arange(0, N)
    m_n = o_n < n
    p_held += i_list * resident_blocks
    p_used += i_list * resident_blocks
    p_age += i_list * resident_blocks
    p_named += i_list * pages
    b_block = tl.load(p_blocks + i_list * n + o_n, mask=m_n, other=-1)  # [N]
    m_page = m_n & (o_n < tl.load(p_counts + i_list)) & (b_block >= 0) & (b_block < pages)
    b_page = tl.where(m_page, b_block, -1)
    # where pages are, and how long resident blocks have not been used: what the selection names goes last
    b_resident = tl.full([N], -1, dtype=tl.int32)
    for i_first in range(0, resident_blocks, STEP):
        o_c = i_first + tl.arange(0, STEP)
        b_held = tl.load(p_held + o_c, mask=o_c < resident_blocks, other=-1)  # [STEP]
        b_used = tl.load(p_used + o_c, mask=o_c < resident_blocks, other=0)
        m_same = (b_page[:, None] == b_held[None, :]) & m_page[:, None]  # [N, STEP]
        b_resident = tl.maximum(b_resident, tl.max(tl.where(m_same, o_c[None, :], -1), 1))
        m_named = tl.max(m_same.to(tl.int32), 0) > 0
        tl.store(p_age + o_c, tl.where(m_named, number, b_used), mask=o_c < resident_blocks)
    tl.debug_barrier()
    m_there = b_resident >= 0
    m_missing = m_page & (m_there == 0)
    b_rank = tl.cumsum(m_missing.to(tl.int32), 0) - 1
    # victims in order: longest unused first, then by number; a resident_block's place is how many come before
    # it
    b_read = tl.zeros([N], dtype=tl.int32)
    for i_first in range(0, resident_blocks, STEP):
        o_c = i_first + tl.arange(0, STEP)
        b_age = tl.load(p_age + o_c, mask=o_c < resident_blocks, other=0)
        b_place = tl.zeros([STEP], dtype=tl.int32)
        for i_other in range(0, resident_blocks, STEP):
            o_j = i_other + tl.arange(0, STEP)
            b_age_j = tl.load(p_age + o_j, mask=o_j < resident_blocks, other=0)
            m_older = b_age_j[None, :] < b_age[:, None]  # [STEP, STEP]
            m_before = (b_age_j[None, :] == b_age[:, None]) & (o_j[None, :] < o_c[:, None])
            b_place += tl.sum(((m_older | m_before) & (o_j < resident_blocks)[None, :]).to(tl.int32), 1)
        m_victim = (
            m_missing[:, None] & (b_place[None, :] == b_rank[:, None]) & (o_c < resident_blocks)[None, :]
        )
        b_resident = tl.maximum(b_resident, tl.max(tl.where(m_victim, o_c[None, :], -1), 1))
        b_read += tl.sum(tl.where(m_victim, b_age[None, :], 0), 1)
    # what has never been named has age 0, and so has the selection before the first
    m_page = m_page & (
        b_resident >= 0
    )  # more pages than resident_blocks: a caller's error, and no write past them
    m_missing = m_missing & m_page
    m_late = m_missing & (b_read >= tl.maximum(1, number - 1))
    m_load = m_missing & (m_late == 0)
    b_before = tl.load(p_named + b_page, mask=m_page, other=0)
    n_recent = tl.sum((m_page & (b_before <= oldest)).to(tl.int32), 0)
    for i_first in range(0, pages, STEP):
        o_page = i_first + tl.arange(0, STEP)
        b_named = tl.load(p_named + o_page, mask=o_page < pages, other=0)
        n_recent += tl.sum(((b_named > oldest) & (o_page < pages)).to(tl.int32), 0)
    tl.debug_barrier()  # all threads have read what is written now
    tl.store(p_held + b_resident, b_page, mask=m_page & (m_late == 0))
    tl.store(p_used + b_resident, tl.zeros([N], dtype=tl.int32) + number, mask=m_page)
    tl.store(p_named + b_page, tl.zeros([N], dtype=tl.int32) + number, mask=m_page)
    b_source = tl.load(p_host + b_page, mask=m_page, other=0)
    b_target = tl.load(p_resident_block_pages + b_resident, mask=m_page, other=0)
    p_out += i_list * n + o_n
    tl.store(p_out, tl.where(m_page, pages - 1 - b_resident, b_block), mask=m_n)
    b_to = tl.cumsum(m_load.to(tl.int32), 0) - 1
    m_to = (b_to[:, None] == o_n[None, :]) & m_load[:, None]  # [N, N]: from, to
    m_none = tl.max(m_to.to(tl.int32), 0) == 0
    b_out = tl.sum(tl.where(m_to, b_source[:, None], 0), 0)
    tl.store(p_out + n_lists * n, tl.where(m_none, -1, b_out), mask=m_n)
    b_out = tl.sum(tl.where(m_to, b_target[:, None], 0), 0)
    tl.store(p_out + 2 * n_lists * n, tl.where(m_none, -1, b_out), mask=m_n)
    b_to = tl.cumsum(m_late.to(tl.int32), 0) - 1
    m_to = (b_to[:, None] == o_n[None, :]) & m_late[:, None]
    m_none = tl.max(m_to.to(tl.int32), 0) == 0
    b_out = tl.sum(tl.where(m_to, b_page[:, None], 0), 0)
    tl.store(p_out + 3 * n_lists * n, tl.where(m_none, -1, b_out), mask=m_n)
    b_out = tl.sum(tl.where(m_to, b_resident[:, None], 0), 0)
    tl.store(p_out + 4 * n_lists * n, tl.where(m_none, -1, b_out), mask=m_n)
    p_tally += i_list * 4
    tl.store(p_tally, tl.sum((m_page & m_there).to(tl.int32), 0))
    tl.store(p_tally + 1, tl.sum(m_missing.to(tl.int32), 0))
    tl.store(p_tally + 2, tl.sum(m_late.to(tl.int32), 0))
    tl.store(p_tally + 3, n_recent)


def resident_assign(
    selection: PageSelection,
    state: ResidentState,
    host: torch.Tensor,
    resident_pages: torch.Tensor,
    *,
    number: int,
    recent: int,
) -> ResidentBlocks:
    """Launch the kernel; see :func:`ragserve_kernels.resident_assign.resident_assign`."""
    layers, kv_heads, n = selection.blocks.shape
    resident_blocks, pages = state.held.shape[2], state.named.shape[2]
    out = selection.blocks.new_empty((5, layers, kv_heads, n))
    tally = selection.blocks.new_empty((layers, kv_heads, 4))
    _assign[(layers * kv_heads,)](
        selection.blocks,
        selection.counts,
        *state,
        host,
        resident_pages,
        torch.empty_like(state.used),
        out,
        tally,
        n,
        resident_blocks,
        pages,
        number,
        max(0, number - recent),
        N=next_power_of_2(max(16, n)),
        STEP=_STEP,
        num_warps=4,
    )
    placed, source, target, late_pages, late_resident_blocks = out.unbind(0)
    return ResidentBlocks(placed, source, target, late_pages, late_resident_blocks, tally)
