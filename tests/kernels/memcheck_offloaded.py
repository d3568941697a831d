"""Every kernel that offloaded requests use in one plain process, for compute-sanitizer; see memcheck.py.

Small sizes, also on a GPU: racecheck is a hundred times slower than the kernels. Names of kernels as
arguments: these alone."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from tests.kernels import test_context_gather as cx
from tests.kernels import test_gather_h2d as gh
from tests.kernels import test_page_select as ps
from tests.kernels import test_page_stats as st
from tests.kernels import test_prefix_rows_attention as pra
from tests.kernels import test_progressive_places as pp
from tests.kernels import test_resident_block_assign as ca
from tests.kernels import test_resident_gather as cg
from tests.kernels import test_scatter_d2h as sc
from tests.kernels import test_shared_assign as cas
from tests.kernels import test_shared_gather as ce
from tests.kernels import test_sparse_decode as sd

pp.GPU = False  # short requests


def resident_assign(device: torch.device) -> None:
    for resident_blocks, n, pages in ((5, 5, 30), (48, 33, 120), (150, 9, 170)):
        ca.test_choices_in_a_row(device, resident_blocks, n, pages)


def resident_gather(device: torch.device) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for page, n in ((16, 5), (16, 40), (128, 3)):
            cg.test_pages_arrive_in_their_resident_blocks(device, page, n, dtype)


def context_gather(device: torch.device) -> None:
    for page, block, dim, rotary, dtype, codes in (
        (16, 16, 64, 64, torch.float32, False),
        (64, 16, 128, 128, torch.bfloat16, False),
        (16, 32, 64, 40, torch.float16, True),
        (64, 16, 64, 64, torch.bfloat16, True),
    ):
        for only in (None, 1):
            cx.test_pages_are_those_of_the_context(device, page, block, dim, rotary, dtype, codes, only)


def context_shared_blocks(device: torch.device) -> None:
    for page, n, count, rotary, dtype, codes in (
        (16, 9, 7, 64, torch.float32, False),
        (64, 5, 5, 64, torch.bfloat16, False),
        (16, 40, 33, 40, torch.float32, True),
    ):
        cx.test_pages_of_contexts_arrive_in_shared_blocks(device, page, n, count, rotary, dtype, codes)


def shared_assign(device: torch.device) -> None:
    for n, pages, resident_blocks in ((5, 30, 3), (33, 60, 12), (9, 9, 20)):
        cas.test_choices_in_a_row(device, n, pages, resident_blocks)


def shared_gather(device: torch.device) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for page, n, count in ((16, 9, 7), (16, 40, 40), (128, 3, 2)):
            ce.test_pages_arrive_in_their_shared_blocks(device, page, n, count, dtype)


def resident_blocks_and_sparse_decode(device: torch.device) -> None:
    cg.test_decode_reads_resident_blocks_as_the_pages_that_they_hold(device, 16, torch.float32)
    cg.test_decode_reads_resident_blocks_as_the_pages_that_they_hold(device, 64, torch.bfloat16)
    sd.test_the_split_changes_nothing(device, 7)
    sd.test_three_kinds_of_heads_in_one_launch(device, 20, 1)


def gather_h2d(device: torch.device) -> None:
    for tokens in (1, 16, 63):
        gh.test_blocks_arrive_unchanged(device, 2, tokens, torch.bfloat16)
    gh.test_any_number_of_programs(device, 3)


def scatter_d2h(device: torch.device) -> None:
    if device.type == "cuda":
        for tokens in (1, 63, 111):
            sc.test_saver_hides_behind_later_work(tokens)
    else:
        sc.test_bad_arguments()


def progressive_decode_over_places(device: torch.device) -> None:
    for share, shared_blocks, page_size, head_dim, dtype in (
        (0.5, None, 16, 64, torch.float32),
        (0.7, 0.5, 64, 128, torch.bfloat16),
        (1.0, 0.5, 16, 64, torch.float32),
    ):
        pp.test_it_attends_as_if_all_pages_were_in_the_pool(
            device, share, shared_blocks, page_size, head_dim, dtype
        )
    for shared_blocks, page_size, head_dim, dtype, half, codes in (
        (0.5, 64, 128, torch.bfloat16, 64, False),
        (0.4, 128, 64, torch.float32, 20, False),
        (0.3, 16, 64, torch.float32, 32, True),
    ):
        pp.test_pages_of_contexts_are_read_in_their_documents(
            device, shared_blocks, page_size, head_dim, dtype, half, codes, "round"
        )
    pp.test_threshold_one_reads_every_page_wherever_it_is(device)
    pp.test_pages_after_the_stop_are_not_read(device)


def filling(device: torch.device) -> None:
    for page_size, head_dim, dtype, half, codes, threshold in (
        (16, 64, torch.float32, None, False, 0.6),
        (64, 128, torch.bfloat16, None, False, 1.0),
        (16, 64, torch.float32, 32, True, 0.6),
        (64, 128, torch.bfloat16, 64, False, 1.0),
    ):
        pp.test_pages_that_are_read_from_the_host_fill_shared_blocks(
            device, page_size, head_dim, dtype, half, codes, threshold
        )
    for n, pages, resident_blocks in ((5, 30, 3), (33, 60, 12)):
        cas.test_what_attention_has_not_filled_is_left(device, n, pages, resident_blocks, 0.4)


def prefix_rows_attention(device: torch.device) -> None:
    pra.test_ragged_batch(device, torch.bfloat16)
    pra.test_log_sum_exp_of_every_row(device, naive=False)
    pra.test_keys_split_over_programs(device, 5)


def page_stats(device: torch.device) -> None:
    st.test_against_the_keys(device, torch.bfloat16, 64, 16)
    st.test_statistics_kept_behind_those_of_the_pool(device)


def page_select(device: torch.device) -> None:
    ps.test_best_blocks(device, 128, 4, "minmax")
    ps.test_best_blocks(device, None, 1, "center")
    ps.test_layers_in_one_call_are_those_of_a_call_each(device, "minmax", naive=False)
    ps.test_budgets_and_reuse_by_request(device, naive=False)


KERNELS: tuple[Callable[[torch.device], None], ...] = (
    resident_assign,
    resident_gather,
    context_gather,
    context_shared_blocks,
    shared_assign,
    shared_gather,
    resident_blocks_and_sparse_decode,
    gather_h2d,
    scatter_d2h,
    progressive_decode_over_places,
    filling,
    prefix_rows_attention,
    page_stats,
    page_select,
)


def main(names: list[str]) -> None:
    known = {each.__name__: each for each in KERNELS}
    if unknown := set(names) - set(known):
        raise SystemExit(f"unknown: {', '.join(sorted(unknown))}; known are {', '.join(known)}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(int(time.time()))
    for name in names or known:
        began = time.monotonic()
        known[name](device)
        if device.type == "cuda":
            torch.cuda.synchronize()
        print(f"{name} done, {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
