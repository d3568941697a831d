"""Errors of the clients, and what is sent again, against a server that answers what it is told to."""

from __future__ import annotations

import inspect
import itertools
import math
from asyncio import to_thread
from types import SimpleNamespace
from typing import Any

import pytest

from ragserve import errors
from ragserve.api.errors import UnsupportedMediaType
from ragserve.api.schemas import QueryRequest, RetrieveRequest
from ragserve.client import AsyncClient, Client, connections, failures
from ragserve.client.arguments import QueryArguments, RetrieveArguments
from tests.unit.client.either import both, opened
from tests.unit.client.scripted_http import LOST, SILENT, ScriptedHttp

NAMESPACES = (200, {"namespaces": []})
JOB = {
    "job_id": "j",
    "kind": "upload",
    "namespace": "n",
    "counts": {"indexed": 1},
    "n_items": 1,
    "chunks": 1,
    "tokens": 5,
    "size_bytes": 9,
    "cancel_requested": False,
    "error": None,
    "created_at": 1.0,
    "updated_at": 2.0,
    "items": [],
    "next": None,
}


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "_FIRST_PAUSE_S", 0.0)


@pytest.mark.parametrize(
    "sent",
    [
        errors.InvalidRequest("No.", hint="Try k=1.", param="k"),
        errors.Unauthorized("Wrong key."),
        errors.NotFound("No namespace 'x'.", code="namespace_not_found"),
        errors.Conflict("Other embedder."),
        errors.TooManyRequests("Full.", hint="Later."),
        errors.Unavailable("Starting."),
        errors.UnsupportedDocument("An image."),
        errors.PromptTooLong("Too long."),
        errors.DocumentsTooLong("Too long."),
        errors.Forbidden("Another page."),
    ],
    ids=lambda error: type(error).__name__,
)
def test_the_servers_errors_come_back_whole(scripted: ScriptedHttp, sent: errors.RagserveError) -> None:
    scripted.answers.append((sent.status, sent.body("r1"), {"Retry-After": "7"}))
    with Client(scripted.url, retries=0) as client, pytest.raises(type(sent)) as raised:
        client.retrieve("q", k=1)
    got = raised.value
    assert (got.message, got.hint, got.code, got.param) == (sent.message, sent.hint, sent.code, sent.param)
    assert got.request_id == "r1"
    assert not isinstance(got, errors.TooManyRequests) or got.retry_after_s == 7


def test_a_wrong_content_type_is_not_a_wrong_document(scripted: ScriptedHttp) -> None:
    """Both are 415; only the code tells them apart."""
    wrong = UnsupportedMediaType("This route takes JSON.")
    scripted.answers += [(wrong.status, wrong.body("r1")), (415, b"<html>no</html>")]
    with Client(scripted.url) as client:
        for _ in range(2):
            with pytest.raises(errors.InvalidRequest) as raised:
                client.info()
            assert not isinstance(raised.value, errors.UnsupportedDocument)


@both
def test_errors_of_other_servers(scripted: ScriptedHttp, kind: str) -> None:
    scripted.answers += [
        *((404, b"<html>nothing</html>"), (500, b"oops"), (200, b"<html>hello</html>"), (200, {"a": 1})),
        (200, b'{"\xff": 1}'),
    ]
    with opened(kind, scripted.url) as client:
        with pytest.raises(errors.NotFound, match="answered 404"):
            client.info()
        with pytest.raises(errors.RagserveError, match="oops"):
            client.info()
        for _ in range(2):
            with pytest.raises(errors.Unavailable, match="ragserve server"):
                client.info()
        with pytest.raises(errors.Unavailable, match="ragserve server"):
            client.call("GET", "/info")


@both
def test_no_server(scripted: ScriptedHttp, kind: str) -> None:
    scripted.server.socket.close()
    with opened(kind, scripted.url) as client, pytest.raises(errors.Unavailable, match="running there"):
        client.info()
    with pytest.raises(errors.InvalidRequest, match="not a URL"), opened(kind, "http://127.0.0.1:port"):
        pytest.fail("no such port")


@both
def test_what_is_sent_again(scripted: ScriptedHttp, kind: str) -> None:
    """Reads are, after 503 and a lost connection; what changes something is only where it was refused."""
    text = [{"name": "a", "text": "b"}]
    full, starting = errors.TooManyRequests("Full."), errors.Unavailable("Starting.")
    with opened(kind, scripted.url) as client:
        scripted.answers += [LOST, (503, starting.body()), NAMESPACES]
        assert client.namespaces() == []
        assert len(scripted.seen) == 3

        scripted.answers += [(429, full.body(), {"Retry-After": "0"}), (202, {**JOB, "state": "queued"})]
        assert client.ingest_texts(text).job_id == "j"
        assert len(scripted.seen) == 5

        scripted.answers += [LOST, (503, starting.body())]
        for _ in range(2):
            with pytest.raises(errors.Unavailable):
                client.ingest_texts(text)
        assert len(scripted.seen) == 7

        scripted.answers += [(503, starting.body())] * 3
        with pytest.raises(errors.Unavailable, match="Starting"):
            client.retrieve("q")
        assert len(scripted.seen) == 10, "twice again, and no more"

        scripted.answers.append((429, full.body(), {"Retry-After": "31"}))
        with pytest.raises(errors.TooManyRequests):
            client.namespaces()
        assert len(scripted.seen) == 11, "the server asks for too much patience"


@both
def test_a_turn_of_a_session_is_asked_once(scripted: ScriptedHttp, kind: str) -> None:
    """One whose answer was lost may be in the dialogue, and a new session may have begun."""
    with opened(kind, scripted.url) as client:
        for count, session in enumerate(("new", "s"), 1):
            scripted.answers.append(LOST)
            with pytest.raises(errors.Unavailable):
                client.query("q", session=session)
            assert len(scripted.seen) == count
        scripted.answers += [LOST] * 3
        with pytest.raises(errors.Unavailable):
            client.query("q")
        assert len(scripted.seen) == 5, "without a session, twice again"


@both
def test_files_are_whole_when_they_are_sent_again(scripted: ScriptedHttp, kind: str, tmp_path: Any) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"Some words.")
    scripted.answers += [(429, {}), (202, {**JOB, "state": "queued"})]
    with opened(kind, scripted.url) as client:
        client.ingest_files([path])
    assert [body.count(b"Some words.") for *_, body in scripted.seen] == [1, 1]


@both
def test_a_timeout_is_not_tried_again(scripted: ScriptedHttp, kind: str) -> None:
    scripted.answers.append(SILENT)
    with opened(kind, scripted.url, timeout_s=2) as client, pytest.raises(errors.Unavailable) as raised:
        client.query("q")
    assert raised.value.code == "timeout"
    assert len(scripted.seen) == 1


@both
def test_fields_left_out_are_the_servers_to_choose(scripted: ScriptedHttp, kind: str) -> None:
    found = {
        "results": [{"index": 1, "title": "t", "text": "x", "metadata": {"lang": "en"}}],
        "namespace": "n",
        "retrieval": "dense",
        "searched_for": None,
        "reranking": None,
        "index_version": 1,
        "timings": {"total_ms": 1.0},
        "request_id": "r",
        "of_a_newer_server": 1,
    }
    scripted.answers.append((200, found))
    with opened(kind, scripted.url + "/", api_key="secret") as client:
        [passage] = client.retrieve("why?", namespace="n", k=None, filter=None).results
    assert scripted.seen == [("POST", "/rag/retrieve", "Bearer secret", {"query": "why?", "namespace": "n"})]
    assert (passage.text, passage.metadata) == ("x", {"lang": "en"})


@both
def test_waiting_for_a_job(scripted: ScriptedHttp, kind: str) -> None:
    scripted.answers += [(200, {**JOB, "state": "running"}), (200, {**JOB, "state": "done"})]
    seen: list[str] = []
    with opened(kind, scripted.url) as client:
        assert client.wait("j", on_progress=lambda now: seen.append(now.state)).counts == {"indexed": 1}
        assert seen == ["running", "done"]
        scripted.answers.append((200, {**JOB, "state": "failed", "error": "disk full"}))
        with pytest.raises(errors.Unavailable, match="disk full"):
            client.wait("j")
        scripted.answers.append((200, {**JOB, "state": "queued"}))
        with pytest.raises(errors.Unavailable, match="still queued"):
            client.wait("j", timeout_s=-1)


@both
def test_waiting_goes_on_while_the_server_is_restarted(scripted: ScriptedHttp, kind: str) -> None:
    away: list[Any] = [LOST, (503, errors.Unavailable("Not ready.").body()), (502, b"Bad Gateway")]
    scripted.answers += [
        *away[:1],
        (200, {**JOB, "state": "running"}),
        *away[1:],
        (200, {**JOB, "state": "done"}),
    ]
    with opened(kind, scripted.url, retries=0) as client:
        assert client.wait("j").state == "done"
        assert scripted.answers == []
        for answer, kind_of in zip(
            away, (errors.Unavailable, errors.Unavailable, errors.EngineError), strict=True
        ):
            scripted.answers.append(answer)
            with pytest.raises(kind_of):
                client.wait("j", timeout_s=-1)
        for status, kind_of in (
            (404, errors.NotFound),
            (401, errors.Unauthorized),
            (200, errors.Unavailable),
        ):
            scripted.answers.append((status, {}))
            with pytest.raises(kind_of):
                client.wait("j")
    with opened(kind, "htp://nowhere") as client, pytest.raises(errors.Unavailable):
        client.wait("j")


class Clock:
    """The time of `connections`, in which only its pauses take time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.pauses: list[float] = []
        monkeypatch.setattr(
            connections, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.pause)
        )
        monkeypatch.setattr(
            connections, "asyncio", SimpleNamespace(sleep=self.pause_async, to_thread=to_thread)
        )

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    async def pause_async(self, seconds: float) -> None:
        self.pause(seconds)


@both
def test_waiting_goes_on_when_a_keys_rate_is_used_up(
    scripted: ScriptedHttp, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    full = (429, errors.TooManyRequests("Full.").body(), {"Retry-After": "7"})
    scripted.answers += [full] * 5 + [(200, {**JOB, "state": "done"})]
    with opened(kind, scripted.url, retries=0) as client:
        assert client.wait("j").state == "done"
        assert clock.pauses == [7] * 5
        scripted.answers.append(full)
        with pytest.raises(errors.TooManyRequests):
            client.wait("j", timeout_s=5)


@both
def test_waiting_leaves_a_keys_rate_to_others(
    scripted: ScriptedHttp, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    scripted.answers += [(200, {**JOB, "state": "running"})] * 1000
    with opened(kind, scripted.url) as client, pytest.raises(errors.Unavailable, match="still running"):
        client.wait("j", timeout_s=600)
    assert clock.pauses[0] == 0.2
    assert max(clock.pauses) == 5
    ends = list(itertools.accumulate(clock.pauses))
    assert all(pause <= 0.2 + 0.1 * end for pause, end in zip(clock.pauses, ends, strict=True))
    assert sum(end <= 60 for end in ends) < 40
    assert sum(60 < end <= 120 for end in ends) <= 12


@both
def test_waiting_ends_where_the_server_never_comes_back(
    scripted: ScriptedHttp, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    away = (503, errors.Unavailable("Not ready.").body())
    scripted.answers += [*[away] * 500, (200, {**JOB, "state": "running"}), *[away] * 1000]
    with opened(kind, scripted.url, retries=0) as client, pytest.raises(errors.Unavailable, match="ready"):
        client.wait("j", timeout_s=math.inf)
    assert 3600 < clock.now < 2 * 3600 + 10, "an hour from its last answer"
    assert len(scripted.answers) < 1000


def test_ids_are_quoted(scripted: ScriptedHttp) -> None:
    scripted.answers.append((404, errors.NotFound("No.").body()))
    with Client(scripted.url) as client, pytest.raises(errors.NotFound):
        client.document("../jobs/ä?x", "n")
    assert scripted.seen[0][1] == "/rag/documents/..%2Fjobs%2F%C3%A4%3Fx?namespace=n"


@both
@pytest.mark.parametrize(
    ("method", "arguments", "fields"),
    [
        ("query", ["caf\udce9?"], {}),
        ("ingest_texts", [[{"name": "a", "text": "caf\udce9?"}]], {"namespace": "n"}),
        ("ingest_files", [[("a", b"x")]], {"namespace": "caf\udce9?"}),
        ("documents", ["n"], {"source_prefix": "caf\udce9?"}),
        ("document", ["caf\udce9?", "n"], {}),
        ("call", ["GET", "/caf\udce9?"], {}),
    ],
)
def test_text_that_is_not_utf8_is_not_sent(
    scripted: ScriptedHttp, kind: str, method: str, arguments: list[Any], fields: dict[str, Any]
) -> None:
    with opened(kind, scripted.url) as client:
        with pytest.raises(errors.InvalidRequest, match=r"not UTF-8: .*\\udce9") as raised:
            list(getattr(client, method)(*arguments, **fields))
        assert scripted.seen == []
    assert len(raised.value.message) < 120, "not the whole body"


@both
def test_a_key_that_no_header_can_hold_is_not_shown(kind: str) -> None:
    with (
        pytest.raises(errors.InvalidRequest, match="API key") as raised,
        opened(kind, "http://h", api_key="sécret"),
    ):
        pass
    assert "é" not in str(raised.value)


def test_the_arguments_are_the_servers_fields() -> None:
    assert set(QueryArguments.__annotations__) == set(QueryRequest.model_fields) - {"query", "stream"}
    assert set(RetrieveArguments.__annotations__) == set(RetrieveRequest.model_fields) - {"query"}


def test_both_clients_have_the_same_methods() -> None:
    sync, waiting = (
        {name: value for name, value in inspect.getmembers(kind, callable) if not name.startswith("_")}
        for kind in (Client, AsyncClient)
    )
    assert sync.keys() == waiting.keys()
    for name in sync.keys() - {"stream"}:  # it returns a generator of each kind
        one, other = inspect.signature(sync[name]), inspect.signature(waiting[name])
        assert list(one.parameters) == list(other.parameters), name
        assert sync[name].__doc__, name


def test_a_message_ends_before_its_hint_begins() -> None:
    """It may be that of another library."""
    said = [str(errors.InvalidRequest(message, hint="Give one.")) for message in ("No file: x", "None.", "")]
    assert said == ["No file: x. Give one.", "None. Give one.", "Give one."]
