"""Every compose and prefill kernel over odd shapes in one plain process, for compute-sanitizer:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 PYTHONPATH=kernels compute-sanitizer --tool memcheck python -m
    tests.kernels.memcheck

Without PyTorch's caching allocator every tensor is an allocation of its own, so that an access past its end
is seen."""

from __future__ import annotations

import os
import time

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from tests.kernels import test_block_summary as bs
from tests.kernels import test_gather_h2d as gh
from tests.kernels import test_prefill_lists as sl
from tests.kernels import test_prefix_rows_attention as pra
from tests.kernels import test_rotate_gather as rg
from tests.kernels import test_scatter_d2h as sd
from tests.kernels import test_sparse_prefill as sp


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(int(time.time()))
    for host in (False, True):
        for dtype in (torch.bfloat16, torch.float32):
            rg.test_documents_against_truth(device, dtype, host)
        rg.test_heads_and_partial_rotation(device, 3, 64, 64, host)
        rg.test_heads_and_partial_rotation(device, 2, 128, 96, host)
    rg.test_fewer_programs_than_runs(device)
    rg.test_block_sizes(device, 1)
    print("rotate_gather done", flush=True)
    for tokens in (1, 16, 63):
        gh.test_blocks_arrive_unchanged(device, 2, tokens, torch.bfloat16)
    gh.test_any_number_of_programs(device, 3)
    print("gather_h2d done", flush=True)
    if device.type == "cuda":
        sd.test_saver_hides_behind_later_work(63)
        print("scatter_d2h done", flush=True)
    for dtype in (torch.bfloat16, torch.float32):
        pra.test_ragged_batch(device, dtype)
    pra.test_query_groups(device, (5, 1))
    pra.test_head_and_page_sizes(device, 256, 16)
    pra.test_rows_in_any_order_and_padding_rows(device)
    print("prefix_rows_attention done", flush=True)
    sp.test_random_blocks_of_ragged_requests(device, 16, (32, 16))
    sp.test_all_blocks_are_dense_attention(device, 256, [(63, 20), (130, 3)])
    for dtype in (torch.bfloat16, torch.float32):
        sl.test_block_scores_are_shares_of_the_attention(device, dtype)
    for alpha, share in ((0.8, None), (1.0, 0.3)):
        sl.test_lists_of_blocks_are_those_of_the_choice(device, (32, 16), 16, (2, 1), alpha, share)
        sl.test_lists_of_lines_are_those_of_the_choice(device, alpha, share, True)
        sl.test_the_best_of_given_scores_are_found_without_a_sort(device, alpha, share, True)
        sl.test_lines_of_given_masses_are_found_without_a_sort(device, alpha, share, True)
    print("sparse_prefill, prefill_lists done", flush=True)
    for dtype in (torch.bfloat16, torch.float32):
        bs.test_ragged_documents(device, dtype)
    bs.test_query_groups(device, (6, 2))
    bs.test_head_sizes(device, 256)
    bs.test_sampled_queries(device, 3)
    print("block_summary done", flush=True)


if __name__ == "__main__":
    main()
