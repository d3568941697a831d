"""Engines that cannot keep documents serve exact strategies from SGLang's own cache and say why."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ext.state import current

FLAGS = {
    "disable_radix_cache": False,
    "enable_hierarchical_cache": False,
    "speculative_algorithm": None,
    "pp_size": 1,
    "dp_size": 1,
    "enable_dp_attention": False,
    "enable_pdmux": False,
    "enable_lora": None,
    "disaggregation_mode": "null",
    "enable_lmcache": False,
    "enable_flexkv": False,
    "model_path": "no-such-model",
    "load_format": "auto",
}


@pytest.fixture(autouse=True)
def _one_runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(current, "runtime", None)
    yield
    if current.runtime is not None:
        current.runtime.tiers.close()


def heads_pool(dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    return MHATokenToKVPool(
        size=64, page_size=1, dtype=dtype, head_num=2, head_dim=8, layer_num=2, device="cpu",
        enable_memory_saver=False, **options,
    )  # fmt: skip


def latent_pool() -> Any:
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    return MLATokenToKVPool(
        size=64, page_size=1, dtype=torch.float32, kv_lora_rank=16, qk_rope_head_dim=8, layer_num=2,
        device="cpu", enable_memory_saver=False,
    )  # fmt: skip


def engine(pool: Any, *, hybrid: bool = False, **flags: Any) -> Any:
    """SGLang's context of a cache factory, over a real pool, allocator and row table."""
    from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

    args = SimpleNamespace(**FLAGS | flags)
    allocator = TokenToKVPoolAllocator(64, dtype=pool.dtype, device="cpu", kvcache=pool, need_sort=False)
    rows = ReqToTokenPool(size=4, max_context_len=64, device="cpu", enable_memory_saver=False)
    runner = SimpleNamespace(
        token_to_kv_pool=pool, tp_group=None, device="cpu", server_args=args, req_to_token_pool=rows,
        model=SimpleNamespace(), dtype=torch.float32, max_total_num_tokens=64,
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: 2, vocab_size=100, context_len=64),
    )  # fmt: skip
    return SimpleNamespace(
        server_args=args, tp_worker=SimpleNamespace(model_runner=runner), is_hybrid_swa=hybrid,
        is_hybrid_ssm=False, enable_hierarchical_cache=False, disable_radix_cache=args.disable_radix_cache,
        effective_chunked_prefill_size=8192, full_tokens_per_layer=None, tp_size=1, tp_rank=0, is_dsa=False,
        params=CacheInitParams(
            disable=False, req_to_token_pool=rows, token_to_kv_pool_allocator=allocator, page_size=1
        ),
    )  # fmt: skip


def started(context: Any) -> Any:
    from sglang_ext.process.build import create_cache

    return create_cache(context)


def asked(operation: str, **arguments: Any) -> dict[str, Any]:
    from sglang_ext.process.control import answer

    reply = answer(current.runtime, {"op": operation, **arguments})
    assert reply["success"], reply["error"]
    return dict(reply["response"][0])


@pytest.mark.parametrize(
    ("make", "flags", "says"),
    [
        (lambda: heads_pool(torch.float8_e4m3fn), {}, "float8_e4m3fn"),
        (latent_pool, {}, "MLATokenToKVPool"),
        (lambda: heads_pool(v_head_dim=4), {}, "different sizes"),
        (heads_pool, {"speculative_algorithm": "EAGLE"}, "speculative_algorithm='EAGLE'"),
        (heads_pool, {"pp_size": 2}, "pp_size=2"),
        (heads_pool, {"dp_size": 2}, "dp_size=2: a document would be on one replica"),
        (heads_pool, {"enable_dp_attention": True}, "enable_dp_attention=True"),
        (heads_pool, {"enable_pdmux": True}, "enable_pdmux=True"),
        (heads_pool, {"enable_lora": True}, "enable_lora=True: documents' KV is that of the model without"),
        (heads_pool, {"disaggregation_mode": "prefill"}, "disaggregation_mode='prefill'"),
        (heads_pool, {"disable_radix_cache": True}, "disable_radix_cache=True"),
    ],
)
def test_the_engine_starts_and_says_why_it_only_answers_exactly(make: Any, flags: Any, says: str) -> None:
    cache = started(engine(make(), **flags))
    assert type(cache).__module__.startswith("sglang.srt."), "SGLang's own"
    info = asked("info")
    assert info["strategies"] == []
    assert says in info["unsupported"]
    assert "'prefix' or 'full'" in info["unsupported"]


def test_a_model_of_several_kinds_of_layers_is_left_to_sglang() -> None:
    from sglang_ext.process.exact_only import why_no_documents

    assert "different kinds" in str(why_no_documents(engine(heads_pool(), hybrid=True)))


def test_a_plain_engine_keeps_documents() -> None:
    from sglang_ext.process.exact_only import why_no_documents

    assert why_no_documents(engine(heads_pool())) is None
    assert why_no_documents(engine(heads_pool(torch.bfloat16))) is None


def request(plan: str | None, key: str) -> Any:
    params = SimpleNamespace(custom_params=None if plan is None else {"ragserve": plan})
    return SimpleNamespace(
        rid="r", vocab_size=100, input_embeds=None, multimodal_inputs=None, origin_input_ids=[1, 2, 3],
        sampling_params=params, extra_key=key, to_finish=None,
    )  # fmt: skip


class Weak(SimpleNamespace):
    """A namespace that can be kept in a WeakSet."""

    __hash__ = object.__hash__


def test_plans_are_refused_with_the_reason_and_plain_requests_are_not() -> None:
    from sglang_ext.wire.protocol import ContextPlan

    started(engine(latent_pool()))
    refused = Weak(**vars(request(ContextPlan("document", "n").to_json(), "k")))
    current.runtime.on_request(refused)
    assert "MLATokenToKVPool" in refused.to_finish.message
    plain = Weak(**vars(request(None, "namespace:n")))
    current.runtime.on_request(plain)
    assert plain.to_finish is None
    assert plain.extra_key == "namespace:n"


@pytest.mark.parametrize(
    ("operation", "arguments", "says"),
    [("remove", {"keys": ["0" * 32], "namespace": "n"}, {"removed": 0}), ("clear", {}, {})],
)
def test_what_was_removed_leaves_the_prefix_cache(
    operation: str, arguments: dict[str, Any], says: dict[str, Any]
) -> None:
    from array import array

    from sglang.srt.mem_cache.base_prefix_cache import InsertParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    context = engine(heads_pool(torch.float8_e4m3fn))
    cache = started(context)
    slots = context.params.token_to_kv_pool_allocator.alloc(3)
    cache.insert(InsertParams(key=RadixKey(array("q", [1, 2, 3]), extra_key="namespace:n"), value=slots))
    assert cache.evictable_size() == 3
    assert asked(operation, **arguments) == says
    assert cache.evictable_size() == 0
    assert context.params.token_to_kv_pool_allocator.available_size() == 64


@pytest.mark.parametrize("make", [latent_pool, lambda: heads_pool(torch.float8_e4m3fn)])
def test_every_operation_answers(make: Any) -> None:
    started(engine(make()))
    for operation in ("slots", "verify", "clear", "check", "flush"):
        asked(operation)
    asked("budget", host_bytes=0)
    asked("evict", tiers=["device", "host"])
    asked("remove_namespace", namespace="n")
    assert asked("prefix", ids=[1, 2], namespace="n") == {"tokens": 0}
    assert asked("where", keys=["0" * 32], tokens=[3], namespace="n")["below"] == ["absent"]
    stat = asked("stat")
    assert stat["device"]["documents"] == 0
    assert stat["device"]["budget_bytes"] > 0


@pytest.mark.parametrize(("exact", "kept"), [(8, True), (7, False), (0, False)])
def test_sglangs_own_cache_takes_no_answer_with_sparse_steps(exact: int, kept: bool) -> None:
    from sglang_ext.versions import IS_0_5_17, keep_exact

    told: list[tuple[bool, int]] = []

    class Cache:
        """SGLang's of two versions."""

        def cache_finished_req(self, req: Any, is_insert: bool = True, *, kv_len_to_handle: int) -> None:
            told.append((is_insert, kv_len_to_handle))

        def checkpoint(self, req: Any, *, up_to: int) -> None:
            told.append((True, up_to))

    cache = Cache()
    keep_exact(cache, lambda req, tokens: min(exact, tokens))
    if IS_0_5_17:
        cache.cache_finished_req(object(), kv_len_to_handle=8)
        cache.cache_finished_req(object(), is_insert=False, kv_len_to_handle=8)
        assert told == [(kept, 8), (False, 8)]
        return
    cache.checkpoint(SimpleNamespace(finished=lambda: True), up_to=8)
    cache.checkpoint(SimpleNamespace(finished=lambda: False), up_to=4)  # a chunk of a prompt
    assert told == [*[(True, 8)] * kept, (True, 4)]
