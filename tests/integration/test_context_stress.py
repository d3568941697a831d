"""Composed and plain requests together under forced retraction, small chunks, pages of 16, a small pool and clients that leave."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from ragserve.prompt import PromptBuilder
from sglang_ext.protocol import ContextPlan
from tests.conftest import MODEL
from tests.integration.test_context import PLAN_FIELD, Span, composed, generate, prompt, result, rows

ENGINE = {"page_size": 16, "chunked_prefill_size": 128}
STRICT = {
    "SGLANG_TEST_RETRACT": "1",  # every third decode step takes requests back and admits them again
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",  # the scheduler dies if a slot is lost or counted twice
}


@pytest.fixture(scope="module")
def small(start_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    data_dir = tmp_path_factory.mktemp("stress") / "data"
    flags = {"engine_args": json.dumps(ENGINE), "max_total_tokens": 6144, "kv_host_bytes": 2**26}
    with start_server(data_dir=data_dir, env=STRICT, **flags) as running:
        yield running


def test_mixed_traffic_gives_the_answers_of_single_requests_and_loses_nothing(small: Any) -> None:
    builder = PromptBuilder.load(str(MODEL))
    prompts = [prompt(builder, row, 3) for row in rows("onehop")[:4]]
    with small.client() as client:
        alone = [result(composed(client, ids, spans)).ids for ids, spans in prompts]
        plain = [result(generate(client, ids)).ids for ids, _ in prompts]
        together, plain_together, left = asyncio.run(_crowd(small.url, prompts))
        assert together == alone
        assert plain_together == plain
        assert left > 0, "some clients must have left"
        assert client.post("/rag/cache/verify", json={}).json()["bad"] == []
        assert client.get("/health_generate", timeout=60).status_code == 200
        assert small.process.poll() is None


async def _crowd(url: str, prompts: list[Any]) -> tuple[list[list[int]], list[list[int]], int]:
    """All at once: each prompt composed and plain, and as many clients that leave at different moments."""
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=httpx.Limits(max_connections=None)) as client:
        kept = [_ask(client, ids, _plan(spans)) for ids, spans in prompts]
        plain = [_ask(client, ids, None) for ids, _ in prompts]
        leaving = [
            _leave(client, ids, _plan(spans) if i % 2 else None, after)
            for i, (ids, spans) in enumerate(prompts)
            for after in (0.05, 0.4, 1.5)
        ]
        done = await asyncio.gather(*kept, *plain, *leaving)
        n = len(prompts)
        return list(done[:n]), list(done[n : 2 * n]), sum(map(bool, done[2 * n :]))


def _plan(spans: list[tuple[int, int]]) -> ContextPlan:
    return ContextPlan("compose", "context", "concat", tuple(Span(a, b) for a, b in spans))


def _body(ids: list[int], plan: ContextPlan | None, n_new: int) -> dict[str, Any]:
    sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": n_new, "ignore_eos": True}
    if plan is not None:
        sampling["custom_params"] = {PLAN_FIELD: plan.to_json()}
    return {"input_ids": ids, "sampling_params": sampling}


async def _ask(client: httpx.AsyncClient, ids: list[int], plan: ContextPlan | None) -> list[int]:
    answer = (await client.post("/generate", json=_body(ids, plan, 10))).json()
    assert "error" not in answer, answer
    return list(answer["output_ids"])


async def _leave(client: httpx.AsyncClient, ids: list[int], plan: ContextPlan | None, after: float) -> bool:
    try:
        await client.post("/generate", json=_body(ids, plan, 200), timeout=after)
    except httpx.TimeoutException:
        return True
    return False


def test_documents_survive_a_restart_and_no_process_survives_its_server(start_server: Any, tmp_path: Path) -> None:
    ids, spans = prompt(PromptBuilder.load(str(MODEL)), rows("crossdoc")[5], 3)
    with start_server(data_dir=tmp_path) as running, running.client() as client:
        first = result(composed(client, ids, spans))
        assert _ended(running, signal.SIGTERM) == 0, "a clean stop"
    with start_server(data_dir=tmp_path) as running, running.client() as client:
        answer = generate(client, ids, _plan(spans))  # no document request first
        assert result(answer).ids == first.ids
        assert set(json.loads(answer["meta_info"][PLAN_FIELD][0])["by_tier"]) == {"disk"}
        _ended(running, signal.SIGKILL)


def _ended(running: Any, how: signal.Signals) -> int:
    """Exit status of the server, after checking that its engine processes have gone with it."""
    family = [psutil.Process(running.process.pid), *psutil.Process(running.process.pid).children(recursive=True)]
    assert len(family) >= 3, "server, scheduler, detokenizer"
    os.kill(running.process.pid, how)
    status = int(running.process.wait(30))
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and any(map(_alive, family)):
        time.sleep(0.1)
    assert [process for process in family if _alive(process)] == []
    return status


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
