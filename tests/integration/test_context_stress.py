"""Composed and plain requests together under forced retraction, small chunks, pages of 16, a small pool, a
slow disk and clients that leave at every stage. Sparse decoding is on, for requests that ask for it, so every
check is also one of all page statistics."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from ragserve.answering.prompt import PromptBuilder
from sglang_ext.protocol import DECODE_FIELD, PLAN_FIELD, ContextPlan, DecodeOptions, DecodeReport
from tests.conftest import MODEL, REPO
from tests.integration.context_client import NEW, assert_same, composed, generate, missing_of, plan_of, result
from tests.integration.reference import Reference, chosen_sentences
from tests.integration.sparse_reference import SparseReference
from tests.integration.test_context import prompt, rows

ENGINE = {"chunked_prefill_size": 128}
STORAGE = {
    "backend_name": "slow",
    "module_path": "tests.integration.slow_storage",
    "class_name": "SlowStorage",
}
STRICT = {
    "SGLANG_TEST_RETRACT": "1",  # every third decode step takes requests back and admits them again
    # the scheduler dies if a slot is lost or counted twice
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
    "PYTHONPATH": os.pathsep.join([str(REPO), *sys.path]),
}


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("storage")


@pytest.fixture(scope="module")
def small(start_server: Any, storage: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    data_dir = tmp_path_factory.mktemp("stress") / "data"
    disk = {"kv_storage": "dynamic", "kv_storage_args": json.dumps(STORAGE | {"folder": str(storage)})}
    sparse = {
        "sparse_attention": "on",
        "decode_mode": "dense",
        "decode_dense_below": 0,
        "decode_page_size": 16,
        "decode_logical_page": 4,
    }
    flags = sparse | {
        "engine_args": json.dumps(ENGINE),
        "max_total_tokens": 6144,
        "kv_host_bytes": 2**26,
        **disk,
    }
    with start_server(data_dir=data_dir, env=STRICT, **flags) as running:
        yield running


@contextmanager
def slow(storage: Path, seconds: float) -> Iterator[None]:
    (storage / "delay").write_text(str(seconds))
    try:
        yield
    finally:
        (storage / "delay").unlink()


def settled(client: httpx.Client) -> None:
    """Within seconds nothing is running, and nothing is held in any tier."""
    deadline = time.monotonic() + 60
    while True:
        figures = client.get("/rag/cache").json()
        held = figures["device"]["locked_tokens"], figures["host"]["pinned_documents"]
        if held == (0, 0):
            break
        assert time.monotonic() < deadline, f"{held[0]} slots stay locked and {held[1]} documents pinned"
        time.sleep(0.05)
    assert client.post("/rag/cache/verify", json={}).json()["bad"] == []
    assert client.get("/health_generate", timeout=60).status_code == 200


def test_mixed_traffic_gives_the_answers_of_single_requests_and_loses_nothing(
    small: Any, builder: PromptBuilder
) -> None:
    prompts = [prompt(builder, row, 3) for row in rows("onehop")[:4]]
    with small.client() as client:
        alone = [result(composed(client, ids, spans)).ids for ids, spans in prompts]
        plain = [result(generate(client, ids)).ids for ids, _ in prompts]
        together, plain_together, left = asyncio.run(_crowd(small.url, prompts))
        assert together == alone
        assert plain_together == plain
        assert left > 0, "some clients must have left"
        settled(client)
        assert small.process.poll() is None


async def _crowd(url: str, prompts: list[Any]) -> tuple[list[list[int]], list[list[int]], int]:
    """All at once: each prompt composed and plain, and as many clients that leave at different moments."""
    async with httpx.AsyncClient(
        base_url=url, timeout=300, limits=httpx.Limits(max_connections=None)
    ) as client:
        kept = [_ask(client, ids, plan_of(spans)) for ids, spans in prompts]
        plain = [_ask(client, ids, None) for ids, _ in prompts]
        leaving = [
            _leave(client, ids, plan_of(spans) if i % 2 else None, after)
            for i, (ids, spans) in enumerate(prompts)
            for after in (0.05, 0.4, 1.5)
        ]
        done = await asyncio.gather(*kept, *plain, *leaving)
        n = len(prompts)
        return list(done[:n]), list(done[n : 2 * n]), sum(map(bool, done[2 * n :]))


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


def stage_of(name: str) -> tuple[list[str], dict[str, Any], dict[str, Any]]:
    """Tiers to evict first, options of the plan and sampling that make one stage long."""
    everywhere = ["device", "host"]
    return {
        "load": (everywhere, {}, {}),
        "compose": (["device"], {"keep": 0.5}, {}),
        "recompute": (["device"], {"recompute": "all"}, {}),
        "decode": (["device"], {}, {"n_new": 400}),
    }[name]


@pytest.mark.parametrize("stage", ["load", "compose", "recompute", "decode"])
def test_a_client_that_leaves_at_a_stage_leaves_nothing_behind(
    small: Any, storage: Path, builder: PromptBuilder, stage: str
) -> None:
    ids, spans = prompt(builder, rows("crossdoc")[6], 5)
    tiers, options, sampling = stage_of(stage)
    with small.client() as client:
        want = result(composed(client, ids, spans, **options))
        for after in (0.02, 0.1, 0.4):
            assert client.post("/rag/cache/evict", json={"tiers": tiers}).status_code == 200
            with slow(storage, 0.5 if stage == "load" else 0.0), suppress(httpx.TimeoutException):
                answer = generate(client, ids, plan_of(spans, **options), timeout=after, **sampling)
                assert stage != "load", f"{answer} came without waiting for the disk"
            settled(client)
        assert_same(result(composed(client, ids, spans, **options)), want)


def test_clients_that_leave_the_queue_leave_nothing_behind(small: Any, builder: PromptBuilder) -> None:
    """More contexts than the pool holds: most of them leave before they are admitted."""
    prompts = [prompt(builder, row, 5) for row in rows("crossdoc")]
    with small.client() as client:
        ids, spans = prompts[0]
        want = result(composed(client, ids, spans))

        async def crowd() -> int:
            async with httpx.AsyncClient(
                base_url=small.url, limits=httpx.Limits(max_connections=None)
            ) as http:
                await asyncio.gather(*(_ask_or_miss(http, *each) for each in prompts))
                left = await asyncio.gather(
                    *(_leave(http, i, plan_of(s), 0.5 + 0.1 * n) for n, (i, s) in enumerate(prompts * 3))
                )
                return sum(left)

        assert asyncio.run(crowd()) > len(prompts)
        settled(client)
        assert_same(result(composed(client, ids, spans)), want)


async def _ask_or_miss(client: httpx.AsyncClient, ids: list[int], spans: list[tuple[int, int]]) -> None:
    for i in missing_of(
        (await client.post("/generate", json=_body(ids, plan_of(spans), 1), timeout=300)).json()
    ):
        a, b = spans[i]
        await client.post(
            "/generate", json=_body(ids[a:b], ContextPlan("document", "context"), 1), timeout=300
        )


def test_a_request_taken_back_whose_documents_are_gone_meanwhile_says_so(
    small: Any, builder: PromptBuilder
) -> None:
    """It cannot be composed again. What it has said so far came from composed KV, so it is not continued from
    another.
    """
    prompts = [prompt(builder, row, 2) for row in rows("onehop")[:4]]
    with small.client() as client:
        want = [result(composed(client, ids, spans, n_new=60)).ids for ids, spans in prompts]

        async def crowd() -> list[Any]:
            async with httpx.AsyncClient(base_url=small.url, timeout=300) as http:
                asking = [
                    asyncio.create_task(http.post("/generate", json=_body(ids, plan_of(spans), 60)))
                    for ids, spans in prompts
                ]
                await asyncio.sleep(0.5)
                assert (await http.delete("/rag/cache")).status_code == 200
                return await asyncio.gather(*asking)

        answers = asyncio.run(crowd())
        lost = [answer for answer in answers if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE]
        assert lost, "every third step takes all but one back"
        assert all("its documents were evicted meanwhile" in answer.text for answer in lost)
        whole = [
            (answer.json()["output_ids"], ids)
            for answer, ids in zip(answers, want, strict=True)
            if answer.status_code == 200
        ]
        assert len(whole) + len(lost) == len(answers)
        assert [got for got, _ in whole] == [ids for _, ids in whole]
        settled(client)


def test_sparse_requests_taken_back_choose_from_right_statistics_afterwards(small: Any) -> None:
    """Requests of all modes at once: every third step takes one back, whose pages are freed and written
    again, elsewhere.
    """
    chance = random.Random(8)
    lengths = (210, 240, 270, 300, 420, 450)  # the longest prompts are taken back first
    prompts = [[chance.randrange(10, 8000) for _ in range(length)] for length in lengths]
    budget = {"mode": "hierarchical", "budget": 64, "reuse": 3}
    modes: list[dict[str, Any]] = [
        {"mode": "dense"},
        budget,
        {"mode": "dense"},
        {"mode": "progressive", "threshold": 1.0},
        budget,
        budget,
    ]
    with small.client() as client:
        alone = [result(generate(client, ids, n_new=40)).ids for ids in prompts]
        assert client.delete("/rag/cache").status_code == 200
        answers = asyncio.run(_decoded_while_checked(small.url, prompts, modes))
        for mode, answer, ids in zip(modes, answers, alone, strict=True):
            assert mode["mode"] == "hierarchical" or answer["output_ids"] == ids, mode
        said = [DecodeReport.from_json(answers[i]["meta_info"][DECODE_FIELD][-1]) for i in (1, 4, 5)]
        assert all(report.sparse_steps and report.pages < report.pages_held for report in said)
        assert min(report.steps for report in said) < 39, (
            "a step that was taken back comes again as a prefill"
        )
        settled(client)
        reference = SparseReference(MODEL, 16, 4)
        reference.decode = DecodeOptions(mode="hierarchical", budget=64, reuse=3, dense_below=0)
        custom = {
            "custom_params": {DECODE_FIELD: json.dumps({"mode": "hierarchical", "budget": 64, "reuse": 3})}
        }
        sampling = {"temperature": 0, "max_new_tokens": 20, "ignore_eos": True, **custom}
        fresh = [
            chance.randrange(10, 8000) for _ in range(450)
        ]  # alone, so never taken back, in pages used before
        assert_same(result(generate(client, fresh, sampling_params=sampling)), reference.plain(fresh, 20))


async def _decoded_while_checked(
    url: str, prompts: list[list[int]], modes: list[dict[str, Any]]
) -> list[Any]:
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:

        async def one(ids: list[int], mode: dict[str, Any]) -> Any:
            sampling = {
                "temperature": 0,
                "max_new_tokens": 40,
                "ignore_eos": True,
                "custom_params": {DECODE_FIELD: json.dumps(mode)},
            }
            return (
                await client.post("/generate", json={"input_ids": ids, "sampling_params": sampling})
            ).json()

        asking = [asyncio.create_task(one(ids, mode)) for ids, mode in zip(prompts, modes, strict=True)]
        while not all(task.done() for task in asking):
            checked = await client.post("/rag/cache/verify", json={})
            assert checked.status_code == 200, checked.text
            await asyncio.sleep(0.1)
        return [task.result() for task in asking]


def test_a_question_longer_than_a_chunk(small: Any, builder: PromptBuilder, reference: Reference) -> None:
    ids, spans = prompt(builder, rows("onehop")[5], 2)
    long = ids + ids[spans[1][0] : spans[1][1]] + ids[spans[2][0] : spans[2][1]] + ids[spans[-1][1] :]
    assert len(long) - spans[-1][1] > 2 * ENGINE["chunked_prefill_size"]
    with small.client() as client:
        assert_same(result(composed(client, long, spans)), reference.composed(long, spans, NEW))
        wanted = chosen_sentences(reference, AutoTokenizer.from_pretrained(MODEL), long, spans, 0.1)
        asked, named = (
            result(composed(client, long, spans, recompute=recompute, share=0.1))
            for recompute in ("sentences", wanted)
        )
        assert asked == named, "it is asked as a whole before its first chunk has slots for all of it"
        settled(client)


def test_several_answers_to_one_composed_prompt(small: Any, builder: PromptBuilder) -> None:
    ids, spans = prompt(builder, rows("onehop")[6], 2)
    with small.client() as client:
        want = result(composed(client, ids, spans)).ids
        body = _body(ids, plan_of(spans), len(want))
        body["sampling_params"]["n"] = 3
        assert [answer["output_ids"] for answer in client.post("/generate", json=body).json()] == [want] * 3
        settled(client)
