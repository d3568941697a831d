"""Our embedder and CrossEncoders as services, for clients of OpenAI, Cohere and Text Embeddings Inference."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from ragserve.api.model_routes import MAX_CHARS, MAX_DOCUMENTS, MAX_INPUTS
from ragserve.retrieval.embedder import Embedder
from ragserve.tenants.key_file import KeyLimits
from tests.unit.api.scripted_server import Live, Tenants, eventually, raw_request, serving
from tests.unit.retrieval.tiny_models import cross_encoder
from tests.unit.retrieval.tiny_models import embedder as embedder_in

TEXTS = ["the lighthouse of skerryvore", "a soup of leeks", "who built the reef " * 20]
QUERY = "who built the lighthouse?"


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Embedder:
    return Embedder(embedder_in(tmp_path_factory.mktemp("own"), {"query": "query: ", "passage": "passage: "}))


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> str:
    return cross_encoder(tmp_path_factory.mktemp("ranker") / "model")


@pytest.fixture(scope="module")
def _live(
    own: Embedder, ranker: str, model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Live]:
    with serving(tmp_path_factory.mktemp("data"), model_path, load=lambda _: own, rerank=ranker) as live:
        yield live


def test_openais_client_gets_vectors_by_either_encoding(live: Live, own: Embedder) -> None:
    plain = Embedder(own.model, passage_prompt="", query_prompt="")
    expected = own.encode(TEXTS, prompt="")
    np.testing.assert_allclose(expected[:2], plain.encode(TEXTS[:2]), atol=1e-5)
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none") as client:
        found = client.embeddings.create(model=own.model, input=TEXTS)  # it asks for base64
        one = client.embeddings.create(
            model=own.model, input=TEXTS[0], encoding_format="float", dimensions=own.dim, user="me"
        )
    assert [each.index for each in found.data] == [0, 1, 2]
    np.testing.assert_allclose([each.embedding for each in found.data], expected, atol=1e-5)
    assert found.usage.prompt_tokens == found.usage.total_tokens == own.count_tokens(TEXTS) > 80
    np.testing.assert_allclose(one.data[0].embedding, expected[0], atol=1e-5)
    assert (one.object, one.model) == ("list", own.model)


def test_vectors_have_the_prompt_of_the_side_that_is_named(client: httpx.Client, own: Embedder) -> None:
    def vectors(**fields: Any) -> Any:
        body = {"model": own.model, "input": TEXTS[:2], **fields}
        return [each["embedding"] for each in client.post("/v1/embeddings", json=body).json()["data"]]

    np.testing.assert_allclose(vectors(input_type="query"), own.encode_queries(TEXTS[:2]), atol=1e-5)
    for side in ("document", "passage"):
        np.testing.assert_allclose(vectors(input_type=side), own.encode(TEXTS[:2]), atol=1e-5)
    assert not np.allclose(vectors(), own.encode(TEXTS[:2]), atol=1e-3)
    encoded = vectors(encoding_format="base64")
    np.testing.assert_allclose(np.frombuffer(base64.b64decode(encoded[0]), "<f4"), vectors()[0], atol=1e-5)


BAD: list[tuple[dict[str, Any], int, str]] = [
    ({"input": [1, 2, 3]}, 400, "is read as text, not as token ids"),
    ({"input": [[1, 2], [3]]}, 400, "check_embedding_ctx_length=False"),
    ({"input": []}, 400, "at least 1 item"),
    ({"input": ""}, 400, "is empty"),
    ({"input": ["a", " "]}, 400, "is empty"),
    ({"input": None}, 400, "must be a text or a list of texts"),
    ({"input": {"text": "a"}}, 400, "must be a text or a list of texts"),
    ({"input": "a\0b"}, 400, "NUL"),
    ({"dimensions": 8}, 400, "gives vectors of 16"),
    ({"encoding_format": "int8"}, 400, "encoding_format"),
    ({"input_type": "image"}, 400, "input_type"),
    ({"truncate": True}, 400, "truncate"),
    ({"input": ["a"] * (MAX_INPUTS + 1)}, 400, "at most 2048"),
    ({"input": "a" * 65_537}, 400, "at most 65536"),
    ({"input": ["a" * 65_536] * (MAX_CHARS // 65_536) + ["a"]}, 413, "1,048,577 characters"),
    ({"input": ["a" * 65_536] * 65}, 413, "over 4,194,304 bytes"),
]


@pytest.mark.parametrize(("fields", "status", "said"), BAD, ids=[said for _, _, said in BAD])
def test_what_cannot_be_embedded_is_refused(
    client: httpx.Client, live: Live, own: Embedder, fields: dict[str, Any], status: int, said: str
) -> None:
    refused = client.post("/v1/embeddings", json={"model": own.model, "input": "a", **fields})
    assert refused.status_code == status
    assert said in refused.json()["error"]["message"]
    assert live.seen_upstream == []


def test_other_models_are_sglangs_and_unknown_ones_are_named(
    client: httpx.Client, live: Live, own: Embedder, ranker: str
) -> None:
    for path, body in (
        ("/v1/embeddings", {"model": "tiny", "input": "a"}),
        ("/v1/embeddings", {"model": "default", "input": "a"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
    ):
        assert client.post(path, json=body).json()["upstream"] == path
    for path, name in (("/v1/embeddings", own.model), ("/v1/rerank", ranker), ("/v2/rerank", ranker)):
        error = client.post(path, json={"model": "nobody/knows", "input": "a"}).json()["error"]
        assert (error["code"], error["param"], error["hint"]) == (
            "model_not_found",
            "model",
            f"Here: {name}.",
        )
    namespace = client.post("/v1/embeddings", json={"model": "ragserve/docs", "input": "a"})
    assert (namespace.status_code, namespace.json()["error"]["code"]) == (400, "unsupported_model")
    for path in ("/v1/embeddings", "/v1/rerank", "/rerank"):
        assert client.post(path, json=[1]).status_code == 400


def test_scores_are_the_models_in_all_forms(client: httpx.Client, ranker: str) -> None:
    from sentence_transformers import CrossEncoder

    model = CrossEncoder(ranker, device="cpu")
    expected = [float(model.predict((QUERY, text))) for text in TEXTS]
    best = sorted(range(3), key=lambda i: -expected[i])
    body = {"model": ranker, "query": QUERY, "documents": TEXTS}
    for path in ("/v1/rerank", "/v2/rerank"):
        found = client.post(path, json=body).json()
        assert [each["index"] for each in found["results"]] == best
        for each in found["results"]:
            assert each["relevance_score"] == pytest.approx(expected[each["index"]], abs=1e-4)
            assert "document" not in each
        assert found["meta"]["tokens"]["input_tokens"] > 80
    as_objects = [{"text": text} for text in TEXTS]
    first = client.post(
        "/v1/rerank", json=body | {"documents": as_objects, "top_n": 1, "return_documents": True}
    )
    assert first.json()["results"][0]["document"] == {"text": TEXTS[best[0]]}
    assert len(first.json()["results"]) == 1
    tei = client.post("/rerank", json={"query": QUERY, "texts": TEXTS, "truncate": True, "return_text": True})
    assert [(each["index"], each["text"]) for each in tei.json()] == [(i, TEXTS[i]) for i in best]
    assert [each["score"] for each in tei.json()] == pytest.approx([expected[i] for i in best], abs=1e-4)


@pytest.mark.parametrize(
    ("path", "fields", "status", "said"),
    [
        ("/v1/rerank", {"documents": []}, 400, "at least 1 item"),
        ("/v1/rerank", {"documents": ["a"] * (MAX_DOCUMENTS + 1)}, 400, "at most 1000"),
        ("/v1/rerank", {"documents": [{"body": "a"}]}, 400, "documents"),
        ("/v1/rerank", {"query": " "}, 400, "is empty"),
        ("/v1/rerank", {"top_n": 0}, 400, "top_n"),
        ("/v1/rerank", {"documents": ["a"] * 1000, "query": "b" * 2000}, 413, "2,001,000 characters"),
        ("/rerank", {"raw_scores": True}, 400, "raw_scores"),
        ("/rerank", {"texts": "a"}, 400, "texts"),
    ],
)
def test_what_cannot_be_scored_is_refused(
    client: httpx.Client, ranker: str, path: str, fields: dict[str, Any], status: int, said: str
) -> None:
    body = {"model": ranker, "documents": ["a"]} if path == "/v1/rerank" else {"texts": ["a"]}
    refused = client.post(path, json=body | {"query": "b"} | fields)
    assert refused.status_code == status
    assert said in refused.json()["error"]["message"]


def test_a_client_that_leaves_ends_its_work(live: Live, own: Embedder, monkeypatch: Any) -> None:
    batches: list[int] = []
    encode, left = own.encode, threading.Event()

    def slow(texts: Any, **options: Any) -> Any:
        batches.append(len(texts))
        left.wait(240)
        return encode(texts, **options)

    monkeypatch.setattr(own, "encode", slow)
    body = {"model": own.model, "input": ["reef"] * 1000}
    with raw_request(live, "/v1/embeddings", body):
        eventually(lambda: len(batches) > 0, "the first batch")
    eventually(lambda: live.services.limiter.in_flight == 0, "the slot is free")
    left.set()
    with live.client() as client:
        assert client.post("/v1/embeddings", json=body | {"input": "reef"}).status_code == 200
    assert batches in ([16, 1], [16, 16, 1]), "what was left is not embedded"


def test_keys_need_the_right_to_read_and_pay_with_their_tokens(
    live: Live, own: Embedder, ranker: str
) -> None:
    """The last test of this server: it has keys from now on."""
    tenants = Tenants(live)
    bodies = {
        "/v1/embeddings": {"model": own.model, "input": TEXTS},
        "/v1/rerank": {"model": ranker, "query": QUERY, "documents": TEXTS},
        "/rerank": {"query": QUERY, "texts": TEXTS},
    }
    for path, body in bodies.items():
        with tenants.client(f"writer {len(path)}", "ingest delete", "docs") as writer:
            assert writer.post(path, json=body).json()["error"]["code"] == "missing_right"
        limits = KeyLimits(tokens_per_minute=10)
        with tenants.client(f"reader {len(path)}", "read", "docs", limits=limits) as reader:
            assert reader.post(path, json=body).status_code == 200
            again = reader.post(path, json=body)
        assert (again.status_code, again.json()["error"]["code"]) == (429, "rate_limited")
        assert int(again.headers["retry-after"]) > 0
        assert httpx.post(live.url + path, json=body).status_code == 401
