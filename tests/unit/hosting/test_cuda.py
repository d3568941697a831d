"""Host pages on a CUDA machine: copies of one owner and threads that write for the next."""

from __future__ import annotations

import pytest
import torch

from ragserve_kernels.scatter_d2h import Saver, scatter_d2h
from sglang_ext.hosting.beside import CopyStream

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
