"""A pool of 8 or 4 bits: what is written, what an extend and a decode step then read, and its size."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ragserve_kernels.page_select import summarise
from ragserve_kernels.quantize_kv import dequantize_kv
from sglang_ext.attention.decode.page_stats import PageStatistics
from sglang_ext.attention.pools.quantized_pool import QuantizedKVPool, cell_bytes, quantized_pool
from sglang_ext.wire.protocol import ATTENTION_CONFIG_VARIABLE

LAYERS, HEADS, DIM, PAGE, SLOTS = 3, 2, 64, 16, 128


@pytest.fixture(params=[8, 4])
def pool(request: pytest.FixtureRequest) -> QuantizedKVPool:
    return make(request.param)


def make(bits: int, **changes: Any) -> QuantizedKVPool:
    shape = {
        "head_num": HEADS,
        "head_dim": DIM,
        "layer_num": LAYERS,
        "device": "cpu",
        "enable_memory_saver": False,
    }
    return quantized_pool(bits)(SLOTS, page_size=PAGE, dtype=torch.float32, **(shape | changes))


def rows(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = torch.randn(2, n, HEADS, DIM, generator=torch.Generator().manual_seed(seed)).unbind()
    return k, v


def layer(number: int) -> Any:
    return SimpleNamespace(layer_id=number)


def test_an_extend_reads_its_own_rows_and_earlier_ones_as_stored(pool: QuantizedKVPool) -> None:
    step = 2 ** (1 - pool.bits) * 8  # of values within about 4 sigma
    old, new = torch.arange(20, 37), torch.tensor([90, 41, 3])
    for number in range(LAYERS):
        k, v = rows(len(old), number)
        pool.set_kv_buffer(layer(number), old, k.flatten(1), v.flatten(1))
    for number in range(LAYERS):
        k, v = rows(len(old), number)
        more_k, more_v = rows(len(new), 10 + number)
        pool.prepare(number, old)
        own = pool.written(layer(number), new, more_k.flatten(1), more_v)
        assert [x.shape for x in own] == [more_k.flatten(1).shape, more_v.shape]
        for got, read, stored, want in zip(
            pool.get_kv_buffer(number), own, pool.quantized(number), (more_k, more_v), strict=True
        ):
            assert torch.equal(got[new], dequantize_kv(stored, new))
            assert torch.equal(got[new], read.view_as(want))
            assert 0 < float((got[new] - want).abs().max()) < step
        for got, stored, want in zip(pool.get_kv_buffer(number), pool.quantized(number), (k, v), strict=True):
            assert torch.equal(got[old], dequantize_kv(stored, old))
            assert 0 < float((got[old] - want).abs().max()) < step
    stored_v = dequantize_kv(pool.quantized(1)[1], new)
    assert 0 < float((stored_v - rows(3, 11)[1]).abs().max()) < step


def test_a_decode_step_leaves_the_workspace_alone(pool: QuantizedKVPool) -> None:
    k, v = rows(4, 1)
    pool.store(2, torch.tensor([5, 6, 100, 77]), k, v)
    assert not pool.get_key_buffer(2).any()
    assert torch.allclose(dequantize_kv(pool.quantized(2)[0])[100], k[2], atol=0.6)
    assert not dequantize_kv(pool.quantized(0)[0]).any(), "other layers are empty"


def test_statistics_are_those_of_the_stored_keys(pool: QuantizedKVPool) -> None:
    table = torch.arange(SLOTS + PAGE, dtype=torch.int32)[None]
    statistics = PageStatistics(pool, table, PAGE, 4)
    for number in range(LAYERS):
        pool.store(number, torch.arange(SLOTS + PAGE), *rows(SLOTS + PAGE, number))
    statistics.after_extend([(0, 0, 5 * PAGE)])
    for number in range(LAYERS):
        low, high, _, _ = summarise(dequantize_kv(pool.quantized(number)[0]), 4)
        assert torch.equal(statistics.tables.k_min[number, : 5 * 4], low[: 5 * 4])
        assert torch.equal(statistics.tables.k_max[number, : 5 * 4], high[: 5 * 4])
        assert not statistics.tables.k_max[number, 5 * 4 :].any(), "pages that nobody named"
    assert statistics.differing(torch.arange(5)) == []
    statistics.before_decode(torch.tensor([0]), torch.tensor([6 * PAGE + 1]), None)
    assert statistics.differing(torch.arange(6)) == []
    pool.store(1, torch.tensor([2 * PAGE + 3]), *(x * 9 for x in rows(1, 5)))
    assert statistics.differing(torch.arange(6)) == [2]
    assert statistics.bytes == LAYERS * HEADS * DIM * 4 * (2 * (SLOTS + PAGE) // 4 + (SLOTS + PAGE) // PAGE)


def test_what_a_slot_takes_is_what_the_pool_says(pool: QuantizedKVPool) -> None:
    plain = LAYERS * HEADS * DIM * 2 * 4
    counted = cell_bytes(
        plain, layers=LAYERS, kv_heads=HEADS, head_dim=DIM, page_size=PAGE, logical_page=4, bits=pool.bits
    )
    statistics = PageStatistics(pool, torch.zeros(1, 16, dtype=torch.int32), PAGE, 4)
    assert counted * (SLOTS + PAGE) == sum(pool.get_kv_size_bytes()) + statistics.bytes
    assert cell_bytes(
        plain, layers=LAYERS, kv_heads=HEADS, head_dim=DIM, page_size=PAGE, logical_page=4, bits=16
    ) == round(plain * (1 + 1 / 4 + 1 / 32))


def test_what_cannot_be_done_is_said() -> None:
    with pytest.raises(ValueError, match="kv_bits=16"):
        make(8, v_head_dim=128)
    with pytest.raises(RuntimeError, match="cannot be moved out of the pool"):
        make(8).get_contiguous_buf_infos()


def test_sglang_builds_and_sizes_the_pool_that_is_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    """By SGLang's own functions for CUDA, with our hooks on them; on the CPU platform the server's tests see
    the same.
    """
    from sglang.srt.mem_cache import kv_cache_configurator
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.model_executor.pool_configurator import DefaultPoolConfigurator
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import get_parallel

    load_plugins()
    monkeypatch.setattr(type(get_parallel()), "attn_tp_size", 1)
    contexts = {  # of the server's configuration, which no engine has published here
        "get_schedule": SimpleNamespace(prefill_only_disable_kv_cache=False),
        "get_exec": SimpleNamespace(features=SimpleNamespace(enable_memory_saver=False)),
        "get_disagg": SimpleNamespace(enable_pdmux=False),
        "get_spec": SimpleNamespace(speculative_algorithm=None),
    }
    for name, context in contexts.items():
        monkeypatch.setattr(kv_cache_configurator, name, lambda context=context: context)
    model = SimpleNamespace(
        get_num_kv_heads=lambda *ranks: HEADS,
        head_dim=DIM,
        v_head_dim=DIM,
        hf_config=SimpleNamespace(architectures=[]),
    )
    engine: Any = SimpleNamespace(
        server_args=SimpleNamespace(page_size=PAGE, enable_hisparse=False),
        model_config=model,
        layer_info=SimpleNamespace(num_effective_layers=LAYERS, start_layer=0, end_layer=LAYERS),
        device="cpu",
        kv_cache_dtype=torch.float32,
        kv_cache_dtype_str="auto",
        pool_page_size=PAGE,
        post_capture_kv_active=False,
        use_mla_backend=False,
        is_draft_worker=True,
        kv_shard_rank=None,
    )

    def built(config: dict[str, Any] | None) -> tuple[Any, int]:
        monkeypatch.setenv(ATTENTION_CONFIG_VARIABLE, json.dumps(config) if config else "")
        pool = KVCacheConfigurator._build_mha_kv_pool(
            engine, max_total_num_tokens=SLOTS, mha_pool_class=MHATokenToKVPool
        )
        configurator = object.__new__(DefaultPoolConfigurator)
        configurator.kv_cache_dtype_str = "auto"
        return pool, configurator._compute_cell_size(engine, LAYERS)

    plain, cell = built(None)
    assert (type(plain), cell) == (MHATokenToKVPool, LAYERS * HEADS * DIM * 2 * 4)
    sparse, with_statistics = built({"logical_page": 4})
    assert (type(sparse), with_statistics) == (MHATokenToKVPool, round(cell * (1 + 1 / 4 + 1 / 32)))
    few, smaller = built({"logical_page": 4, "kv_bits": 8})
    assert isinstance(few, QuantizedKVPool)
    assert few.bits == 8
    assert smaller < with_statistics
