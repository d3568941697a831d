"""Every decode kernel over odd shapes in one plain process, for compute-sanitizer; see memcheck.py."""

from __future__ import annotations

import os
import time

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from tests.kernels import test_page_select as ps
from tests.kernels import test_page_stats as st
from tests.kernels import test_progressive_decode as pd
from tests.kernels import test_quantize_kv as qk
from tests.kernels import test_sparse_decode as sd


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(int(time.time()))
    for head_dim, dtype, bits in ((64, torch.float32, 8), (128, torch.bfloat16, 4)):
        qk.test_error_is_half_a_step(device, head_dim, dtype, bits)
    qk.test_constant_rows_and_skipped_slots(device, 4)
    print("quantize_kv done", flush=True)
    sd.test_full_heads_are_dense_attention(device, 16, torch.bfloat16, 128)
    sd.test_the_split_changes_nothing(device, 7)
    for page_size, block_size, bits in ((64, 64, 0), (1, 32, 8), (128, 256, 4)):
        sd.test_only_selected_blocks_are_read(device, page_size, block_size, bits)
    sd.test_three_kinds_of_heads_in_one_launch(device, 20, 1)
    print("sparse_decode done", flush=True)
    ps.test_best_blocks(device, 128, 4, "minmax")
    ps.test_best_blocks(device, None, 1, "center")
    ps.test_more_blocks_than_registers_hold(device, 17000)
    print("page_select done", flush=True)
    for dtype, page_size, logical in ((torch.bfloat16, 64, 16), (torch.float32, 128, 1)):
        st.test_against_the_keys(device, dtype, page_size, logical)
    print("page_stats done", flush=True)
    pd.test_stops_where_the_estimate_passes(device, 8.0, "round", 0.95)
    pd.test_layouts(device, 1, 16, 128, torch.bfloat16)
    pd.test_quantised(device, 4)
    print("progressive_decode done", flush=True)


if __name__ == "__main__":
    main()
