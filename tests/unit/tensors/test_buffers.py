"""Arrays that go to the device together."""

from __future__ import annotations

import numpy as np
import torch

from sglang_ext.tensors.buffers import upload_all


def test_arrays_that_travel_together_arrive_as_they_were() -> None:
    arrays = [np.arange(3), np.arange(8).reshape(2, 4), np.empty(0, dtype=np.int64), np.array([7])]
    found = upload_all(arrays, torch.device("cpu"))
    assert [part.tolist() for part in found] == [each.tolist() for each in arrays]
    assert all(part.dtype == torch.int64 and part.is_contiguous() for part in found)


def test_each_array_begins_where_kernels_expect_a_tensor() -> None:
    first, *others = upload_all([np.arange(n) for n in (1, 5, 2, 3)], torch.device("cpu"))
    assert all((part.data_ptr() - first.data_ptr()) % 16 == 0 for part in others)
