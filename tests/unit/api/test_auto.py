"""Strategy `auto` in a server: for which queries it takes what was verified in a namespace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from ragserve.profiles import gate
from ragserve.profiles.costs import COSTS, FILE_NAME, CostSample, fit
from ragserve.profiles.gate import Entry, Figures, record, set_of
from tests.unit.api.scripted_server import Live, serving

QUESTION = "Who built the lighthouse?"
BEST = "passages:by=score,count=2"
GOOD = Figures(500, None, None, 0.3, 100.0, 10.0, references=350, margin=4.0, different=12.0)
TEXTS = {f"d{number}": f"The lighthouse {number} " + "stands by the sea " * 20 for number in range(8)}
RETRIEVER = "words, dense, k 5"


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> Iterator[Live]:
    """A server where prefill costs a millisecond a token."""
    folder = tmp_path_factory.mktemp("auto")
    samples = [CostSample(tokens, float(tokens)) for tokens in (256, 512, 1024)]
    COSTS.save(folder / FILE_NAME, "print", fit(samples, model="scripted", hardware="", date="d"))
    with serving(folder, model_path, embedder="words") as found:
        found.index("docs", TEXTS)
        yield found


@pytest.fixture
def client(live: Live, monkeypatch: pytest.MonkeyPatch) -> Iterator[httpx.Client]:
    """Of a server whose engine has a document cache."""
    live.engine.reset()

    async def prefix(namespace: str, input_ids: Sequence[int]) -> int:
        return 0

    for name in ("warm", "where", "control", "prefix"):
        monkeypatch.setattr(live.engine, name, prefix, raising=False)
    with live.client() as found:
        yield found


def verify(live: Live, label: str = BEST, retriever: str = RETRIEVER) -> None:
    """Record a strategy as verified in the namespace by a search, in place of what was recorded before."""
    place = live.settings.data_dir / gate.FILE_NAME
    place.unlink(missing_ok=True)
    own = {set_of("docs", retriever): replace(GOOD, retriever=retriever)}
    record(place, "print", {label: Entry(own, "scripted", "d", "h", "float32")})


def choice(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    """The context of an answer by `auto`."""
    reply = client.post("/rag/query", json={"query": QUESTION, "namespace": "docs", **fields})
    assert reply.status_code == 200, reply.text
    return dict(reply.json()["context"])


def test_documents_of_a_request_are_all_read(client: httpx.Client, live: Live) -> None:
    """A verdict says which passages that are found may be left out, nothing of those that a client gives."""
    verify(live)
    found = choice(client)
    assert (found["strategy"], found["documents_kept"]) == ("passages", 2)
    given = choice(client, documents=[{"text": text} for text in TEXTS.values()])
    assert (given["strategy"], given["documents_kept"]) == ("prefix", 8), given["choice"]
    named = choice(client, documents=[{"text": text} for text in TEXTS.values()], strategy="passages")
    assert (named["strategy"], named["documents_kept"]) == ("passages", 2)


def strategy(client: httpx.Client, **fields: Any) -> str:
    return str(choice(client, **fields)["strategy"])


def test_a_verdict_counts_for_questions_that_are_searched_for_alike(client: httpx.Client, live: Live) -> None:
    """The best two of five passages were as good as five; of eight nobody knows."""
    verify(live)
    assert strategy(client, k=5) == strategy(client, retrieval="dense", filter=None) == "passages"
    other = choice(client, k=8)
    assert (other["strategy"], other["documents_kept"]) == ("prefix", 8)
    assert f"{BEST} verified here by another search: {RETRIEVER}" in other["choice"]
    for fields in ({"retrieval": "hybrid"}, {"rerank_candidates": 5, "dedupe": 0.5}, {"neighbours": 1}):
        assert strategy(client, **fields) == "prefix", fields


@pytest.mark.parametrize(
    ("label", "taken"),
    [
        (BEST, "passages"),
        ("passages:tokens=100", "passages"),
        ("passages:keep=0.4", "prefix"),
    ],
)
def test_of_fewer_passages_none_more_is_left_out(
    client: httpx.Client, live: Live, label: str, taken: str
) -> None:
    verify(live, label)
    assert strategy(client) == "passages"
    assert strategy(client, k=4) == taken


def test_what_question_sets_verify_counts_for_any_search(client: httpx.Client, live: Live) -> None:
    place = live.settings.data_dir / gate.FILE_NAME
    place.unlink(missing_ok=True)
    close = replace(GOOD, margin=None, kl=0.001)
    record(place, "print", {BEST: Entry({"set": close}, "scripted", "d", "h", "float32")})
    assert strategy(client) == strategy(client, k=8, retrieval="hybrid") == "passages"


def test_a_namespaces_own_settings_are_its_usual_search(client: httpx.Client, live: Live) -> None:
    store = live.services.store
    epic = {"query": QUESTION, "namespace": "docs", "strategy": "epic"}
    store.set_settings("docs", {"k": 8})
    try:
        verify(live)
        assert strategy(client) == strategy(client, k=5) == "prefix", "a verdict by the server's search"
        verify(live, "epic")
        error = client.post("/rag/query", json=epic).json()["error"]
        assert error["code"] == "strategy_not_verified"
        assert f"another retriever than the server has now there: {RETRIEVER}, now" in error["message"]
        verify(live, retriever="words, dense, k 8")
        found = choice(client)
        assert (found["strategy"], found["documents_kept"]) == ("passages", 2), found["choice"]
        (shown,) = client.get("/info").json()["verification"]["measured"]
        assert (shown["verified"], shown["retriever"]) == (True, "words, dense, k 8")
        verify(live, "epic", "words, dense, k 8")
        assert client.post("/rag/query", json=epic | {"k": 2}).is_success, "who names a strategy has it"
    finally:
        store.set_settings("docs", {})
