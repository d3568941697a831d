"""The question in the recompute pass on the real engine: the same results as SGLang's own extend, for every
request option.
"""

from __future__ import annotations

import base64
import json
import re
from typing import Any

import httpx
import numpy as np
import pytest

from ragserve.answering.prompt import PromptBuilder
from sglang_ext.wire.protocol import DISTRIBUTION_FIELD, PLAN_FIELD
from tests.integration.context_client import NEW, assert_same, composed, generate, plan_of, report, result
from tests.integration.engines import STRESS_CHUNK, Server
from tests.integration.prompts import prompt, rows
from tests.integration.reference import Reference

NAMESPACE = "context"  # of the plans that `generate` is given


@pytest.fixture
def engine(stress_server: Server) -> httpx.Client:
    return stress_server.client


@pytest.fixture
def case(engine: Any, builder: PromptBuilder) -> tuple[list[int], list[tuple[int, int]]]:
    """A prompt and its spans; the documents are cached."""
    ids, spans = prompt(builder, rows("crossdoc")[2], 4)
    composed(engine, ids, spans, n_new=1)
    return ids, spans


def in_each_way(client: Any, case: Any, **fields: Any) -> list[dict[str, Any]]:
    """Answers of one prompt with the question in the recompute pass, in an extend after a recompute pass of
    all tokens, and in a plain prefill."""
    ids, spans = case
    one, two = plan_of(spans, recompute="all"), plan_of(spans, "cacheblend", share=1.0)
    answers = [generate(client, ids, plan, **fields) for plan in (one, two)]
    assert [report(answer)["one_pass"] for answer in answers] == [True, False]
    return [*answers, generate(client, ids, extra_key=json.dumps(fields), **fields)]


def test_logprobs_of_the_question_are_those_of_a_prefill(engine: Any, case: Any) -> None:
    ids, spans = case
    start = spans[-1][1]
    answers = in_each_way(engine, case, logprob_start_len=start, top_logprobs_num=2)
    found = [answer["meta_info"]["input_token_logprobs"] for answer in answers]
    assert [[token for _, token, _ in each] for each in found] == [ids[start:]] * 3
    for other in found[1:]:
        assert max(abs(a[0] - b[0]) for a, b in zip(found[0][1:], other[1:], strict=True)) < 2e-4
    tops = [
        [[token for _, token, _ in top] for top in answer["meta_info"]["input_top_logprobs"][1:]]
        for answer in answers
    ]
    assert tops[0] == tops[1] == tops[2]
    for answer in answers[1:]:
        assert_same(result(answer), result(answers[0]))


def test_hidden_states_are_those_of_the_answer(engine: Any, case: Any) -> None:
    answers = in_each_way(engine, case, return_hidden_states=True, return_logprob=False, n_new=4)
    first, *others = [
        np.array(answer["meta_info"]["hidden_states"][1:], dtype=np.float64) for answer in answers
    ]
    assert first.shape[0] == 3
    for other in others:
        np.testing.assert_allclose(first, other, atol=2e-4)
    prompts = [np.array(answer["meta_info"]["hidden_states"][0], dtype=np.float64) for answer in answers[:2]]
    np.testing.assert_allclose(prompts[0], prompts[1], atol=2e-4)


def test_what_is_done_to_logits_before_sampling_is_done(engine: Any, case: Any) -> None:
    ids, spans = case
    want = result(generate(engine, ids))
    sampling = {
        "temperature": 0,
        "max_new_tokens": NEW,
        "ignore_eos": True,
        "logit_bias": {str(want.ids[0]): -50.0},
    }
    plan = plan_of(spans, recompute="all")
    moved = generate(engine, ids, sampling_params=sampling | {"custom_params": {PLAN_FIELD: plan.to_json()}})
    assert report(moved)["one_pass"]
    assert result(moved).ids[0] != want.ids[0]
    assert_same(result(moved), result(generate(engine, ids, sampling_params=sampling)))


def test_an_answer_keeps_to_its_grammar_in_one_pass_as_in_a_prefill(engine: Any, case: Any) -> None:
    ids, spans = case
    plan = plan_of(spans, recompute="all")
    schema = {"type": "object", "properties": {"year": {"type": "integer"}}, "required": ["year"]}
    for grammar in ({"regex": "No[.] [0-9]{4}"}, {"json_schema": json.dumps(schema)}):
        sampling = {"temperature": 0, "max_new_tokens": 24, **grammar}
        answers = [
            generate(engine, ids, sampling_params=sampling | extra)
            for extra in ({}, {"custom_params": {PLAN_FIELD: plan.to_json()}})
        ]
        assert report(answers[1])["one_pass"]
        assert answers[0]["text"] == answers[1]["text"]
        if "regex" in grammar:
            assert re.fullmatch(grammar["regex"], answers[0]["text"])
        else:
            assert answers[0]["text"].lstrip().startswith("{")


def test_the_first_tokens_distribution_is_that_of_a_prefill(engine: Any, case: Any) -> None:
    ids, spans = case
    found = []
    for custom in ({PLAN_FIELD: plan_of(spans, recompute="all").to_json()}, {}):
        sampling = {
            "temperature": 0,
            "max_new_tokens": 2,
            "custom_params": custom | {DISTRIBUTION_FIELD: True},
        }
        answer = generate(engine, ids, sampling_params=sampling)
        found.append(np.frombuffer(base64.b64decode(answer["meta_info"][DISTRIBUTION_FIELD][0]), dtype="<f4"))
    assert abs(np.exp(found[0]).sum() - 1) < 1e-4
    np.testing.assert_allclose(found[0], found[1], atol=2e-3)
    assert abs(float((np.exp(found[1]) * (found[1] - found[0])).sum())) < 1e-6


def test_a_row_that_nobody_sees_sends_the_question_by_itself_and_changes_nothing(
    engine: Any, case: Any
) -> None:
    """Recomputing a token that is not kept changes no result, but its row differs from the others', so the
    question is not part of the pass.
    """
    ids, spans = case
    kept = [i for i in range(spans[-1][1]) if i % 7 or i < spans[0][1]]
    chosen = [i for i in kept if i % 3 == 0]
    absent = next(i for i in range(spans[1][0], spans[-1][1]) if i not in kept)
    answers = [
        generate(engine, ids, plan_of(spans, kept=kept, recompute=positions))
        for positions in (chosen, sorted([*chosen, absent]))
    ]
    assert [report(answer)["one_pass"] for answer in answers] == [True, False]
    assert_same(result(answers[0]), result(answers[1]))
    untouched = generate(engine, ids, plan_of(spans, kept=kept))
    assert not report(untouched)["one_pass"], "without graphs, a pass of the question alone saves nothing"
    assert (
        max(abs(a - b) for a, b in zip(result(untouched).logprobs, result(answers[0]).logprobs, strict=True))
        > 1e-3
    )


def test_a_question_longer_than_a_chunk_is_extended_by_itself(
    engine: Any, case: Any, stress_server: Server
) -> None:
    ids, spans = case
    long = ids + ids[spans[1][0] : spans[2][1]]
    assert len(long) - spans[-1][1] > STRESS_CHUNK
    answer = generate(engine, long, plan_of(spans, recompute="all"))
    assert not report(answer)["one_pass"]
    assert_same(result(answer), Reference(stress_server.model).plain(long, NEW))
