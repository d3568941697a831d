"""Our extend attention against SGLang's own, on random batches with cached prefixes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st


@pytest.fixture(scope="module")
def backends():  # type: ignore[no-untyped-def]
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    from sglang_ext.cpu.torch_native import TorchNativeCpuBackend

    runner = SimpleNamespace(device="cpu", req_to_token_pool=None, token_to_kv_pool=None)
    return TorchNativeCpuBackend(runner), TorchNativeAttnBackend(runner)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 70), st.integers(1, 63)), min_size=1, max_size=4),
    st.sampled_from([(4, 4), (6, 2), (8, 1)]),
    st.sampled_from([16, 64]),
    st.integers(0, 2**31),
)
def test_equals_sglang(
    backends, lengths: list[tuple[int, int]], heads: tuple[int, int], dim: int, seed: int
) -> None:  # type: ignore[no-untyped-def]
    ours, theirs = backends
    torch.manual_seed(seed)
    prefix, new = (torch.tensor(part) for part in zip(*lengths, strict=True))
    total = prefix + new
    pool = int(total.sum()) + 5
    k, v = torch.randn(pool, heads[1], dim), torch.randn(pool, heads[1], dim)
    query = torch.randn(int(new.sum()), heads[0], dim)
    order, table = torch.randperm(pool), torch.zeros(len(lengths), int(total.max()), dtype=torch.int64)
    at = 0
    for i, n in enumerate(total.tolist()):
        table[i, :n], at = order[at : at + n], at + n
    rows = torch.arange(len(lengths))
    args = (k, v, table, rows, total, prefix, new)
    options = {"scaling": dim**-0.5, "enable_gqa": heads[0] != heads[1], "causal": True}
    got = ours._run_sdpa_forward_extend(query, torch.full_like(query, torch.nan), *args, **options)
    want = theirs._run_sdpa_forward_extend(query, torch.empty_like(query), *args, **options)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
