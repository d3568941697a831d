"""Composed and plain requests together under forced retraction, small chunks, a small pool, a slow disk, and
clients that leave at every stage."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from ragserve.answering.prompt import PromptBuilder
from sglang_ext.wire.protocol import DECODE_FIELD, PLAN_FIELD, ContextPlan, DecodeOptions, DecodeReport
from tests.conftest import EXHAUSTIVE
from tests.integration.context_client import NEW, assert_same, composed, generate, missing_of, plan_of, result
from tests.integration.engines import STRESS_CHUNK, Server
from tests.integration.prompts import prompt, rows
from tests.integration.reference import Reference, chosen_sentences
from tests.integration.sparse_reference import SparseReference

MOMENTS = (0.005, 0.02, 0.05, 0.1, 0.2, 0.4) if EXHAUSTIVE else (0.02, 0.1)  # seconds until a client leaves
CROWD, QUEUE = (8, 8) if EXHAUSTIVE else (3, 5)  # prompts of the mixed traffic, and of a full queue


@contextmanager
def slow(storage: Path | None) -> Iterator[None]:
    """The disk answers after the block."""
    assert storage is not None
    (storage / "held").touch()
    try:
        yield
    finally:
        (storage / "held").unlink()


def settled(client: httpx.Client) -> None:
    """Wait until nothing runs and no tier holds a lock; check all pages and their statistics."""
    deadline = time.monotonic() + 240
    while True:
        figures = client.get("/rag/cache").json()
        held = figures["device"]["locked_tokens"], figures["host"]["pinned_documents"]
        if held == (0, 0):
            break
        assert time.monotonic() < deadline, f"{held[0]} slots stay locked and {held[1]} documents pinned"
        time.sleep(0.05)
    assert client.post("/rag/cache/verify", json={}).json()["bad"] == []
    assert client.get("/health_generate", timeout=240).status_code == 200


def test_mixed_traffic_gives_the_answers_of_single_requests_and_loses_nothing(
    stress_server: Server, builder: PromptBuilder
) -> None:
    prompts = [prompt(builder, row, 3) for row in rows("onehop")[:CROWD]]
    with stress_server.running.client() as client:
        alone = [result(composed(client, ids, spans)).ids for ids, spans in prompts]
        plain = [result(generate(client, ids)).ids for ids, _ in prompts]
        together, plain_together, left = asyncio.run(_crowd(stress_server.url, prompts))
        assert together == alone
        assert plain_together == plain
        assert left > 0, "some clients must have left"
        settled(client)
        assert stress_server.running.process.poll() is None


async def _crowd(url: str, prompts: list[Any]) -> tuple[list[list[int]], list[list[int]], int]:
    """Send each prompt composed and plain, with three more clients each that leave at different moments."""
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
        await client.post("/generate", json=_body(ids, plan, 1000), timeout=after)
    except httpx.TimeoutException:
        return True
    return False


def stage_of(name: str) -> tuple[list[str], dict[str, Any], dict[str, Any]]:
    """Tiers to evict, plan options and sampling that make one stage long."""
    everywhere = ["device", "host"]
    return {
        "load": (everywhere, {}, {}),
        "compose": (["device"], {"keep": 0.5}, {}),
        "recompute": (["device"], {"recompute": "all"}, {}),
        "decode": (["device"], {}, {"n_new": 400}),
    }[name]


@pytest.mark.parametrize("stage", ["load", "compose", "recompute", "decode"])
def test_a_client_that_leaves_at_a_stage_leaves_nothing_behind(
    stress_server: Server, builder: PromptBuilder, stage: str
) -> None:
    ids, spans = prompt(builder, rows("crossdoc")[6], 5)
    tiers, options, sampling = stage_of(stage)
    with stress_server.running.client() as client:
        want = result(composed(client, ids, spans, **options))
        for after in MOMENTS:
            assert client.post("/rag/cache/evict", json={"tiers": tiers}).status_code == 200
            with (
                slow(stress_server.storage) if stage == "load" else nullcontext(),
                suppress(httpx.TimeoutException),
            ):
                answer = generate(client, ids, plan_of(spans, **options), timeout=after, **sampling)
                assert stage != "load", f"{answer} came without waiting for the disk"
            settled(client)
        assert_same(result(composed(client, ids, spans, **options)), want)


def test_clients_that_leave_the_queue_leave_nothing_behind(
    stress_server: Server, builder: PromptBuilder
) -> None:
    """More contexts than the pool holds: most of them leave before they are admitted."""
    prompts = [prompt(builder, row, 5) for row in rows("crossdoc")[:QUEUE]]
    with stress_server.running.client() as client:
        ids, spans = prompts[0]
        want = result(composed(client, ids, spans))

        async def crowd() -> int:
            async with httpx.AsyncClient(
                base_url=stress_server.url, limits=httpx.Limits(max_connections=None)
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


def test_a_request_retracted_whose_documents_are_gone_meanwhile_says_so(
    stress_server: Server, builder: PromptBuilder
) -> None:
    """It cannot be composed again, and the tokens that it has came from composed KV, so it must not go on
    from other KV."""
    prompts = [prompt(builder, row, 2) for row in rows("onehop")[:4]]
    with stress_server.running.client() as client:

        async def crowd() -> list[httpx.Response]:
            async with httpx.AsyncClient(base_url=stress_server.url, timeout=300) as http:
                asking = [
                    asyncio.create_task(http.post("/generate", json=_body(ids, plan_of(spans), 60)))
                    for ids, spans in prompts
                ]
                while not any(task.done() for task in asking):
                    if (await http.post("/dumper/ragserve", json={"op": "slots"})).json()[0]["now"]:
                        break
                assert (await http.delete("/rag/cache")).status_code == 200
                return await asyncio.gather(*asking)

        deadline = time.monotonic() + 240
        lost: list[httpx.Response] = []
        while not lost:  # all may have been answered before the documents are deleted
            assert time.monotonic() < deadline, "every third step takes all but one back"
            want = [result(composed(client, ids, spans, n_new=60)).ids for ids, spans in prompts]
            answers = asyncio.run(crowd())
            lost = [answer for answer in answers if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE]
        assert all("its documents were evicted meanwhile" in answer.text for answer in lost)
        whole = [
            (answer.json()["output_ids"], ids)
            for answer, ids in zip(answers, want, strict=True)
            if answer.is_success
        ]
        # those that came after the deletion
        missed = [answer for answer in answers if answer not in lost and missing_of(answer.json())]
        assert len(whole) + len(lost) + len(missed) == len(answers)
        assert [got for got, _ in whole] == [ids for _, ids in whole]
        settled(client)


def test_sparse_requests_retracted_choose_from_right_statistics_afterwards(stress_server: Server) -> None:
    """Requests of all modes at once. Every third step retracts one, whose pages are freed and written again
    elsewhere.
    """
    chance = random.Random(8)
    lengths = (210, 240, 270, 300, 420, 450)  # the longest prompts are retracted first
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
    with stress_server.running.client() as client:
        alone = [result(generate(client, ids, n_new=40)).ids for ids in prompts]
        assert client.delete("/rag/cache").status_code == 200
        said: list[DecodeReport] = []
        deadline = time.monotonic() + 240
        while not said or min(report.steps for report in said) == 39:
            assert time.monotonic() < deadline, "a step that was retracted comes again as a prefill"
            answers = asyncio.run(_decoded_while_checked(stress_server.url, prompts, modes))
            said = [DecodeReport.from_json(answers[i]["meta_info"][DECODE_FIELD][-1]) for i in (1, 4, 5)]
        for mode, answer, ids in zip(modes, answers, alone, strict=True):
            assert mode["mode"] == "hierarchical" or answer["output_ids"] == ids, mode
        assert all(report.sparse_steps and report.pages < report.pages_held for report in said)
        settled(client)
        reference = SparseReference(stress_server.model, 16, 4)
        reference.decode = DecodeOptions(mode="hierarchical", budget=64, reuse=3, dense_below=0)
        custom = {
            "custom_params": {DECODE_FIELD: json.dumps({"mode": "hierarchical", "budget": 64, "reuse": 3})}
        }
        sampling = {"temperature": 0, "max_new_tokens": 20, "ignore_eos": True, **custom}
        fresh = [
            chance.randrange(10, 8000) for _ in range(450)
        ]  # alone, so never retracted, in pages used before
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
            await asyncio.sleep(0.3)
        return [task.result() for task in asking]


def test_a_question_longer_than_a_chunk(stress_server: Server, builder: PromptBuilder) -> None:
    reference, tokenizer = Reference(stress_server.model), AutoTokenizer.from_pretrained(stress_server.model)
    ids, spans = prompt(builder, rows("onehop")[5], 2)
    long = ids + ids[spans[1][0] : spans[1][1]] + ids[spans[2][0] : spans[2][1]] + ids[spans[-1][1] :]
    assert len(long) - spans[-1][1] > 2 * STRESS_CHUNK
    with stress_server.running.client() as client:
        assert_same(result(composed(client, long, spans)), reference.composed(long, spans, NEW))
        wanted = chosen_sentences(reference, tokenizer, long, spans, 0.1)
        asked, named = (
            result(composed(client, long, spans, recompute=recompute, share=0.1))
            for recompute in ("sentences", wanted)
        )
        assert asked == named, "it is asked as a whole before its first chunk has slots for all of it"
        settled(client)


def test_several_answers_to_one_composed_prompt(stress_server: Server, builder: PromptBuilder) -> None:
    ids, spans = prompt(builder, rows("onehop")[6], 2)
    with stress_server.running.client() as client:
        want = result(composed(client, ids, spans)).ids
        body = _body(ids, plan_of(spans), len(want))
        body["sampling_params"]["n"] = 3
        assert [answer["output_ids"] for answer in client.post("/generate", json=body).json()] == [want] * 3
        settled(client)
