"""Leading the real engine along given answers, and comparing strategies on a namespace of its own."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from ragserve.adapt.low_rank import AdaptedModel
from ragserve.adapt.packing import TrainingSequence
from ragserve.answering.prompt import PromptBuilder
from ragserve.engine.base import GenerateRequest, Sampling
from ragserve.retrieval.embedder import Embedder
from ragserve.retrieval.passage_search import PassageSearch
from ragserve.retrieval.retriever import Retriever
from ragserve.retrieval.search_options import SearchOptions
from ragserve.strategy_spec import parse
from ragserve.verification.comparison import Comparison
from ragserve.verification.comparison_run import compare_all
from ragserve.verification.distribution import answer_of, decode, forced_along, given_answer
from ragserve.verification.engine_run import first_token
from ragserve.verification.questions import DrawnQuestion, drawn
from ragserve.verification.tuned_queries import TunedQueries
from ragserve.verification.verdicts import verdict
from ragserve_index import IndexStore
from sglang_ext.wire.protocol import DISTRIBUTION_FIELD, FORCED_FIELD, Span
from tests.integration.context_client import composed
from tests.integration.engines import Server
from tests.integration.prompts import prompt, rows
from tests.integration.reference import Reference
from tests.integration.served_engine import ServedEngine, on

NAMESPACE = "tune-led"
TOLERANCE = 2e-3  # of float32 log-probabilities, the unlikeliest tokens' included


def request(case: Any, strategy: str, tokens: int = 8, **options: Any) -> GenerateRequest:
    ids, spans = case
    places = tuple(Span(a, b) for a, b in spans)
    return GenerateRequest("tune-test", ids, NAMESPACE, strategy, Sampling(tokens), places, options)


@pytest.fixture(scope="module")
def reference(control_server: Server) -> Reference:
    assert control_server.model is not None
    return Reference(control_server.model)


@pytest.fixture(scope="module")
def case(control_server: Server, builder: PromptBuilder) -> tuple[list[int], list[tuple[int, int]]]:
    """A prompt on which `concat` says something else than `full`, and its spans; the documents are cached,
    with their analyses."""
    ids, spans = prompt(builder, rows("crossdoc")[0], 8)
    for strategy in ("concat", "samkv"):
        composed(control_server.client, ids, spans, strategy, NAMESPACE, n_new=1)
    return ids, spans


def distributions(texts: Any) -> torch.Tensor:
    return torch.tensor(np.stack([decode(text) for text in texts]))


def test_the_engine_is_led_as_a_plain_decoding_of_the_same_tokens(
    control_server: Server, case: Any, reference: Reference
) -> None:
    """Full prefill by itself, and the composed context along its answer, token by token in transformers."""

    async def work(engine: ServedEngine) -> Any:
        answer = await answer_of(engine, request(case, "full"))
        close, timed = await forced_along(engine, request(case, "concat"), answer)
        return answer, close, timed.last

    answer, close, led = on(control_server, work)
    ids, spans = case
    assert list(answer.ids) == reference.plain(ids, 8).ids[: len(answer.ids)]
    assert list(led.output_ids) == list(answer.ids), "it says what it is told to"
    want_full = reference.along(ids, [], list(answer.ids)).double()
    want = reference.along(ids, spans, list(answer.ids)).double()
    assert (distributions(answer.distributions) - want_full).abs().max() < TOLERANCE
    assert (distributions(led.distributions) - want).abs().max() < TOLERANCE
    kls = (want_full.exp() * (want_full - want)).sum(-1).tolist()
    assert list(close.kl) == pytest.approx(kls, abs=1e-4)
    assert list(close.agrees) == (want_full.argmax(-1) == want.argmax(-1)).tolist()
    assert max(kls) > 1e-3, "these contexts differ"


def test_a_model_is_trained_over_what_the_engine_composes(
    control_server: Server, case: Any, reference: Reference
) -> None:
    """`ragserve adapt` computes the engine's distributions along an answer, over whole and composed prompts,
    with nothing recomputed."""

    async def work(engine: ServedEngine) -> Any:
        answer = await answer_of(engine, request(case, "full"))
        return answer, (await forced_along(engine, request(case, "concat"), answer))[1].last

    answer, led = on(control_server, work)
    ids, spans = case
    head, *documents = (ids[start:end] for start, end in spans)
    whole = TrainingSequence(head, documents, ids[spans[-1][1] :], answer.ids)
    attention = reference.model.config._attn_implementation
    model = AdaptedModel(
        reference.model, None, torch.device("cpu"), frozenset(), reference.prefix, 2048, "a CPU"
    )
    pack = model.pack([whole, replace(whole, composed=True)])
    try:
        with torch.no_grad():
            computed = model.logits(model.run(pack)[0][pack.targets]).log_softmax(-1).double()
    finally:
        reference.model.set_attn_implementation(attention)
    for own, engine_has in zip(computed.chunk(2), (answer, led), strict=True):
        assert (own - distributions(engine_has.distributions)).abs().max() < TOLERANCE


def test_an_answer_that_is_given_changes_nothing_in_what_is_selected(
    control_server: Server, case: Any
) -> None:
    """Led along its own answer, samkv has the distributions that it has by itself; led along another, it has
    the same first one and keeps as much."""

    async def work(engine: ServedEngine) -> Any:
        alone = await answer_of(engine, request(case, "samkv", keep=0.3))
        same, own = await forced_along(engine, request(case, "samkv", keep=0.3), alone)
        other = await forced_along(
            engine,
            request(case, "samkv", keep=0.3),
            type(alone)(tuple(range(100, 100 + len(alone.ids))), alone.distributions, alone.timed),
        )
        plain = await first_token(engine, request(case, "samkv", keep=0.3))
        return alone, same, own, other[1], plain

    alone, same, own, other, plain = on(control_server, work)
    assert same.same_answer
    assert same.mean_kl < 1e-8
    assert own.text == alone.timed.text == plain.text
    assert list(other.last.output_ids) == list(range(100, 100 + len(alone.ids)))
    first = [distributions(each.last.distributions[:1]) for each in (own, other)]
    assert (first[0] - first[1]).abs().max() < TOLERANCE
    kept = {(each.context.kept, each.context.recomputed) for each in (alone.timed, own, other, plain)}
    assert len(kept) == 1
    assert 0 < alone.timed.context.kept < alone.timed.context.document_tokens


def test_an_answer_brings_its_tokens_along_which_both_contexts_are_led(
    control_server: Server, case: Any
) -> None:
    """As an idle server compares what it has answered, without distributions of the answer itself."""

    async def work(engine: ServedEngine) -> Any:
        plain = await first_token(engine, request(case, "concat"))
        full = await given_answer(engine, request(case, "full"), plain.last.output_ids)
        close, led = await forced_along(engine, request(case, "concat"), full)
        return plain, full, close, led

    plain, full, close, led = on(control_server, work)
    assert plain.last.output_ids
    assert not plain.last.distributions
    assert list(full.timed.last.output_ids) == list(led.last.output_ids) == list(plain.last.output_ids)
    assert led.text == full.timed.text
    own = distributions(led.last.distributions)
    assert own.argmax(-1).tolist() == list(plain.last.output_ids), "its own answer is what it finds likeliest"
    assert close.mean_kl > 1e-3, "these contexts differ"


def test_what_cannot_be_forced_is_refused_and_the_engine_lives(control_server: Server, case: Any) -> None:
    for custom in ({FORCED_FIELD: "[99999999]"}, {FORCED_FIELD: "no"}, {DISTRIBUTION_FIELD: 10**9}):
        body = {"input_ids": case[0][:20], "sampling_params": {"max_new_tokens": 2, "custom_params": custom}}
        answer = control_server.client.post("/generate", json=body)
        assert answer.status_code == 400, answer.text
        assert "ragserve_" in answer.text
    sampling = {
        "max_new_tokens": 3,
        "ignore_eos": True,
        "custom_params": {FORCED_FIELD: json.dumps([77, 78])},
    }
    answer = control_server.client.post(
        "/generate", json={"input_ids": case[0][:20], "sampling_params": sampling | {"temperature": 1.0}}
    )
    assert answer.json()["output_ids"][:2] == [77, 78], "where tokens are drawn, too"
    assert DISTRIBUTION_FIELD not in answer.json()["meta_info"]


def test_strategies_are_compared_on_a_namespaces_own_documents(
    server: Server, builder: PromptBuilder
) -> None:
    places = {"Corran": "Ida Marsh", "Belmore": "Jon Rask"}
    texts = [
        {
            "name": f"{place}.txt",
            "title": place,
            "text": f"The lighthouse of {place} stands on a cliff. It was built by {name} in 1810. "
            f"The people of {place} keep goats and geese, and the harbour freezes in winter.",
        }
        for place, name in places.items()
    ]
    made = server.client.post("/rag/ingest", json={"namespace": "tune", "texts": texts})
    assert server.finished(made)["state"] == "done"
    specs = parse("concat:recompute=all,concat,passages:count=1,concat:passages.count=1")
    questions = [
        DrawnQuestion(place, "given", f"Who built the lighthouse of {place}?", (name,))
        for place, name in places.items()
    ]
    written: list[dict[str, Any]] = []

    async def work(engine: ServedEngine) -> bool:
        with IndexStore(server.data_dir) as store:
            retriever = Retriever(store, Embedder())
            queries = TunedQueries("tune", SearchOptions(3), max_new_tokens=8)
            search = PassageSearch(retriever)
            comparison = Comparison(engine, search, builder, queries, specs, known={}, write=written.append)
            try:
                chunks = islice(drawn(store, "tune"), len(places))
                return await compare_all(comparison, chunks, questions, time_left=lambda: True, most=99)
            finally:
                await retriever.close()

    assert on(server, work)
    assert not [row for row in written if row["error"]]
    by_strategy: dict[str, list[dict[str, Any]]] = {}
    for row in written:
        by_strategy.setdefault(row["strategy"], []).append(row)
    asked = {row["id"]: row for row in by_strategy["full"]}
    assert len(asked) == 4, "two given, and one about each chunk"
    assert all(asked[place]["usable"] for place in places)
    assert all(asked[place]["answer"] for place in places)
    assert all(asked[place]["score"] is not None for place in places)
    fewer, same = by_strategy["passages:count=1"], by_strategy["concat:passages.count=1"]
    assert [row["documents"] for row in fewer] == [row["documents"] for row in same] == [1] * len(fewer)
    assert {row["recomputed"] for row in same} == {0}
    exact = verdict("concat:recompute=all", [row | {"part": "verify"} for row in written])
    assert exact is not None
    assert exact.figures.answer_kl == pytest.approx(0.0, abs=1e-6)
    assert (exact.figures.answer_agrees, exact.figures.recomputed) == (100.0, 100.0)
    assert (exact.figures.score_vs_full, exact.figures.different) == (0.0, 0.0)
    assert exact.decision == "undecided", "a handful of questions verifies nothing"
    reused = verdict("concat", [row | {"part": "verify"} for row in written])
    assert reused is not None
    assert reused.figures.recomputed == 0.0
    assert reused.figures.answer_kl > exact.figures.answer_kl
