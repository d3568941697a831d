"""Sizes of the two pools of a server whose streaming heads have one of their own, and what does not go with
it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ragserve.config import load
from ragserve.engine.server_args import server_args
from ragserve.errors import InvalidRequest
from sglang_ext.attention.pools.streaming_heads import save_pattern
from sglang_ext.attention.pools.streaming_pool import MOST_ROWS, StreamingPlan, StreamingRings
from sglang_ext.attention.pools.streaming_pool_runtime import StreamingPoolRuntime
from sglang_ext.wire.attention_config import AttentionConfig
from sglang_ext.wire.protocol import ATTENTION_CONFIG_VARIABLE
from sglang_ext.wire.request_options import DecodeOptions

PAGE, LAYERS, KV_HEADS = 64, 4, 4
PLAIN = 2 * LAYERS * KV_HEADS * 128 * 2  # bytes of a token


def plan_of(folder: Path, share: float = 0.5, *, rank: int = 0, world: int = 1) -> StreamingPlan:
    heads = folder / "heads.json"
    gates = torch.arange(LAYERS * KV_HEADS).view(LAYERS, KV_HEADS) / 16
    save_pattern(heads, gates, share=share, model="any")
    config = AttentionConfig(heads=heads, heads_pool="own")
    return StreamingPlan.of(config, PAGE, layers=LAYERS, kv_heads=KV_HEADS // world, rank=rank, world=world)


def test_a_request_has_sinks_its_own_page_and_local_pages(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    assert (plan.sinks, plan.local, plan.ring) == (1, 4, 6)
    assert (plan.full_share, plan.ring_share) == (0.5, 0.5)
    rings = StreamingRings(plan, 3, 8, dtype=torch.float32, device=torch.device("cpu"))
    places = rings.pages(torch.tensor([[0], [2]]), torch.arange(12))
    assert places.tolist() == [
        [0, 1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1],
        [12, 13, 14, 15, 16, 17, 13, 14, 15, 16, 17, 13],
    ]
    assert rings.bytes == 3 * 6 * PAGE * 8 * 8 * 2 * 4  # 8 streaming heads of 8 dimensions


@pytest.mark.parametrize("available", [2**24, 2**28, 2**32, 2**36])
@pytest.mark.parametrize("rows", [None, 1, 16, 64])
def test_both_pools_fit_the_memory_and_take_nearly_all(
    tmp_path: Path, available: int, rows: int | None
) -> None:
    plan = plan_of(tmp_path)
    tokens = plan.tokens(available, PLAIN, rows)
    running = plan.rows(tokens) if rows is None else rows
    taken = tokens * plan.cell_bytes(PLAIN) + (running + 1) * plan.row_bytes(PLAIN)
    if rows is not None and available < (rows + 1) * plan.row_bytes(PLAIN):
        assert tokens <= 0
        return
    assert taken <= available
    slack = PAGE * plan.cell_bytes(PLAIN) + (plan.row_bytes(PLAIN) * 2 if rows is None else 0)
    assert taken > available - slack
    assert tokens % PAGE == 0
    if rows is None:
        assert running == MOST_ROWS or running > 0
        assert tokens > 1.6 * available / PLAIN or running == 1


def test_ranks_agree_on_sizes_whatever_heads_they_have(tmp_path: Path) -> None:
    first, second = (plan_of(tmp_path, 0.375, rank=rank, world=2) for rank in range(2))
    assert (first.full_share, first.ring_share) == (second.full_share, second.ring_share)
    assert first.pattern.shape == (LAYERS, KV_HEADS // 2)
    shares = [float(plan.pattern.float().mean()) for plan in (first, second)]
    assert first.full_share == 1 - min(shares)
    assert first.ring_share == max(shares)


def test_what_requests_hold_is_of_all_ranks_whichever_is_asked(tmp_path: Path) -> None:
    """Of 16 heads 6 stream, 4 of them on the first rank. Two of three requests run, and 40 pages of 50 are
    free."""
    rings = [
        StreamingRings(plan, 4, 8, dtype=torch.float32, device=torch.device("cpu"))
        for plan in (plan_of(tmp_path, 0.375, rank=rank, world=2) for rank in range(2))
    ]
    runner = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(size=3, available_size=lambda: 1),
        token_to_kv_pool_allocator=SimpleNamespace(available_size=lambda: 40 * PAGE),
        token_to_kv_pool=SimpleNamespace(size=50 * PAGE),
    )
    first, second = (StreamingPoolRuntime(AttentionConfig(), own, runner).describe() for own in rings)
    assert first == second
    assert (first["streaming_heads"], first["running"], first["other_pages"]) == (0.375, 2, 10)
    assert first["ring_bytes"] == rings[0].bytes + rings[1].bytes > 2 * rings[1].bytes
    assert first["held_pages"] == 0.625 * 10 + 0.375 * 2 * 6


@pytest.mark.parametrize(("share", "says"), [(0.0, "no head streams"), (1.0, "all heads stream")])
def test_patterns_of_one_kind_of_head_are_refused(tmp_path: Path, share: float, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        plan_of(tmp_path, share)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sparse_attention": "off"}, "--sparse-attention on"),
        ({"decode_heads": None}, "--decode-heads"),
        ({"decode_mode": "hierarchical"}, "--decode-mode dense"),
        ({"prefill_mode": "vertical_slash"}, "omit prefill_mode"),
        ({"kv_bits": 8}, "omit kv_bits"),
        ({"kv_offload_bytes": 2**20}, "kv_offload_bytes"),
        ({"session_on_host": True}, "session_on_host"),
    ],
)
def test_settings_that_do_not_go_with_it_are_named(
    tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    settings = {
        "sparse_attention": "on",
        "decode_mode": "dense",
        "decode_heads": tmp_path / "heads.json",
        "decode_heads_pool": "own",
    }
    load(**settings)
    with pytest.raises(ValueError, match=says):
        load(**{name: value for name, value in (settings | changes).items() if value is not None})


@pytest.mark.parametrize(
    ("share", "pool", "says"),
    [
        (None, "own", "is no pattern file"),
        (None, "shared", "is no pattern file"),
        (1.0, "own", "all heads stream"),
        pytest.param(
            *(0.5, "own", "is for another model"),
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU engine finds it itself"),
        ),
    ],
)
def test_a_pattern_file_that_is_of_no_use_is_named_before_an_engine_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float | None, pool: str, says: str
) -> None:
    monkeypatch.setenv(ATTENTION_CONFIG_VARIABLE, "")
    heads = tmp_path / "heads.json"
    if share is not None:
        save_pattern(heads, torch.rand(LAYERS, 5), share=share, model="any")
    settings = {"sparse_attention": "on", "decode_mode": "dense", "decode_heads": heads}
    with pytest.raises(InvalidRequest, match=rf"^decode_heads: .*heads\.json.* {says}"):
        server_args(load(data_dir=tmp_path, decode_heads_pool=pool, **settings))


def test_an_engine_started_otherwise_is_refused_with_all_reasons(tmp_path: Path) -> None:
    from sglang_ext.attention.engine_checks import check_engine

    args = SimpleNamespace(
        disable_radix_cache=False, radix_cache_backend="ragserve", enable_dp_attention=True
    )
    runner = SimpleNamespace(server_args=args, token_to_kv_pool=object(), page_size=PAGE)
    options = DecodeOptions(mode="hierarchical")
    config = AttentionConfig(heads=tmp_path, heads_pool="own", kv_bits=8, options=options)
    with pytest.raises(ValueError, match="sparse_attention=on") as refused:
        check_engine(runner, config)
    for part in (
        "the KV pool is a object",
        "disable_radix_cache is False",
        "enable_dp_attention is True",
        "omit kv_bits",
        "set decode_mode",
    ):
        assert part in str(refused.value)
