"""Host pages on a CUDA machine: copies of one owner and threads that write for the next."""

from __future__ import annotations

import pytest
import torch

from ragserve_kernels.scatter_d2h import Saver, scatter_d2h
from sglang_ext.analysis.forward import attend
from sglang_ext.attention.prefill.chunk_attention import LEAST_ROWS, ChunkAttention
from sglang_ext.kv_offload.host.copy_stream import CopyStream

pytestmark = pytest.mark.gpu


def test_threads_write_to_a_page_after_the_copies_of_its_former_owner() -> None:
    """The owner has left while its copies are under way, and a prompt that is prefilled by layers has its
    pages."""
    device = torch.device("cuda")
    copies, forward = CopyStream(device), torch.cuda.Stream()
    host = torch.zeros(8, 16, 64).pin_memory()
    old, new = torch.ones(8, 16, 64, device=device), torch.full((128, 1, 64), 2.0, device=device)
    with Saver(device=device, staging_bytes=new.nbytes) as saver:
        with copies.behind(old):
            torch.cuda._sleep(200_000_000)
            host.copy_(old, non_blocking=True)
        with torch.cuda.stream(forward):
            forward.wait_stream(torch.cuda.default_stream())
            copies.join()
            scatter_d2h(new, host, torch.arange(8)[None], saver=saver)
        saver.wait()
        torch.cuda.synchronize()
    assert bool((host == 2).all())


def test_chunks_attend_by_fa3_as_rows_do() -> None:
    """A second prompt of other lengths takes the places of the first one's plans."""
    pytest.importorskip("flashinfer")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("FA3 is of Hopper GPUs")
    heads, kv_heads, dim, dtype = 8, 2, 128, torch.bfloat16
    workspace = torch.empty(2**27, dtype=torch.uint8, device="cuda")
    chunks = ChunkAttention(workspace, heads, kv_heads, dim, dtype)
    assert chunks.plan(0, LEAST_ROWS - 1, LEAST_ROWS - 1, 1.0) is None
    for lengths in ([LEAST_ROWS, 2048, 1100], [3001, LEAST_ROWS]):
        k, v = torch.randn(2, sum(lengths), kv_heads, dim, device="cuda", dtype=dtype)
        planned = [chunks.plan(i, rows, sum(lengths[: i + 1]), dim**-0.5) for i, rows in enumerate(lengths)]
        for _ in range(3):  # layers
            end = 0
            for rows, by_plan in zip(lengths, planned, strict=True):
                q = torch.randn(rows, heads, dim, device="cuda", dtype=dtype)
                end += rows
                assert by_plan is not None
                got = by_plan(q, k[:end], v[:end])
                want = attend(q.float(), k.float(), v.float(), end - rows, dim**-0.5)
                torch.testing.assert_close(got.float(), want, atol=2e-2, rtol=2e-2)
