"""A namespace that is dropped while jobs write to it stays dropped, and one made again is another."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ragserve.config import Settings
from ragserve.errors import Conflict, NotFound
from ragserve.ingest.file_planner import FilePlanner
from ragserve.ingest.ingestor import Ingestor
from ragserve.ingest.submissions import SubmittedText, Upload
from ragserve_index import IndexStore
from ragserve_index.types import NewChunk, NewDocument
from ragserve_index.viewers import UNLABELLED
from tests.unit.ingest.test_attachments import message

DIM = 4


class Meanwhile:
    """An embedder; ``then`` is what happens once while it embeds, before the documents are written."""

    name, dim = "meanwhile", DIM

    def __init__(self) -> None:
        self.then: Callable[[], object] = lambda: None

    def encode(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        then, self.then = self.then, lambda: None
        then()
        return np.eye(1, DIM, dtype=np.float32).repeat(len(texts), axis=0)


@pytest.fixture
def meanwhile() -> Meanwhile:
    return Meanwhile()


@pytest.fixture
def writer(settings: Settings, store: IndexStore, meanwhile: Meanwhile) -> Ingestor:
    """An ingestor, and documents with a label in the namespace."""
    found = Ingestor(settings, store, meanwhile)
    texts = [SubmittedText(name, f"first words of {name}", labels=("hr",)) for name in ("a", "b")]
    found.run(found.submit_texts("lab", texts).job_id)
    return found


def again(*names: str) -> list[SubmittedText]:
    return [SubmittedText(name, f"second words of {name}") for name in names]


def sources(store: IndexStore, namespace: str = "lab") -> list[str]:
    return sorted(document.source for document in store.documents(namespace))


def seen_by_all(store: IndexStore) -> list[str]:
    return sources(store.seen_by(UNLABELLED))


def made_again(store: IndexStore, embedder: str = "meanwhile") -> None:
    store.drop_namespace("lab")
    store.ensure_namespace("lab", embedder=embedder, dim=DIM)
    document = NewDocument("theirs", "theirs", "0", "text/plain", 1)
    store.replace_documents("lab", [(document, [NewChunk("theirs", 0, 6, 1)], np.eye(1, DIM))])


@pytest.mark.parametrize("once_more", [False, True], ids=["dropped", "made again"])
def test_a_running_job_does_not_bring_it_back(
    writer: Ingestor, store: IndexStore, meanwhile: Meanwhile, once_more: bool
) -> None:
    meanwhile.then = lambda: made_again(store) if once_more else store.drop_namespace("lab")
    job = writer.submit_texts("lab", again("a", "b", "c"))
    assert writer.run(job.job_id).state == "cancelled"
    assert writer.jobs.get(job.job_id).counts["indexed"] == 0
    if once_more:
        assert sources(store) == ["theirs"]
    else:
        with pytest.raises(NotFound):
            store.namespace("lab")


@pytest.mark.parametrize("embedder", ["meanwhile", "another"])
def test_a_batch_that_waits_to_be_written_is_not(
    writer: Ingestor, store: IndexStore, monkeypatch: pytest.MonkeyPatch, embedder: str
) -> None:
    prepare = writer.editor.prepare

    def made_again_meanwhile(namespace: str, *given: Any) -> Any:
        found = prepare(namespace, *given)
        made_again(store, embedder)
        return found

    monkeypatch.setattr(writer.editor, "prepare", made_again_meanwhile)
    assert writer.run(writer.submit_texts("lab", again("a", "c")).job_id).state == "cancelled"
    assert sources(store) == ["theirs"]


def test_labels_are_for_the_documents_of_before(
    writer: Ingestor, store: IndexStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may have made the namespace again, with the same text for fewer eyes."""
    relabel, before = FilePlanner.relabel, store.find_source("lab", "a")
    assert before is not None

    def made_again_meanwhile(*given: Any) -> None:
        made_again(store)
        document = NewDocument("a", "a", before.content_hash, "text/plain", 1, labels=("hr",))
        store.replace_documents("lab", [(document, [NewChunk("a", 0, 1, 1)], np.eye(1, DIM))])
        relabel(*given)

    monkeypatch.setattr(FilePlanner, "relabel", made_again_meanwhile)
    writer.run(writer.submit_texts("lab", [SubmittedText("a", "first words of a", labels=())]).job_id)
    assert seen_by_all(store) == ["theirs"]


def test_waiting_jobs_end_with_it_and_new_ones_begin_afresh(writer: Ingestor, store: IndexStore) -> None:
    waiting = writer.submit_texts("lab", again("a"))
    died = writer.submit_texts("lab", again("b"))
    assert writer.jobs.claim("a server that dies", -1.0, died.job_id) is not None
    other = writer.submit_texts("other", again("a"))
    store.drop_namespace("lab")
    for job in (waiting, died):
        assert writer.jobs.get(job.job_id).state == "cancelled"
        with pytest.raises(Conflict):
            writer.run(job.job_id)
    assert writer.run(other.job_id).state == "done"
    with pytest.raises(NotFound):
        store.namespace("lab")
    assert writer.run(writer.submit_texts("lab", again("c")).job_id).state == "done"
    assert (sources(store), sources(store, "other")) == (["c"], ["a"])


def test_a_first_job_that_was_cancelled_makes_no_namespace(
    writer: Ingestor, store: IndexStore, meanwhile: Meanwhile
) -> None:
    job = writer.submit_texts("new", again("a"))
    meanwhile.then = lambda: writer.jobs.request_cancel(job.job_id)
    assert writer.run(job.job_id).state == "cancelled"
    with pytest.raises(NotFound):
        store.namespace("new")


def test_a_document_removed_meanwhile_comes_back_with_its_labels(
    writer: Ingestor, store: IndexStore, meanwhile: Meanwhile
) -> None:
    """Its file says nothing about labels, so that they stay; with none, every key would see it."""
    found = store.find_source("lab", "a")
    assert found is not None
    meanwhile.then = lambda: store.remove_document("lab", found.doc_id)
    assert writer.run(writer.submit_texts("lab", again("a", "c")).job_id).progress.indexed == 2
    assert seen_by_all(store) == ["c"]
    meanwhile.then = lambda: store.remove_document("lab", found.doc_id)
    texts = [SubmittedText("a", "third words of a", labels=())]
    assert writer.run(writer.submit_texts("lab", texts).job_id).progress.indexed == 1
    assert seen_by_all(store) == ["a", "c"]


def test_attachments_of_a_mail_removed_meanwhile_come_back_with_its_labels(
    writer: Ingestor, store: IndexStore, meanwhile: Meanwhile
) -> None:
    def send(labels: tuple[str, ...] | None, *names: str) -> None:
        mail = message("Survey", *((name, f"words of {name}".encode()) for name in names))
        upload = Upload("m.eml", io.BytesIO(mail.as_bytes()), labels=labels)
        assert writer.run(writer.submit_files("lab", [upload]).job_id).progress.indexed == 1 + len(names)

    send(("hr",), "a.txt")
    found = store.find_source("lab", "m.eml")
    assert found is not None
    meanwhile.then = lambda: store.remove_document("lab", found.doc_id)
    send(None, "a.txt", "b.txt")
    assert sources(store) == ["a", "b", "m.eml", "m.eml/a.txt", "m.eml/b.txt"]
    assert seen_by_all(store) == []
