"""Documents of a composed request that are not cached: prefilled together, once for everyone who waits, and
then the request is served.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import pytest

from ragserve.engine.base import GenerateChunk, GenerateRequest
from ragserve.engine.prefill import ROUNDS
from ragserve.errors import EngineError, Unavailable
from sglang_ext.wire.protocol import (
    PLAN_FIELD,
    ContextPlan,
    PlanError,
    SessionPart,
    Span,
    session_key,
)
from tests.unit.engine.keeping_engine import Engine, answer, request


def test_documents_of_several_namespaces_are_each_prefilled_in_their_own() -> None:
    async def work() -> None:
        engine = Engine()
        asked = replace(request([1, 1], [2, 2], [3, 3], namespace="a+b"), owners=("a", "b", "a"))
        await answer(engine, asked)
        plans = [each["sampling_params"]["custom_params"][PLAN_FIELD] for each in engine.messages[0]]
        assert [json.loads(plan)["namespace"] for plan in plans] == ["a", "b", "a"]
        # the same text of another namespace is another document
        other = replace(request([1, 1], [2, 2], namespace="a+b"), owners=("a", "a"))
        engine.cached.discard((2, 2))
        await asyncio.gather(answer(engine, other), answer(engine, asked))
        plans = [
            m["sampling_params"]["custom_params"][PLAN_FIELD] for each in engine.messages[1:] for m in each
        ]
        assert sorted(json.loads(plan)["namespace"] for plan in plans) == ["a", "b"]

    asyncio.run(work())


@pytest.mark.parametrize(
    ("namespace", "owners"),
    [("a+b", ()), ("a+b", ("a",)), ("a+b", ("a", "c")), ("a", ("a", "a")), ("a+", ("a", "a")), ("a+b/c", ())],
)
def test_a_plan_names_one_of_its_namespaces_for_each_document(
    namespace: str, owners: tuple[str, ...]
) -> None:
    plan = ContextPlan("compose", "a+b", "concat", (Span(0, 1), Span(1, 2)), owners=("a", "b"))
    assert ContextPlan.from_json(plan.to_json(), 3) == plan
    wrong = replace(plan, namespace=namespace, owners=owners)
    with pytest.raises(PlanError):
        ContextPlan.from_json(wrong.to_json(), 3)
    with pytest.raises(PlanError, match="of one namespace"):
        ContextPlan.from_json(ContextPlan("document", "a+b").to_json(), 3)


def test_all_that_a_query_lacks_is_prefilled_in_one_message_and_not_analysed() -> None:
    async def work() -> None:
        engine = Engine()
        engine.cached.add((1, 1))
        chunk = await answer(engine, request([1, 1], [2], [3, 3], [2]))
        assert (chunk.text, chunk.fallback) == ("composed", None)
        assert engine.prefilled == [[[2], [3, 3]]], (
            "what is cached is left alone, and a document that comes twice is prefilled once"
        )
        assert engine.analysed == [False, False]
        assert [r["rid"].rpartition("-")[0] for r in engine.messages[0]] == ["q-document"] * 2
        await answer(engine, request([3, 3], [2]))
        assert len(engine.messages) == 1

    asyncio.run(work())


def test_the_time_of_documents_that_were_computed_is_a_stage_of_its_own() -> None:
    async def work() -> None:
        engine = Engine()
        asked = request([1, 1], [2], [3, 3])
        cold, warm = await answer(engine, asked), await answer(engine, asked)
        assert cold.timings.documents_tokens == 5
        assert cold.timings.documents_ms is not None
        assert cold.timings.documents_ms > 0
        assert (warm.timings.documents_ms, warm.timings.documents_tokens) == (None, None)

    asyncio.run(work())


@pytest.mark.parametrize(
    ("strategy", "options", "analysed"),
    [
        ("concat", {}, False),
        ("concat", {"recompute": "question", "share": 0.1}, False),
        ("concat", {"recompute": "sentences"}, True),
        ("concat", {"recompute": [3, 4]}, False),
        ("samkv", {}, True),
        ("prefix", {}, False),
    ],
)
def test_documents_are_analysed_beforehand_for_a_rule_that_reads_it(
    strategy: str, options: dict[str, Any], analysed: bool
) -> None:
    """Or the first such strategy of a comparison would be timed with the analysis, and others without."""

    async def work() -> list[bool]:
        engine = Engine()
        await engine.documents.warm(
            replace(request([1, 1], [2]), strategy=strategy, options=options), analyse=False
        )
        return engine.analysed

    assert asyncio.run(work()) == [analysed] * 2


def test_a_request_tells_the_engine_which_of_its_documents_were_computed_for_it() -> None:
    """Its report must tell a cold request from a warm one, though the documents are on the device by then."""

    async def work() -> None:
        engine = Engine()
        engine.cached |= {(1, 1), (3, 3)}
        told: list[list[int]] = []
        run = engine.documents._run

        def noted(fields: dict[str, Any], prompt_tokens: int) -> AsyncGenerator[GenerateChunk, None]:
            plan = json.loads(fields["sampling_params"]["custom_params"][PLAN_FIELD])
            told.append(plan.get("computed", []))
            return run(fields, prompt_tokens)

        engine.documents._run = noted
        asked = request([1, 1], [2], [3, 3], [2], [4])
        await answer(engine, asked)
        await answer(engine, asked)
        assert told == [[], [1, 3, 4], []]

    asyncio.run(work())


async def started() -> None:
    """Let all tasks go on until they wait for the engine."""
    for _ in range(100):
        await asyncio.sleep(0)


def test_queries_share_prefills_but_wait_for_no_analysis() -> None:
    async def work() -> None:
        engine = Engine()
        engine.hold.clear()
        warming = asyncio.create_task(
            engine.documents.prefill(request([1], [2]), request([1], [2]).spans, analyse=True)
        )
        queries = [asyncio.create_task(answer(engine, request(*each))) for each in ([[1], [2]], [[2], [3]])]
        elsewhere = asyncio.create_task(answer(engine, request([2], namespace="other")))
        await started()
        queries[0].cancel()
        engine.hold.set()
        assert (await queries[1]).text == (await elsewhere).text == "composed"
        await warming
        # the second query begins with [2], which is another document then
        assert engine.prefilled == [[[1], [2]], [[1], [2]], [[2], [3]], [[2]]]
        assert engine.analysed == [True, True, False, False, False, False, False]

    asyncio.run(work())


def test_texts_that_came_with_the_query_are_not_kept_on_disk() -> None:
    async def work() -> None:
        engine = Engine()
        asked = replace(request([1], [2], [3]), unregistered=(1,))
        await answer(engine, asked)
        plans = [
            ContextPlan.from_json(message["sampling_params"]["custom_params"][PLAN_FIELD], 1)
            for message in engine.messages[0]
        ]
        assert [plan.lasting for plan in plans] == [True, False, True]
        engine.hold.clear()
        passing = asyncio.create_task(answer(engine, replace(request([4]), unregistered=(0,))))
        await started()
        lasting = asyncio.create_task(answer(engine, request([4])))
        await started()
        engine.hold.set()
        await asyncio.gather(passing, lasting)
        assert engine.prefilled[1:] == [[[4]], [[4]]], (
            "an indexed document does not wait for one that must not last"
        )

    asyncio.run(work())


def test_an_error_reaches_all_who_wait_and_the_next_one_tries_again() -> None:
    async def work() -> None:
        engine = Engine()
        engine.hold.clear()
        engine.fails = EngineError("no memory")
        queries = [asyncio.create_task(answer(engine, request([1], [2]))) for _ in range(2)]
        await started()
        engine.hold.set()
        for query in queries:
            with pytest.raises(EngineError, match="no memory"):
                await query
        assert (await answer(engine, request([1], [2]))).text == "composed"
        assert len(engine.messages) == 2

    asyncio.run(work())


def test_a_document_that_fails_is_the_error_of_those_only_who_asked_for_it() -> None:
    """Though another one of theirs was computed in the same message."""

    async def work() -> None:
        engine = Engine()
        engine.hold.clear()
        engine.bad = [[2]]
        both = asyncio.create_task(answer(engine, request([1], [2])))
        await started()
        one = asyncio.create_task(answer(engine, request([1], [3])))
        await started()
        engine.hold.set()
        with pytest.raises(EngineError, match=r"no \[2\]"):
            await both
        assert (await one).text == "composed"
        assert engine.prefilled == [[[1], [2]], [[3]]]

    asyncio.run(work())


def test_documents_that_do_not_stay_are_answered_exactly() -> None:
    async def work() -> None:
        engine = Engine()
        engine.loses = True
        chunk = await answer(engine, request([1], [2]))
        assert chunk.text == "exact"
        assert chunk.fallback is not None
        assert "did not stay in the cache" in chunk.fallback
        assert len(engine.messages) == ROUNDS

    asyncio.run(work())


def test_documents_that_do_not_stay_of_a_prompt_that_no_exact_one_may_be_end_it_for_now() -> None:
    async def work() -> None:
        engine = Engine()
        engine.loses, engine.largest = True, 2
        with pytest.raises(Unavailable, match=r"did not stay in the cache.*too large") as told:
            await answer(engine, request([1], [2]))
        assert (told.value.status, told.value.code) == (503, "documents_evicted")
        engine.loses = False
        assert (await answer(engine, request([1], [2]))).text == "composed"

    asyncio.run(work())


def dialogue(turns: int) -> GenerateRequest:
    """The last request of a session whose turns have a document and a question each."""
    made: GenerateRequest | None = None
    ids: list[int] = [1]
    for turn in range(turns):
        start, before, held = len(ids), made, 0 if made is None else made.spans[-1].end
        ids = [*ids, 10 + turn, 99]
        made = GenerateRequest(
            f"turn{turn}",
            ids,
            "n",
            "concat",
            spans=(Span(0, start), Span(start, start + 1)),
            session=SessionPart(session_key("n", "s"), held),
            earlier=None if before is None else lambda before=before: before,  # type: ignore[misc]
        )
        ids = [*ids, 50 + turn]  # the answer
    assert made is not None
    return made


def test_evicted_turns_of_a_session_are_composed_again_as_far_back_as_they_are_missing() -> None:
    async def work() -> None:
        engine, last = Engine(), dialogue(4)
        ids = last.input_ids
        engine.dialogues.add(tuple(ids[:2]))  # the first turn's document is still there
        assert (await answer(engine, last)).text == "composed"
        ends = [len(prompt) for prompt in engine.asked]
        assert ends == [12, 9, 6, 6, 9, 12], "what is missing is found going back, and made going forth"
        assert all(prompt == ids[: len(prompt)] for prompt in engine.asked)
        engine.asked.clear()
        assert (await answer(engine, last)).fallback is None
        assert engine.asked == [ids]

    asyncio.run(work())


def test_what_was_computed_for_a_request_is_not_reported_as_held() -> None:
    async def work() -> None:
        engine, last = Engine(), dialogue(4)
        ids, earlier = last.input_ids, last.spans[0].end
        for there in (0, 2):  # nothing, or the first turn up to its document
            engine.dialogues = {tuple(ids[:there])} if there else set()
            assert figures(await answer(engine, last)) == (there, earlier - there, there)
        engine.dialogues = {tuple(ids[:end]) for end in range(1, earlier)}
        held = earlier - 1  # the answer has one token that no pass has read
        assert figures(await answer(engine, last)) == (held, 1, held)

    def figures(chunk: GenerateChunk) -> tuple[int, int, int]:
        assert chunk.context is not None
        return chunk.context.session_held, chunk.context.session_computed, chunk.usage.cached

    asyncio.run(work())


def test_a_dialogue_that_does_not_stay_is_answered_exactly_after_one_try_a_turn() -> None:
    async def work() -> None:
        engine = Engine()
        engine.forgets = True
        chunk = await answer(engine, dialogue(5))
        assert chunk.text == "exact"
        assert "dialogue did not stay in the cache" in str(chunk.fallback)
        assert len(engine.asked) <= 10

    asyncio.run(work())
