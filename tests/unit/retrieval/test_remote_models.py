"""Models behind URLs: what is sent, what is believed, and how long is waited."""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from pydantic import SecretStr
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response

from ragserve.config import SECRETS, Settings
from ragserve.errors import InvalidRequest, ModelUnavailable
from ragserve.retrieval import remote_calls, remote_embedder
from ragserve.retrieval.embedder import Embedder, embedder_name
from ragserve.retrieval.remote_calls import Patience, RemoteAddress, RemoteModel, Stopped
from ragserve.retrieval.remote_embedder import RefusedText, RemoteEmbedder
from ragserve.retrieval.remote_reranker import RemoteReranker, public_name
from tests.unit.api.word_embedder import DIM, WordEmbedder
from tests.unit.retrieval.remote_server import Remote, remote_server, right

KEY = "sk-of-the-operator"
PATIENT = Patience(240.0, 240.0)  # of a busy machine


@pytest.fixture(scope="module")
def _remote() -> Iterator[Remote]:
    with remote_server() as remote:
        yield remote


@pytest.fixture
def remote(_remote: Remote, monkeypatch: pytest.MonkeyPatch) -> Remote:
    _remote.reset()
    monkeypatch.setattr(remote_calls, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(remote_calls, "_REST_S", 600.0)
    monkeypatch.setattr(remote_embedder, "_DOCUMENTS", PATIENT)
    return _remote


def embedder(remote: Remote, **fields: Any) -> RemoteEmbedder:
    made = Embedder.of(
        Settings(
            **{
                "embedder": f"openai:{remote.url}/v1#words",
                "embedder_api_key": SecretStr(KEY),
                "remote_timeout_s": PATIENT.attempt_s,
                **fields,
            }
        )
    )
    assert isinstance(made, RemoteEmbedder)
    return made


def data(*rows: Any, indexes: list[Any] | None = None) -> dict[str, Any]:
    places = range(len(rows)) if indexes is None else indexes
    return {"data": [{"index": i, "embedding": row} for i, row in zip(places, rows, strict=True)]}


def test_texts_go_in_batches_and_come_back_in_order(remote: Remote) -> None:
    texts = [f"text number {i}" for i in range(70)]
    model = embedder(remote, passage_prompt="passage: ", query_prompt="query: ")
    found = model.encode(texts)
    expected = WordEmbedder().encode([f"passage: {text}" for text in texts])
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert (found.dtype, model.dim) == (np.float32, DIM)
    assert sorted(len(body["input"]) for _, body, _ in remote.seen) == [6, 32, 32]
    assert {path for path, _, _ in remote.seen} == {"/v1/embeddings"}
    for _, body, headers in remote.seen:
        assert body["model"] == "words"
        assert headers["authorization"] == f"Bearer {KEY}"
    asked = asyncio.run(closing(model, model.questions(["who?"])))
    np.testing.assert_allclose(asked, WordEmbedder().encode(["query: who?"]), atol=1e-6)
    np.testing.assert_allclose(model.encode_queries(["who?"]), asked, atol=1e-6)
    assert model.encode([]).shape == (0, DIM)


async def closing(model: RemoteEmbedder, work: Any) -> Any:
    try:
        return await work
    finally:
        await model.close()


def test_vectors_as_base64_are_read_and_all_are_normalised(remote: Remote) -> None:
    vector = np.arange(4, dtype="<f4")
    encoded = base64.b64encode(vector.tobytes()).decode()
    remote.reply = lambda path, body: data(encoded, [0, 0, 0, 9])
    found = embedder(remote).encode(["a", "b"])
    np.testing.assert_allclose(found, [vector / np.linalg.norm(vector), [0, 0, 0, 1]], atol=1e-6)


HTML = Response("<html>Bad gateway</html>", media_type="text/html")
WRONG: dict[str, tuple[Any, str]] = {
    "too few": (data([1, 2]), "1 embeddings for 2 texts"),
    "one place twice": (data([1, 2], [3, 4], indexes=[1, 1]), "does not number"),
    "places from one": (data([1, 2], [3, 4], indexes=[1, 2]), "does not number"),
    "no places": ({"data": [{"embedding": [1]}, {"embedding": [2]}]}, "does not number"),
    "unlike lengths": (data([1, 2], [3]), "no vectors of one length"),
    "words": (data(["x"], ["y"]), "no vectors of one length"),
    "nothing": (data([], []), "no vectors of one length"),
    "broken base64": (data("AAA=", "!!"), "no vectors of one length"),
    "NaN": (Response('{"data":[{"index":0,"embedding":[NaN]},{"index":1,"embedding":[1]}]}'), "not finite"),
    "infinite": (data([1e39], [1]), "not finite"),
    "a page": (HTML, "no JSON, but text/html"),
    "another API": ({"vectors": []}, "no list of embeddings"),
    "a list": ([1, 2], "no list of embeddings"),
    "nested too deep": (Response(b"[" * 60_000), "no JSON"),
    "an error nested too deep": (Response(b"[" * 9_000, 404), "HTTP 404"),
    "endless": (Response(b'"' + b"x" * (2**21 + 2**16)), "more than"),
    "wrong path": (JSONResponse({"detail": "Not Found"}, 404), "HTTP 404: Not Found"),
    "wrong key": (
        JSONResponse({"error": {"message": f"no {KEY}"}}, 401),
        r"refuses the API key \(HTTP 401\)",
    ),
    "redirect": (
        RedirectResponse("http://127.0.0.1:9/v1/embeddings", 307),
        "a redirect, which is not followed",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_is_said_in_one_sentence_and_not_asked_for_again(remote: Remote, name: str) -> None:
    answer, said = WRONG[name]
    remote.reply = lambda path, body: answer
    with pytest.raises(ModelUnavailable, match=f"^The remote embedder words .*{said}") as caught:
        embedder(remote).encode(["a", "b"])
    assert (caught.value.status, caught.value.code) == (503, "embedder_unavailable")
    assert KEY not in str(caught.value)
    assert remote.url not in str(caught.value), "clients of the server read this"
    assert len(remote.seen) == 1


def test_vectors_of_another_width_are_another_model(remote: Remote) -> None:
    model = embedder(remote)
    assert model.known_dim is None
    model.measure()
    assert model.known_dim == DIM
    remote.reply = lambda path, body: data([1.0, 2.0])
    with pytest.raises(ModelUnavailable, match=f"vectors of 2 components, and of {DIM} before"):
        model.encode(["a"])


def test_what_may_pass_is_asked_for_again(remote: Remote) -> None:
    failures = [JSONResponse({}, 503), JSONResponse({}, 429, {"Retry-After": "0.05"}), HTML]
    failures[2] = Response("busy", 502)

    def reply(path: str, body: dict[str, Any]) -> Any:
        return failures.pop(0) if failures else right(path, body)

    remote.reply = reply
    assert embedder(remote).encode(["a"]).shape == (1, DIM)
    assert len(remote.seen) == 4


def test_a_wait_that_is_longer_than_the_time_left_ends_the_call_at_once(remote: Remote) -> None:
    remote.reply = lambda path, body: JSONResponse(
        {"error": {"message": "slow down"}}, 429, {"Retry-After": "600"}
    )
    with pytest.raises(ModelUnavailable, match="HTTP 429: slow down"):
        embedder(remote).encode(["a"])
    assert len(remote.seen) == 1


def test_a_dead_server_is_named_by_its_model(
    remote: Remote, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_embedder, "_DOCUMENTS", Patience(240.0, 0.0))
    model = embedder(remote, embedder="openai:http://127.0.0.1:9/v1#words")
    with caplog.at_level(logging.INFO), pytest.raises(ModelUnavailable, match="words is not reachable"):
        model.encode(["a"])
    assert "127.0.0.1:9" in caplog.text, "operators read where"
    assert KEY not in caplog.text


def test_a_slow_model_takes_no_longer_than_allowed_and_then_answers_at_once(remote: Remote) -> None:
    remote.delay_s = 600.0
    model = embedder(remote, remote_timeout_s=0.5)

    async def ask() -> None:
        for _ in range(2):
            with pytest.raises(ModelUnavailable, match=r"did not answer within 0\.5"):
                await model.questions(["a"])

    asyncio.run(asyncio.wait_for(closing(model, ask()), 240))
    assert len(remote.seen) <= 1, "nobody waits for a model that is down"


def test_a_question_that_is_aborted_ends_its_call(remote: Remote) -> None:
    remote.delay_s = 600.0
    model = embedder(remote)

    async def abort() -> None:
        task = asyncio.create_task(model.questions(["a"]))
        while not remote.seen:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        while not remote.left:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(closing(model, abort()), 240))


def test_an_ingestion_that_is_stopped_ends_its_calls(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_embedder, "_DOCUMENTS", Patience(600.0, 600.0))
    remote.delay_s = 600.0
    with pytest.raises(Stopped):
        embedder(remote).encode(["a"], lambda: bool(remote.seen))


def test_a_text_that_is_too_long_is_embedded_in_halves(remote: Remote) -> None:
    def reply(path: str, body: dict[str, Any]) -> Any:
        if max(map(len, body["input"])) > 1_000:
            return JSONResponse({"error": {"message": "512 tokens at most"}}, 413)
        return right(path, body)

    remote.reply = reply
    long = "one two three " * 100
    found = embedder(remote).encode(["short", long, "other"])
    plain = WordEmbedder()
    np.testing.assert_allclose(found[[0, 2]], plain.encode(["short", "other"]), atol=1e-6)
    assert found[1] @ plain.encode([long])[0] > 0.99
    assert max(len(text) for _, body, _ in remote.seen[-2:] for text in body["input"]) < 1_000


def test_both_sides_have_their_prompts_in_every_half(remote: Remote) -> None:
    def reply(path: str, body: dict[str, Any]) -> Any:
        refused = len(body["input"]) > 1 or len(body["input"][0]) > 600
        return JSONResponse({"error": {"message": "too long"}}, 413) if refused else right(path, body)

    remote.reply = reply
    model = embedder(remote, passage_prompt="passage: ", query_prompt="query: ")
    long = "one two three " * 100
    for encode, prompt in ((model.encode, "passage: "), (model.encode_queries, "query: ")):
        remote.seen.clear()
        encode([long, "short"])
        asked = [body["input"] for _, body, _ in remote.seen]
        assert all(text.startswith(prompt) for texts in asked for text in texts)
        taken = [texts[0].removeprefix(prompt) for texts in asked if len(texts) == 1 and len(texts[0]) <= 600]
        assert "".join(taken) == f"{long}short"


def test_a_text_that_is_refused_is_the_documents_fault_unless_all_are(remote: Remote) -> None:
    def reply(path: str, body: dict[str, Any]) -> Any:
        poisoned = any("poison" in text for text in body["input"])
        return JSONResponse({"error": f"no such text, {KEY}"}, 400) if poisoned else right(path, body)

    remote.reply = reply
    with pytest.raises(RefusedText, match=r"words refuses a text of it \(HTTP 400: no such text, \*\*\*\)"):
        embedder(remote).encode(["fine", "poison"])
    remote.reply = lambda path, body: JSONResponse({"message": "no model words"}, 400)
    with pytest.raises(ModelUnavailable, match=r"refuses any text \(HTTP 400: no model words\)"):
        embedder(remote).encode(["fine"])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("openai:http://host/v1", "names no model"),
        ("openai:http://host/v1#", "names no model"),
        ("openai:host/v1#m", "no http"),
        ("openai:http://host:99999/v1#m", "no http"),
        ("openai:https://user:secret@host/v1#m", "a user name, a password or a query"),
        ("openai:https://host/v1?key=secret#m", "a user name, a password or a query"),
    ],
)
def test_an_address_that_cannot_be_or_holds_a_key_is_refused(given: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as caught:
        Embedder.of(Settings(embedder=given))
    assert "secret" not in str(caught.value)


def test_an_index_is_of_the_model_and_not_of_its_host_or_key() -> None:
    one, other = (
        Settings(embedder=f"openai:{url}#e5", embedder_api_key=SecretStr(key), passage_prompt="p: ")
        for url, key in (("http://one/v1", "1"), ("https://two/v1/embeddings", "2"))
    )
    assert embedder_name(one) == embedder_name(other) == "openai:e5, passage prompt 'p: '"
    assert Embedder.of(one).name == embedder_name(one)


@pytest.mark.parametrize("key", [None, SecretStr("")])
def test_without_a_key_no_header_is_sent(key: SecretStr | None) -> None:
    remote = RemoteModel("rerank", "e5", RemoteAddress("http://host/v1", "e5"), key)
    assert "authorization" not in remote.client().headers


def test_keys_are_in_no_dump_of_the_settings() -> None:
    settings = Settings(embedder_api_key=SecretStr(KEY), rerank_api_key=SecretStr(KEY))
    assert KEY not in f"{settings!r}{settings.model_dump_json()}"
    assert {"embedder_api_key", "rerank_api_key"} <= SECRETS
    assert settings.secrets("rerank_api_key", "registry_url") == {"RAGSERVE_RERANK_API_KEY": KEY}


def scored(remote: Remote, name: str, texts: list[str], **fields: Any) -> list[float]:
    reranker = RemoteReranker(name, **{"api_key": SecretStr(KEY), "timeout_s": PATIENT.attempt_s, **fields})

    async def score() -> list[float]:
        try:
            return await reranker.score_texts("the old lighthouse", texts)
        finally:
            await reranker.close()

    return asyncio.run(score())


@pytest.mark.parametrize(("form", "calls"), [("/v1#ranker", [50, 100]), ("", [22, 32, 32, 32, 32])])
def test_both_forms_of_rerankers_score_in_batches(remote: Remote, form: str, calls: list[int]) -> None:
    texts = ["lighthouse", "soup", "the old lighthouse"] * 50
    assert scored(remote, remote.url + form, texts) == [0.1, 0.0, 0.3] * 50
    assert sorted(len(body.get("documents", body.get("texts"))) for _, body, _ in remote.seen) == calls
    path, body, headers = remote.seen[0]
    assert path == ("/v1/rerank" if form else "/rerank")
    assert body.get("model") == ("ranker" if form else None)
    assert headers["authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"results": [{"index": 0, "relevance_score": 1}]}, "1 scores for 2 passages"),
        ({"results": [{"index": 0, "relevance_score": 1}] * 2}, "numbers them otherwise"),
        ({"results": [{"index": i, "relevance_score": "x"} for i in range(2)]}, "no finite number"),
        ([{"index": 0, "score": 1}, {"index": 1}], "no finite number"),
        ([{"index": 0, "score": 1}, {"index": 1, "score": 10**400}], "no finite number"),
        ({"scores": [1, 2]}, "no list of scores"),
        (HTML, "no JSON, but text/html"),
        (JSONResponse({"error": "too many"}, 422), r"refuses the passages \(HTTP 422: too many\)"),
        (PlainTextResponse("no", 403), "refuses the API key"),
    ],
)
def test_wrong_scores_are_said(remote: Remote, answer: Any, said: str) -> None:
    remote.reply = lambda path, body: answer
    with pytest.raises(ModelUnavailable, match=f"^The remote reranker ranker .*{said}") as caught:
        scored(remote, f"{remote.url}/v1#ranker", ["a", "b"])
    assert caught.value.code == "reranker_unavailable"


def test_a_slow_reranker_is_given_up(remote: Remote) -> None:
    remote.delay_s = 600.0
    with pytest.raises(ModelUnavailable, match=r"remote did not answer within 0\.2"):
        scored(remote, remote.url, ["a"], timeout_s=0.2)


def test_without_passages_no_reranker_is_asked_and_nothing_is_learned_of_it(remote: Remote) -> None:
    remote.reply = lambda path, body: PlainTextResponse("no", 403)
    reranker = RemoteReranker(remote.url, timeout_s=PATIENT.attempt_s)

    async def score() -> None:
        for _ in range(2):
            with pytest.raises(ModelUnavailable):
                await reranker.score_texts("the old lighthouse", ["a"])
            assert await reranker.score_texts("the old lighthouse", []) == []
        await reranker.close()

    asyncio.run(score())
    assert len(remote.seen) == 1, "it rests after a failure"


def test_passages_that_are_refused_keep_nobody_else_waiting(remote: Remote) -> None:
    """One client's question may be too long for the model, which is there for the others."""
    reranker = RemoteReranker(f"{remote.url}/v1#ranker", timeout_s=PATIENT.attempt_s)
    too_long = JSONResponse({"error": "too long"}, 413)
    remote.reply = lambda path, body: too_long if len(body["query"]) > 1000 else right(path, body)

    async def score() -> None:
        with pytest.raises(ModelUnavailable, match="refuses the passages"):
            await reranker.score_texts("x" * 2000, ["a"])
        assert await reranker.score_texts("the old lighthouse", ["old"]) == [0.1]
        await reranker.close()

    asyncio.run(score())


@pytest.mark.parametrize("others", [True, False])
def test_a_model_that_answers_others_is_not_down(others: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_calls, "_REST_S", 600.0)
    model = RemoteModel("rerank", "ranker", RemoteAddress("http://127.0.0.1:9", None), None)

    async def fails() -> None:
        async with model.answering(PATIENT.attempt_s):
            if others:
                async with model.answering(PATIENT.attempt_s):
                    pass
            raise model.failed("is slow")

    async def succeeds() -> None:
        async with model.answering(PATIENT.attempt_s):
            pass

    with pytest.raises(ModelUnavailable, match="is slow"):
        asyncio.run(fails())
    if others:
        asyncio.run(succeeds())
    else:
        with pytest.raises(ModelUnavailable, match="is slow"):
            asyncio.run(succeeds())


def test_requests_name_a_remote_reranker_by_its_model() -> None:
    assert public_name("https://host/v1#org/ranker") == "org/ranker"
    assert public_name("https://host") == "remote"
    assert public_name("org/ranker") == "org/ranker"
