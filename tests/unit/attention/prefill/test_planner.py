"""Which requests have a sparse prefill, under which cache key, and what they are told."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ext.attention.prefill.kept_lines import KeptLines
from sglang_ext.attention.prefill.planner import Computed, PrefillPlanner
from sglang_ext.documents.device import DeviceDocuments
from sglang_ext.wire.attention_config import AttentionConfig
from sglang_ext.wire.prefill_options import SHARE_DENSE_BELOW, PrefillOptions, exact_key
from sglang_ext.wire.protocol import (
    PREFILL_FIELD,
    PlanError,
    PrefillReport,
    composed_session_key,
    prefix_key,
    session_key,
)

SPARSE = PrefillOptions(mode="vertical_slash", dense_below=100)


def planner(options: PrefillOptions = SPARSE, **config: Any) -> PrefillPlanner:
    return PrefillPlanner(AttentionConfig(prefill=options, **config))


def request(plan: PrefillPlanner, tokens: int = 101, key: str = "namespace:a", **options: Any) -> Any:
    custom = {PREFILL_FIELD: json.dumps(options)} if options else None
    req = SimpleNamespace(
        sampling_params=SimpleNamespace(custom_params=custom),
        extra_key=key,
        origin_input_ids=[1] * tokens,
        last_node=None,
    )
    plan.admit(req)
    return req


def test_long_prompts_are_sparse_and_cached_with_those_of_the_same_options() -> None:
    plan = planner()
    long = request(plan)
    assert long.extra_key == "namespace:a|prefill=vertical_slash,0.955,64,last=256"
    assert exact_key(long.extra_key) == "namespace:a"
    keys = [
        request(plan, **options).extra_key
        for options in (
            {"alpha": 0.9},
            {"observe": 8},
            {"dense_last": 8},
            {"mode": "block_sparse"},
            {"share": 0.955},
            {"mode": "dense"},
            {"dense_below": 7},
        )
    ]
    assert len({long.extra_key, *keys[:6]}) == 7
    assert keys[5] == "namespace:a"
    assert keys[6] == long.extra_key
    assert request(plan, tokens=100).extra_key == "namespace:a", "its KV is exact"


def test_what_is_not_calibrated_is_sparse_only_where_its_cost_is_known() -> None:
    plan = planner(PrefillOptions())
    longest = SHARE_DENSE_BELOW + 1
    assert request(plan, longest, mode="vertical_slash").ragserve_prefill is None, (
        "the model decides what alpha costs"
    )
    assert request(plan, longest, mode="vertical_slash", dense_below=longest - 1).ragserve_prefill is not None
    assert request(plan, longest, mode="block_sparse", share=0.1).ragserve_prefill is not None
    assert request(plan, longest - 1, mode="block_sparse", share=0.1).ragserve_prefill is None
    assert request(planner(), 101, share=0.1).ragserve_prefill is not None, "calibrated"


def test_streaming_heads_have_a_cache_of_their_own() -> None:
    plan = planner(
        PrefillOptions(mode="block_sparse", streaming=True, dense_below=100), heads=Path("heads.json")
    )
    streams, others = request(plan).extra_key, request(plan, streaming=False).extra_key
    assert streams == others + ",streaming"
    assert request(plan, mode="vertical_slash").extra_key == request(planner()).extra_key, "lines have none"


def test_the_server_says_nothing_of_references_and_documents() -> None:
    plan = planner()
    assert request(plan, key="full:1").ragserve_prefill is None, "others are compared with strategy full"
    asked = request(plan, key="full:1", mode="block_sparse")
    assert asked.ragserve_prefill.options.mode == "block_sparse"
    document = SimpleNamespace(
        sampling_params=SimpleNamespace(custom_params=None),
        extra_key="0" * 32,
        origin_input_ids=[1] * 500,
        ragserve=object(),
    )
    plan.admit(document)
    assert document.extra_key == "0" * 32
    document.sampling_params.custom_params = {PREFILL_FIELD: '{"alpha": 0.5}'}
    with pytest.raises(PlanError, match="documents are prefilled densely"):
        plan.admit(document)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"mode": "quick"}, "option mode of sparse prefill is 'quick'"),
        ({"alpha": 0}, "option alpha of sparse prefill is 0"),
        ({"aplha": 0.5}, r"did you mean alpha\?"),
        ({"mode": "block_sparse", "observe": 8}, "observe is for mode 'vertical_slash'"),
        ({"share": 0.2, "alpha": 0.9}, "give one of them"),
        ({"streaming": True}, "streaming is for mode 'block_sparse'"),
        ({"mode": "block_sparse", "streaming": True}, "started without a pattern file"),
    ],
)
def test_bad_options_are_refused_with_a_reason(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        request(planner(), **options)


def test_keys_of_few_bits_cannot_be_read() -> None:
    with pytest.raises(PlanError, match="start it with kv_bits=16"):
        planner(kv_bits=8)
    with pytest.raises(PlanError, match="this server's have 4"):
        request(planner(PrefillOptions(), kv_bits=4), mode="vertical_slash")


def test_an_extend_is_planned_and_counted_by_request() -> None:
    plan = planner()
    dense, sparse, decoding = request(plan, 50), request(plan, 300), request(plan, 200)
    assert plan.plan([dense, decoding], [(0, 0, 50), (2, 200, 201)]) == ()
    rows = plan.plan([dense, sparse, decoding], [(0, 0, 50), (1, 128, 300), (2, 200, 201)])
    assert [(row.row, row.prefix, row.new) for row in rows] == [(0, 0, 50), (1, 128, 172), (2, 200, 1)]
    assert [row.state is not None for row in rows] == [False, True, False]
    assert plan.finished(sparse) is None, "nothing was prefilled"
    plan.count(rows, Computed(torch.tensor([[30.0, 2.0, 10.0]]), (40.0,), (4.0,), (None,)))
    plan.count(rows, Computed(torch.tensor([[10.0, 4.0, 14.0]]), (60.0,), (8.0,), (None,)))
    assert plan.finished(sparse) == PrefillReport("vertical_slash", 0.955, 344, 0.4, 0.5, 2.0)
    assert plan.finished(dense) is None


def test_what_is_removed_from_a_namespace_goes_from_its_sparse_kv_too() -> None:
    removed: list[str] = []
    cached = dict.fromkeys([prefix_key("a"), SPARSE.sparse_key(prefix_key("a")), prefix_key("ab")], 64)
    tree = SimpleNamespace(
        tokens_by_key=lambda: cached, remove_keys=lambda keys: set(removed.extend(keys) or ())
    )
    documents = DeviceDocuments(None, tree, SimpleNamespace(remove=lambda key: False))
    running = type("Req", (), {})()
    running.extra_key, running.ragserve_private = (
        PrefillOptions(mode="block_sparse").sparse_key(prefix_key("a")),
        False,
    )
    documents.exact_request(running)
    documents.remove([], "a")
    assert {prefix_key("a"), SPARSE.sparse_key(prefix_key("a")), running.extra_key} == set(removed)
    assert running.ragserve_private


def test_what_is_removed_from_one_of_several_namespaces_goes_from_what_they_share() -> None:
    removed: list[str] = []
    shared = [prefix_key("a+b"), SPARSE.sparse_key(prefix_key("b+c")), session_key("a+b+c", "x")]
    shared.append(composed_session_key(shared[-1]))
    others = [prefix_key("a"), prefix_key("a+bb"), session_key("a+c", "b"), prefix_key("ab")]
    cached = dict.fromkeys([*shared, *others], 64)
    tree = SimpleNamespace(
        tokens_by_key=lambda: cached, remove_keys=lambda keys: set(removed.extend(keys) or ())
    )
    DeviceDocuments(None, tree, SimpleNamespace(remove=lambda key: False)).remove([], "b")
    assert set(shared) <= set(removed)
    assert not set(others) & set(removed)


def node(number: int, parent: Any = None) -> Any:
    return SimpleNamespace(id=number, parent=parent)


def test_a_later_turn_gets_the_lines_of_the_turn_before() -> None:
    plan = planner()
    root = node(0)
    cached = node(1, root)
    first = request(plan, 200)
    rows = plan.plan([first], [(0, 0, 128)])
    assert not rows[0].ends_prompt
    plan.count(rows, Computed(torch.zeros(1, 3), (1.0,), (1.0,), (None,)))
    plan.cached(first, cached)
    assert len(plan.kept) == 0, "its prompt goes on"
    rows = plan.plan([first], [(0, 128, 200)])
    assert rows[0].ends_prompt
    lines = torch.ones(4, 2, 3, 2, dtype=torch.uint8)
    plan.count(rows, Computed(torch.zeros(1, 3), (1.0,), (1.0,), (lines,)))
    plan.cached(first, cached)
    later, other, blocks = request(plan, 300), request(plan, 300), request(plan, 300, mode="block_sparse")
    later.last_node = blocks.last_node = node(2, cached)
    other.last_node = root
    spans = [(0, 192, 300), (1, 0, 300), (2, 192, 300)]
    assert [row.state.given is lines for row in plan.plan([later, other, blocks], spans)] == [
        *(True, False, False)
    ]


def test_kept_lines_are_bounded_and_go_with_their_node() -> None:
    kept, root = KeptLines(limit=100), node(0)
    lines = [torch.zeros(1, 2, 2, 10, dtype=torch.uint8) for _ in range(4)]  # 40 bytes each
    nodes = [node(i + 1, root) for i in range(3)]
    kept.keep(root, lines[0])
    assert len(kept) == 0, "nothing of the prompt is cached"
    kept.keep(nodes[0], lines[0])
    kept.keep(nodes[1], lines[1])
    assert kept.of(node(9, nodes[0])) is lines[0]
    kept.keep(nodes[2], lines[2])
    assert (len(kept), kept.bytes) == (2, 80)
    assert kept.of(nodes[1]) is None, "not used for longest"
    kept.keep(nodes[2], lines[3])
    assert kept.of(nodes[2]) is lines[3]
    kept.forget(nodes[2])
    kept.forget(nodes[2])
    assert (len(kept), kept.bytes, kept.of(nodes[2])) == (1, 40, None)
    kept.keep(nodes[2], torch.zeros(1, 2, 2, 30, dtype=torch.uint8))
    assert (len(kept), kept.bytes) == (1, 40), "more than all may take is not kept"
