"""Both clients against the product's app, with a scripted model."""

from __future__ import annotations

import asyncio
import re
from contextlib import aclosing, closing
from pathlib import Path

import pytest

from ragserve import errors
from ragserve.client import Answer, AsyncClient, Client, DoneEvent, MessageEvent, SearchResults, calls
from tests.unit.api.scripted_server import DOCUMENTS, Live, eventually
from tests.unit.client.either import both, opened
from tests.unit.client.scripted_http import ScriptedHttp

REPO = Path(__file__).resolve().parents[3]

QUESTION = "Who built the lighthouse of Skerryvore?"
ASIDE = "Leeks\u2028potatoes\u0085and\u001ccream are for the soup."  # what str.splitlines would cut


@both
def test_texts_are_ingested_found_and_removed(live: Live, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_PAGE", 1)
    space = f"texts-{kind}"
    texts = [{"name": name, "text": text, "metadata": {"shelf": 3}} for name, text in DOCUMENTS.items()]
    with opened(kind, live.url) as client:
        job = client.ingest_texts(texts, namespace=space)
        assert client.wait(job).counts["indexed"] == 3
        assert [each.job_id for each in client.jobs(namespace=space, state="done")] == [job.job_id]
        assert {item.source for item in client.job_items(job.job_id)} == set(DOCUMENTS)
        assert client.cancel_job(job.job_id).state == "done"

        listed = list(client.documents(space))
        assert {document.source for document in listed} == set(DOCUMENTS)
        soup = next(document for document in listed if document.source == "soup")
        assert [each.source for each in client.documents(space, source_prefix="so")] == ["soup"]
        none = {"op": "eq", "field": "shelf", "value": 4}
        assert list(client.documents(space, filter=none)) == []
        assert client.document(soup.doc_id, space) == soup
        assert [chunk.text for chunk in client.chunks(soup.doc_id, space)] == [DOCUMENTS["soup"]]

        found = client.retrieve(QUESTION, namespace=space, k=2)
        assert (len(found.results), found.results[0].source) == (2, "skerryvore")
        assert found.results[0].metadata["shelf"] == 3
        answer = client.query(QUESTION, namespace=space, strategy="full", max_new_tokens=9)
        assert (answer.answer, answer.citations[0].source) == ("Alan Stevenson [1].", "skerryvore")
        assert live.engine.requests[-1].sampling.max_new_tokens == 9

        assert client.remove_document(soup.doc_id, space) == soup
        assert client.namespace(space).n_documents == 2
        assert space in [each.name for each in client.namespaces()]
        client.drop_namespace(space)
        with pytest.raises(errors.NotFound) as raised:
            client.namespace(space)
        assert raised.value.code == "namespace_not_found"
        assert raised.value.request_id
        with pytest.raises(errors.InvalidRequest, match="document cache"):
            client.warm(space)
        assert client.info().embedder["name"] == "words"


def test_files_and_pages_are_ingested(live: Live, tmp_path: Path) -> None:
    path = tmp_path / "bell.txt"
    path.write_text(DOCUMENTS["bell"], encoding="utf-8")
    url, fields = f"{live.url}/info", {"namespace": "files", "metadata": {"shelf": 3}}
    with opened("threads", live.url) as client, opened("asyncio", live.url) as waiting:
        jobs = [
            client.ingest_files([path, ("isles/skerryvore.md", DOCUMENTS["skerryvore"].encode())], **fields),
            waiting.ingest_files([("again.txt", path)], **fields),
        ]
        for job in jobs:
            client.wait(job)
        for each in (client, waiting):
            refused = client.wait(each.ingest_urls([url], namespace="files", sitemap=False, prune=True))
            assert [(item.source, item.state) for item in refused.items] == [(url, "failed")]
            assert "RAGSERVE_URL_INGESTION" in str(refused.items[0].reason), (
                "an address of the server's own machine"
            )
        found = {document.source: document for document in client.documents("files")}
        assert set(found) == {"bell.txt", "isles/skerryvore.md", "again.txt"}
        assert found["again.txt"].metadata["shelf"] == 3


@both
def test_a_stream_has_typed_events(live: Live, docs: str, kind: str) -> None:
    live.index("asides", {"aside": ASIDE})
    with opened(kind, live.url) as client:
        events = list(client.stream("What is for the soup?", namespace="asides"))
        answer = client.query("What is for the soup?", namespace="asides")
    assert isinstance(events[0], SearchResults)
    assert events[0].results[0].text == ASIDE
    assert "".join(each.text for each in events if isinstance(each, MessageEvent)) == answer.answer
    assert isinstance(events[-2], Answer)
    assert (events[-2].answer, isinstance(events[-1], DoneEvent)) == (answer.answer, True)


@both
def test_an_error_in_a_stream_is_raised(live: Live, docs: str, kind: str) -> None:
    live.engine.error, live.engine.error_after = errors.EngineError("It failed.", hint="Look at it."), 1
    with opened(kind, live.url) as client:
        with pytest.raises(errors.EngineError) as raised:
            list(client.stream(QUESTION, namespace=docs))
        assert (raised.value.message, raised.value.hint) == ("It failed.", "Look at it.")
        with pytest.raises(errors.NotFound):
            list(client.stream(QUESTION, namespace="nowhere"))


@both
def test_a_stream_that_is_cut_is_no_answer(scripted: ScriptedHttp, kind: str) -> None:
    scripted.answers.append(
        (200, b': comment\n\nevent: later\ndata: {}\n\nevent: message\ndata: {"text":"A"}\n\n')
    )
    with opened(kind, scripted.url) as client, pytest.raises(errors.Unavailable, match="before the answer"):
        list(client.stream(QUESTION))


def test_the_documented_code_runs(live: Live, capsys: pytest.CaptureFixture[str]) -> None:
    text = (REPO / "docs" / "clients.md").read_text(encoding="utf-8")
    text, _, chats = text.partition("## Chats of OpenAI's API")  # which need a model of their own
    for code in re.findall(r"```python\n(.*?)```", chats, re.DOTALL):
        compile(code, "docs/clients.md", "exec")
    one, other = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    for code in (one, other):
        code = code.replace("http://127.0.0.1:30000", live.url).replace("norway.html", "iceland.md")
        exec(compile(code.replace("examples/", f"{REPO}/examples/"), "docs/clients.md", "exec"), {})
    said = capsys.readouterr().out
    assert said.startswith("2 indexed\n")
    assert "Alan Stevenson [1].\n" in said
    assert "namespace_not_found: There is no namespace 'nowhere'" in said
    assert "['Alan Stevenson [1].', 'Alan Stevenson [1].']" in said
    assert "'Iceland'" in said


def test_closing_a_stream_aborts_the_answer(live: Live, docs: str) -> None:
    live.engine.hold.clear()

    async def leave() -> None:
        async with (
            AsyncClient(live.url) as client,
            aclosing(client.stream(QUESTION, namespace=docs)) as events,
        ):
            async for event in events:
                if isinstance(event, MessageEvent):
                    return

    asyncio.run(leave())
    with Client(live.url) as client, closing(client.stream(QUESTION, namespace=docs)) as events:
        next(event for event in events if isinstance(event, MessageEvent))
    eventually(lambda: len(live.engine.aborted) == 2, "both are aborted")
