"""Whether passages seem to answer a question, over the product's routes and by itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ragserve.retrieval import evidence
from ragserve.retrieval.evidence import can_judge, judged, signals, words_of
from ragserve_index.types import Chunk, Hit
from tests.unit.api.scripted_server import DOCUMENTS, Live, serving

ANSWERED = "Who built the lighthouse of Skerryvore?"
NOT_THERE = "What does a ticket for the Louvre museum cost?"
MORE = {f"page {n}": f"The lighthouse number {n} was built of granite by engineers." for n in range(5)}
NOTHING = "Nothing in here."


def passage(text: str, cosine: float) -> Hit:
    return Hit(Chunk(1, "d", 0, text, 0, len(text), None, 9, "s", "T", {}), cosine, cosine)


def test_signals_are_of_the_best_passage_the_rest_and_the_words() -> None:
    counts = dict(zip(words_of(NOT_THERE), (10, 0, 4, 20), strict=True))
    assert list(counts) == ["ticket", "louvre", "museum", "cost"]
    found, missing = signals(
        [passage("a museum costs", 0.5), passage("a ticket", 0.3)], "dense", counts, n_chunks=100
    )
    assert (found.best, round(found.gap, 3)) == (0.5, 0.1)
    assert 0 < found.covered < 0.5
    assert missing == ["louvre"]


@pytest.mark.parametrize("retrieval", ["dense", "hybrid", "lexical"])
def test_what_stands_out_and_has_the_words_is_likely(retrieval: Any) -> None:
    name = "all-MiniLM-L6-v2"
    good = judged(evidence.Signals(0.8, 0.3, 1.0), [], name, retrieval)
    poor = judged(evidence.Signals(0.25, 0.02, 0.1), ["louvre"], name, retrieval)
    assert good.score > 0 > poor.score
    assert (good.reason, poor.reason) == ("", "no passage has louvre")
    assert "0.25" in judged(evidence.Signals(0.25, 0.02, 0.3), [], name, retrieval).reason


def test_other_embedders_are_not_judged_but_words_are() -> None:
    assert not can_judge("words", "dense")
    assert can_judge("words", "lexical")


@pytest.fixture(scope="module")
def lights(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> Iterator[Live]:
    with serving(tmp_path_factory.mktemp("evidence"), model_path, nothing_found=NOTHING) as live:
        live.index("docs", DOCUMENTS | MORE)
        yield live


@pytest.fixture
def asked(lights: Live) -> Iterator[httpx.Client]:
    lights.engine.reset()
    with lights.client() as client:
        yield client


def ask(client: httpx.Client, question: str, **fields: Any) -> dict[str, Any]:
    body = {"query": question, "namespace": "docs", "retrieval": "lexical", **fields}
    reply = client.post("/rag/query", json=body)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def test_an_answer_says_if_the_documents_may_not_have_it(asked: httpx.Client, lights: Live) -> None:
    good, poor = ask(asked, ANSWERED), ask(asked, f"{NOT_THERE} Of granite, by engineers, the number?")
    assert good["evidence"]["likely"]
    assert not good["context"]["notes"]
    assert not poor["evidence"]["likely"]
    (note,) = [each for each in poor["context"]["notes"] if "may not answer" in each]
    assert "louvre" in note
    assert len(lights.engine.requests) == 2, "a note keeps no answer back"
    chat = {
        "model": "ragserve/docs",
        "messages": [{"role": "user", "content": f"{NOT_THERE} Of granite, by engineers, the number?"}],
        "retrieval": "lexical",
    }
    extras = asked.post("/v1/chat/completions", json=chat).json()["ragserve"]
    assert extras["evidence"] == poor["evidence"]
    found = asked.post("/rag/retrieve", json={"query": ANSWERED, "namespace": "docs", "retrieval": "lexical"})
    assert found.json()["evidence"] == good["evidence"]


def test_a_refusal_asks_no_model(asked: httpx.Client, lights: Live) -> None:
    question = f"{NOT_THERE} Of granite, by engineers, the number?"
    refused = ask(asked, question, not_found="refuse")
    assert (refused["answer"], refused["citations"], refused["sentences"]) == (NOTHING, [], [])
    assert lights.engine.requests == []
    assert ask(asked, ANSWERED, not_found="refuse")["answer"] != NOTHING
    off = ask(asked, question, not_found="off")
    assert (off["evidence"], off["context"]["notes"]) == (None, [])


def test_few_passages_and_other_searches_are_not_judged(asked: httpx.Client, lights: Live) -> None:
    lights.index("few", DOCUMENTS)
    assert ask(asked, ANSWERED, namespace="few")["evidence"] is None
    assert ask(asked, ANSWERED, retrieval="dense")["evidence"] is None, "the embedder has no weights"
    assert ask(asked, ANSWERED, documents=[{"text": "Alan built it."}])["evidence"] is None
    history = [
        {"role": "user", "content": "Tell me of Bell Rock."},
        {"role": "assistant", "content": "It is tall."},
    ]
    assert ask(asked, ANSWERED, history=history, follow_ups="context")["evidence"] is None
    assert len(ask(asked, ANSWERED, k=1)["citations"]) <= 1
    assert ask(asked, ANSWERED, k=1)["context"]["documents_retrieved"] == 1


def test_words_of_scripts_without_spaces_are_pairs() -> None:
    assert words_of("灯塔的电池在哪里") == ["灯塔", "的电", "池在", "哪里"]
    assert words_of("iPhone 15 の電池は") == ["iphone", "15", "の電", "池は"]
