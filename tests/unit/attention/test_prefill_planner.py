"""Which requests have a sparse prefill, under which cache key, and what they are told."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ext.attention.config import AttentionConfig
from sglang_ext.attention.prefill_planner import PrefillPlanner
from sglang_ext.documents.device import DeviceDocuments
from sglang_ext.prefill_options import PrefillOptions, exact_key
from sglang_ext.protocol import PREFILL_FIELD, PlanError, PrefillReport, prefix_key

SPARSE = PrefillOptions(mode="lines", dense_below=100)


def planner(options: PrefillOptions = SPARSE, **config: Any) -> PrefillPlanner:
    return PrefillPlanner(AttentionConfig(prefill=options, **config))


def request(plan: PrefillPlanner, tokens: int = 101, key: str = "namespace:a", **options: Any) -> Any:
    custom = {PREFILL_FIELD: json.dumps(options)} if options else None
    req = SimpleNamespace(
        sampling_params=SimpleNamespace(custom_params=custom), extra_key=key, origin_input_ids=[1] * tokens
    )
    plan.admit(req)
    return req


def test_long_prompts_are_sparse_and_cached_with_those_of_the_same_options() -> None:
    plan = planner()
    long = request(plan)
    assert long.extra_key == "namespace:a|prefill=lines,0.955,64"
    assert exact_key(long.extra_key) == "namespace:a"
    keys = [
        request(plan, **options).extra_key
        for options in (
            {"alpha": 0.9},
            {"observe": 8},
            {"mode": "blocks"},
            {"mode": "dense"},
            {"dense_below": 7},
        )
    ]
    assert len({long.extra_key, *keys[:4]}) == 5
    assert keys[3] == "namespace:a"
    assert keys[4] == long.extra_key
    assert request(plan, tokens=100).extra_key == "namespace:a", "its KV is exact"


def test_the_server_says_nothing_of_references_and_documents() -> None:
    plan = planner()
    assert request(plan, key="full:1").ragserve_prefill is None, "others are compared with strategy full"
    asked = request(plan, key="full:1", mode="blocks")
    assert asked.ragserve_prefill.options.mode == "blocks"
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
        ({"mode": "blocks", "observe": 8}, "observe is for mode 'lines'"),
    ],
)
def test_bad_options_are_refused_with_a_reason(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        request(planner(), **options)


def test_keys_of_few_bits_cannot_be_read() -> None:
    with pytest.raises(PlanError, match="start it with kv_bits=16"):
        planner(kv_bits=8)
    with pytest.raises(PlanError, match="this server's have 4"):
        request(planner(PrefillOptions(), kv_bits=4), mode="lines")


def test_an_extend_is_planned_and_counted_by_request() -> None:
    plan = planner()
    dense, sparse, decoding = request(plan, 50), request(plan, 300), request(plan, 200)
    assert plan.plan([dense, decoding], [(0, 0, 50), (2, 200, 201)]) == ()
    rows = plan.plan([dense, sparse, decoding], [(0, 0, 50), (1, 128, 300), (2, 200, 201)])
    assert [(row.row, row.prefix, row.new) for row in rows] == [(0, 0, 50), (1, 128, 172), (2, 200, 1)]
    assert [row.state is not None for row in rows] == [False, True, False]
    assert plan.finished(sparse) is None, "nothing was prefilled"
    plan.count(rows, torch.tensor([30.0]), [40.0])
    plan.count(rows, torch.tensor([10.0]), [60.0])
    assert plan.finished(sparse) == PrefillReport("lines", 0.955, 344, 0.4)
    assert plan.finished(dense) is None


def test_what_is_removed_from_a_namespace_goes_from_its_sparse_kv_too() -> None:
    removed: list[str] = []
    cached = dict.fromkeys([prefix_key("a"), SPARSE.sparse_key(prefix_key("a")), prefix_key("ab")], 64)
    tree = SimpleNamespace(tokens_by_key=lambda: cached, remove_key=lambda key: not removed.append(key))
    documents = DeviceDocuments(None, tree, SimpleNamespace(remove=lambda key: False))
    running = type("Req", (), {})()
    running.extra_key, running.ragserve_private = (
        PrefillOptions(mode="blocks").sparse_key(prefix_key("a")),
        False,
    )
    documents.exact_request(running)
    documents.remove([], "a")
    assert {prefix_key("a"), SPARSE.sparse_key(prefix_key("a")), running.extra_key} == set(removed)
    assert running.ragserve_private
