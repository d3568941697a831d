"""Documents of earlier versions are embedded again in place: whole ones, one version at a time."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from ragserve.commands import docs
from ragserve.errors import Conflict, NotFound, StorageFull
from ragserve.ingest import reembed as reembedding
from ragserve.ingest.chunk_embedding import embedding_text
from ragserve.ingest.jobs import lease
from ragserve.ingest.jobs.job_report import JobReport, Progress
from ragserve.ingest.reembed import reembed, submit_reembed
from ragserve.retrieval.embedder import Embedder
from ragserve.retrieval.remote_embedder import RefusedText
from ragserve_index import IndexStore, JobStore
from ragserve_index.chunk_changes import NewText
from ragserve_index.evictions import EvictionLog
from ragserve_index.types import Document, NewChunk, NewDocument
from tests.unit.index.index_samples import assert_clean, vectors_of

DIM = 16
NAMES = ("a", "b", "c", "d")


class NewEdition:
    """An embedder that gives a text the vector of that text; ``before`` is called with each batch."""

    name, dim = "e", DIM

    def __init__(self, before: Callable[[Sequence[str]], object] = lambda texts: None) -> None:
        self.before = before
        self.batches = 0

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        self.before(texts)
        self.batches += 1
        return np.concatenate([vectors_of("new", text) for text in texts])


def old(name: str, edition: int = 0) -> tuple[NewDocument, list[NewChunk], np.ndarray]:
    """A document of two chunks without sentences, with vectors of something else."""
    texts = [f"{name}{edition} says one thing. And it says quite another thing after that. " * 3, f"{name}."]
    chunks = [NewChunk(text, 300 * i, 300 * i + len(text), 40, page=i + 1) for i, text in enumerate(texts)]
    document = NewDocument(name, f"Title {name}", f"hash{edition}", "text/plain", 99, {"tags": ["x", name]})
    return document, chunks, vectors_of("old", name, n=2)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with documents of an earlier version."""
    monkeypatch.setattr(reembedding, "_BATCH_CHUNKS", 4)  # two documents
    with IndexStore(tmp_path) as store:
        for namespace in ("n", "other"):
            store.ensure_namespace(namespace, embedder="e", dim=DIM)
            store.replace_documents(namespace, map(old, NAMES))
    return tmp_path


@pytest.fixture
def store(data: Path) -> Iterator[IndexStore]:
    with IndexStore(data) as store:
        yield store


def run(store: IndexStore, embedder: NewEdition, *, sentence_bytes: int = 64) -> JobReport:
    return reembed(store, embedder, submit_reembed(store, "n", sentence_bytes).job_id)


def is_new(store: IndexStore, document: Document, namespace: str = "n") -> bool:
    """Whether all of a document has the vectors of its texts, and its sentences. Asserts that all or nothing
    of it has."""
    chunks = store.document_chunks(namespace, document.doc_id)
    ids = [chunk.chunk_id for chunk in chunks]
    wanted = [vectors_of("new", embedding_text(document.title, chunk.text))[0] for chunk in chunks]
    found = [store.search(namespace, vector[None], 1).hits[0][0] for vector in wanted]
    new = {hit.chunk.chunk_id in ids and hit.score > 0.99 for hit in found}
    sentences = store.sentence_vectors(namespace, ids)
    new.add(len(sentences) == len(ids)) if sentences else new.add(False)
    (agreed,) = new
    return agreed


def test_passages_and_sentences_are_embedded_and_the_rest_stays(store: IndexStore) -> None:
    before = {document.source: document for document in store.documents("n")}
    texts = {name: [c.text for c in store.document_chunks("n", d.doc_id)] for name, d in before.items()}
    report = run(store, NewEdition())
    assert (report.state, report.progress.indexed, report.progress.chunks) == ("done", 4, 8)
    for document in store.documents("n"):
        assert is_new(store, document)
        was = before[document.source]
        assert replace(document, updated_at=0) == replace(was, updated_at=0)
        chunks = store.document_chunks("n", document.doc_id)
        assert [chunk.text for chunk in chunks] == texts[document.source]
        assert [chunk.page for chunk in chunks] == [1, 2]
        stored = store.sentence_vectors("n", [chunks[0].chunk_id])[chunks[0].chunk_id]
        first = chunks[0].text[: int(stored.starts[1])]
        assert stored.scores(vectors_of("new", first)[0])[0] == pytest.approx(1, abs=0.02)
    assert not any(is_new(store, document, "other") for document in store.documents("other"))
    assert len(EvictionLog(store.database)) == 0, "the same texts: their KV stays cached"
    assert_clean(store)


def test_without_a_budget_there_are_no_sentences(store: IndexStore) -> None:
    assert run(store, NewEdition(), sentence_bytes=0).state == "done"
    ids = [c.chunk_id for d in store.documents("n") for c in store.document_chunks("n", d.doc_id)]
    assert store.sentence_vectors("n", ids) == {}


def test_what_changes_meanwhile_is_left_as_it_is(store: IndexStore) -> None:
    """Another process ingests a document again and removes one while both are being embedded."""

    def change(texts: Sequence[str]) -> None:
        if any(text.startswith("Title b") for text in texts) and not changed:
            changed.append(store.replace_documents("n", [old("b", 1)])[0])
            removed = store.find_source("n", "a" if "Title a" in str(texts) else "d")
            assert removed is not None
            changed.append(store.remove_document("n", removed.doc_id))

    changed: list[Document] = []
    report = run(store, NewEdition(change))
    newer, removed = changed
    assert report.state == "done"
    assert sorted(source for source, _ in report.failures) == sorted(["b", removed.source])
    kept = store.find_source("n", "b")
    assert kept == newer
    assert not is_new(store, newer)
    assert store.find_source("n", removed.source) is None
    left = [document for document in store.documents("n") if document.source != "b"]
    assert len(left) == 2
    assert all(is_new(store, document) for document in left)
    assert_clean(store)


def test_a_text_that_a_remote_model_refuses_costs_its_document_only(store: IndexStore) -> None:
    def refuse(texts: Sequence[str]) -> None:
        if any(text.startswith("Title b") for text in texts):
            raise RefusedText("too odd")

    report = run(store, NewEdition(refuse))
    assert (report.state, report.progress.indexed, report.progress.failed) == ("done", 3, 1)
    assert report.failures == (("b", "could not be embedded: too odd"),)
    assert [each.source for each in store.documents("n") if not is_new(store, each)] == ["b"]
    assert_clean(store)


def killed_at(batch: int, data_dir: Path) -> None:
    """Fork a process that embeds again and is killed when it embeds the given batch."""
    child = os.fork()
    if child == 0:
        embedder = NewEdition(
            lambda texts: os.kill(os.getpid(), signal.SIGKILL) if embedder.batches == batch else None
        )
        lease.LEASE_S = 0.0  # the next run need not wait for it
        with IndexStore(data_dir) as store:
            run(store, embedder)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


def test_a_killed_run_leaves_whole_documents_and_goes_on(data: Path) -> None:
    killed_at(1, data)
    with IndexStore(data) as store:
        assert_clean(store)
        done = [document for document in store.documents("n") if is_new(store, document)]
        assert len(done) == 2
    killed_at(0, data)
    with IndexStore(data) as store:
        (job,) = [job for job in JobStore(store).list("n") if job.kind == "reembed"]
        assert job.counts["pending"] == 2
        embedder = NewEdition()
        report = run(store, embedder)
        assert (report.job_id, report.state, report.progress.done) == (job.job_id, "done", 4)
        assert embedder.batches == 1, "what was done is not done again"
        assert all(is_new(store, document) for document in store.documents("n"))
        assert all(store.find_source("n", document.source) == document for document in done)
        assert_clean(store)
        assert submit_reembed(store, "n", 64).job_id != job.job_id, "the next run does everything"


def test_another_embedder_and_another_namespace_are_refused(store: IndexStore) -> None:
    job_id = submit_reembed(store, "n", 64).job_id
    other = NewEdition()
    other.name = "f"
    with pytest.raises(Conflict, match="holds vectors of e, not of f"):
        reembed(store, other, job_id)
    with pytest.raises(NotFound):
        submit_reembed(store, "nobody", 64)


def test_the_command_reports(data: Path, store: IndexStore, monkeypatch: pytest.MonkeyPatch) -> None:
    app = typer.Typer()
    docs.register(app)
    monkeypatch.setattr(Embedder, "of", lambda settings: NewEdition())
    here = ["--data-dir", str(data)]
    ran = CliRunner().invoke(app, ["docs", "reembed", "n", "--doc", "a", "--json", *here])
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.output)["files"]["indexed"] == 1
    assert [is_new(store, document) for document in store.documents("n")].count(True) == 1
    ran = CliRunner().invoke(app, ["docs", "reembed", "n", *here])
    assert "namespace n: done" in ran.output
    assert all(is_new(store, document) for document in store.documents("n"))


def test_a_command_whose_job_is_cancelled_has_failed(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cancelled(_store: IndexStore, _embedder: Embedder, job_id: str, **_: object) -> JobReport:
        return JobReport(job_id, "n", "cancelled", 0.0, Progress())

    app = typer.Typer()
    docs.register(app)
    monkeypatch.setattr(Embedder, "of", lambda settings: NewEdition())
    monkeypatch.setattr(reembedding, "reembed", cancelled)
    ran = CliRunner().invoke(app, ["docs", "reembed", "n", "--data-dir", str(data)])
    assert "namespace n: cancelled" in ran.output
    assert ran.exit_code == 3


def test_what_was_embedded_before_an_error_is_audited(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_texts: Sequence[str]) -> None:
        embedder.before = full

    def full(_texts: Sequence[str]) -> None:
        raise StorageFull("The disk is full.")

    embedder = NewEdition(fail)
    app = typer.Typer()
    docs.register(app)
    monkeypatch.setattr(Embedder, "of", lambda settings: embedder)
    ran = CliRunner().invoke(app, ["docs", "reembed", "n", "--data-dir", str(data)])
    assert isinstance(ran.exception, StorageFull)
    told = json.loads((data / "audit" / "audit.jsonl").read_text())
    assert (told["result"], told["documents"]) == ("failed", 2)


def test_corrections_stay_and_are_embedded_again(store: IndexStore) -> None:
    (document,) = (each for each in store.documents("n") if each.source == "a")
    seen = [state.version for state in store.chunk_changes.states("n", document.doc_id)]
    edit = NewText("An edited text. " * 5, 20, vectors_of("before")[0])
    store.chunk_changes.change("n", document.doc_id, 0, seen[0], text=edit)
    store.chunk_changes.change("n", document.doc_id, 1, seen[1], disabled=True)
    assert run(store, NewEdition()).progress.indexed == 4
    (chunk,) = store.document_chunks("n", document.doc_id)
    assert (chunk.text, chunk.edited) == (edit.text, True)
    assert is_new(store, store.document("n", document.doc_id))
    assert store.chunk_changes.states("n", document.doc_id)[1].disabled
    assert store.chunk_changes.lost("n", [document.doc_id]) == {}
    assert_clean(store)
