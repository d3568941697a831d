"""The requests that an engine sends itself before it is ready."""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ragserve.config import Settings
from ragserve.engine import server_args
from ragserve.engine.base import EngineInfo, GenerateChunk, GenerateRequest
from ragserve.engine.local import LocalEngine
from ragserve.engine.warm_up import NAMESPACE, warm_up
from ragserve.errors import EngineError
from sglang_ext.wire.prefill_options import PrefillOptions
from sglang_ext.wire.protocol import EXACT_STRATEGIES
from sglang_ext.wire.request_options import STRATEGY_OPTIONS, DecodeOptions, strategy_options
from tests.conftest import REPO

INFO = EngineInfo(
    *("local", "model", "model", "0.5.17", "cuda", "fa3", 8192, 8192),
    strategies=(*EXACT_STRATEGIES, *STRATEGY_OPTIONS),
    sparse_decode=True,
    sparse_prefill=True,
)


REACHED = {  # kernels, by the kind of request that launches each
    "_assign": "decode offloaded hierarchical",
    "_attend": "decode hierarchical",
    "_choose": "decode hierarchical",
    "_enter": "decode offloaded progressive",
    "_leave": "decode offloaded progressive",
    "_rest": "decode offloaded progressive",
    "_find": "decode offloaded progressive",
    "finish": "decode progressive",
    "_gather": "long documents",
    "_merge": "decode hierarchical",
    "_quantize": "long documents",  # where pages or the pool have few bits
    "_resolve": "decode offloaded progressive",
    "_round": "decode progressive",
    "_score": "decode hierarchical",
    "_stats": "full",
    "_take": "decode offloaded progressive",
    "_worth": "decode offloaded progressive",
    "block_k_kernel": "long documents",
    "block_lse_kernel": "prefill vertical_slash",
    "block_means_kernel": "prefill block_sparse",
    "shared_gather_kernel": "decode offloaded progressive",
    "choose_kernel": "long documents",
    "resident_gather_kernel": "decode offloaded hierarchical",
    "combine_splits_kernel": "rare launches",
    "context_shared_blocks_kernel": "composed on the host, progressive",
    "context_gather_kernel": "composed on the host, hierarchical",
    "exponent_kernel": "long documents",
    "fit_kernel": "long documents",
    "gather_h2d_kernel": "rare launches",
    "key_scores_kernel": "concat {'recompute': 'sentences', 'share': 0.2} from device",
    "line_keys_kernel": "prefill vertical_slash",
    "line_mass_kernel": "prefill vertical_slash",
    "list_blocks_kernel": "prefill block_sparse",
    "list_lines_kernel": "prefill vertical_slash",
    "local_q_kernel": "long documents",
    "lse_kernel": "long documents",
    "pick_lines_kernel": "prefill vertical_slash",
    "prefix_rows_attention_kernel": "rare launches",
    "received_kernel": "long documents",
    "rotate_gather_kernel": "concat {} from host",
    "sparse_prefill_kernel": "prefill block_sparse",
    "split_lists_kernel": "long prefill",
}


class Recording:
    """Takes requests and control operations; those of ``broken`` strategies fail."""

    def __init__(self, *broken: str) -> None:
        self.asked: list[GenerateRequest | str] = []
        self._broken = broken

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        self.asked.append(request)
        if request.strategy in self._broken:
            raise EngineError("broken")
        for _ in ():
            yield

    async def warm(self, request: GenerateRequest) -> None:
        self.asked.append(f"documents {len(request.spans)}")

    async def control(self, operation: str, **arguments: Any) -> dict[str, Any]:
        self.asked.append(operation)
        return {"segments": True}

    @property
    def requests(self) -> list[GenerateRequest]:
        return [each for each in self.asked if isinstance(each, GenerateRequest)]


def asked(info: EngineInfo, *broken: str) -> Recording:
    engine = Recording(*broken)
    asyncio.run(warm_up(engine, info))
    return engine


def test_every_strategy_is_asked_from_the_device_and_from_the_host() -> None:
    engine = asked(INFO)
    evicted = engine.asked.index("evict")
    for part in (engine.asked[:evicted], engine.asked[evicted:]):
        assert {r.strategy for r in part if isinstance(r, GenerateRequest)} >= set(STRATEGY_OPTIONS)
    assert engine.asked[evicted - 1] == "flush", "or the host would lack what waits to be written"
    assert any(isinstance(a, str) and a.startswith("documents") for a in engine.asked[:evicted])
    for request in engine.requests:
        assert request.namespace == NAMESPACE
        assert len(request.unregistered) == len(request.spans), "nothing is written to disk"
        if request.strategy in STRATEGY_OPTIONS:
            strategy_options(request.strategy, dict(request.options))  # raises for a misspelt one


def test_a_prompt_whose_beginning_is_cached_sampling_and_sparse_steps_are_asked() -> None:
    requests = asked(INFO).requests
    first, second = [r.input_ids for r in requests if r.strategy == "prefix" and not r.decode][:2]
    same = next(n for n, (a, b) in enumerate(zip(first, second, strict=True)) if a != b)
    assert len(first) // 2 < same < len(first), "documents are found, the question is not"
    assert any(r.sampling.temperature for r in requests)
    modes = {DecodeOptions.model_validate(dict(r.decode)).mode for r in requests if r.decode}
    assert modes == {"hierarchical", "progressive"}
    assert all("offloaded" in r.decode for r in requests if r.decode), "the server's own may be offloaded"
    prefills = [PrefillOptions.model_validate(dict(r.prefill)) for r in requests if r.prefill]
    assert [prefill.mode for prefill in prefills] == ["vertical_slash", "block_sparse", "block_sparse"], (
        "the last, a long one"
    )
    assert not any(prefill.dense_below for prefill in prefills)


def test_offloaded_requests_and_turns_of_sessions_are_asked() -> None:
    engine = asked(replace(INFO, offloaded_tokens=100_000))
    offloaded = [request for request in engine.requests if request.decode.get("offloaded")]
    by_layers = engine.asked[engine.asked.index("segment") + 1]
    assert by_layers in offloaded
    assert any(request.strategy in STRATEGY_OPTIONS for request in offloaded), "composed on the host, too"
    assert {"launch", "attend"} <= {each for each in engine.asked if isinstance(each, str)}
    turns = [request for request in engine.requests if request.session]
    for first, second in (turns[:2], turns[2:]):
        assert second.session is not None
        assert second.session.key == first.session.key  # type: ignore[union-attr]
        assert second.input_ids[: len(first.input_ids)] == first.input_ids
        assert second.session.held == (0 if first.strategy == "prefix" else first.spans[-1].end)
    without = asked(INFO)
    assert "segment" not in without.asked
    assert not any(request.decode.get("offloaded") for request in without.requests)


class Broken(Recording):
    """Every request and operation fails but the last ones."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        raise EngineError("broken")
        yield

    async def warm(self, request: GenerateRequest) -> None:
        raise EngineError("broken")

    async def control(self, operation: str, **arguments: Any) -> dict[str, Any]:
        if operation in ("remove_namespace", "compiled"):
            return {}
        raise EngineError("broken")


def test_every_kernel_is_launched_by_some_kind() -> None:
    """Whoever adds a kernel says here what launches it before the engine is ready."""
    launch = re.compile(r"^ +(\w+)\[\(", re.MULTILINE)
    sources = (REPO / "kernels/ragserve_kernels").rglob("*.py")
    kernels = {name for path in sources for name in launch.findall(path.read_text())}
    assert kernels == REACHED.keys()
    kinds = set(asyncio.run(warm_up(Broken(), replace(INFO, offloaded_tokens=100_000))))
    assert set(REACHED.values()) <= kinds, "as the warm-up names them"


def test_only_what_the_engine_offers_is_asked() -> None:
    engine = asked(replace(INFO, strategies=EXACT_STRATEGIES, sparse_decode=False, sparse_prefill=False))
    assert {request.strategy for request in engine.requests} == set(EXACT_STRATEGIES)
    assert not any(request.decode or request.prefill for request in engine.requests)


@pytest.mark.parametrize("info", [replace(INFO, device="cpu"), replace(INFO, max_total_tokens=4096)])
def test_nothing_is_asked_where_nothing_is_compiled_or_does_not_fit(info: EngineInfo) -> None:
    assert not asked(info).asked


def test_a_kind_that_fails_is_logged_and_the_others_are_asked(caplog: pytest.LogCaptureFixture) -> None:
    engine = asked(INFO, "epic")
    assert engine.asked[-2:] == ["remove_namespace", "compiled"]
    assert engine.requests[-1].strategy != "epic"
    failures = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(failures) == 2, "from the device and from the host"
    assert all("epic" in record.getMessage() for record in failures)


def test_an_engine_is_not_ready_before_its_start_has_ended() -> None:
    engine = LocalEngine(Settings())
    assert not asyncio.run(engine.ready())
    engine._info = INFO  # as while the warm-up runs
    assert not asyncio.run(engine.ready())


@pytest.mark.parametrize("given", [None, Path("kernels")])
def test_compiled_kernels_are_kept_for_the_next_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: Path | None
) -> None:
    monkeypatch.setattr(os, "environ", {"HOME": str(tmp_path), "TRITON_CACHE_DIR": "/own"})
    server_args._keep_kernels(given)
    kept = {name: value for name, value in os.environ.items() if name != "HOME"}
    if given is None:
        assert kept == {
            "TRITON_CACHE_DIR": "/own",
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / ".cache" / "torchinductor"),
        }
        return
    assert kept.pop("TRITON_CACHE_DIR") == "/own", "a variable that is set counts"
    assert kept.pop("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED") == "1"
    assert {"FLASHINFER_WORKSPACE_BASE", "TORCHINDUCTOR_CACHE_DIR", "TVM_FFI_CACHE_DIR"} <= kept.keys()
    assert {Path(value).parent for value in kept.values()} == {given.resolve()}
