"""Attachments of mail: documents of their own, which come, change and go with their message."""

from __future__ import annotations

import io
import mailbox
import os
from collections.abc import Callable
from email.message import EmailMessage
from pathlib import Path
from typing import Any

import pytest

from ragserve.config import load
from ragserve.errors import Forbidden, NotFound
from ragserve.ingest import attachments
from ragserve.ingest.ingestor import Ingestor, PathOptions
from ragserve.ingest.jobs.job_report import JobReport
from ragserve.ingest.jobs.submitter import Submitter
from ragserve.ingest.parsing.parse_process import INTERRUPTED, Failed, ParseProcess, ParseRequest
from ragserve.ingest.planned import PlannedFile
from ragserve.ingest.submissions import SubmittedText, Upload
from ragserve.ingest.tokenizer import TokenizerSource
from ragserve_index import Eq, IndexStore
from ragserve_index.viewers import MAX_LABELS, Viewer
from tests.unit.ingest.ingest_samples import make_docx

CSV = b"name,depth\nOban,8.5\n"


def message(subject: str = "Survey", *files: tuple[str, bytes]) -> EmailMessage:
    mail = EmailMessage()
    mail["Subject"], mail["From"], mail["To"] = subject, "Ann <ann@example.com>", "bo@example.com"
    mail.set_content("See the attached files.")
    for name, data in files:
        mail.add_attachment(data, maintype="application", subtype="octet-stream", filename=name)
    return mail


def report_docx() -> bytes:
    return make_docx(lambda document: document.add_paragraph("The harbour is 8.5 metres deep."))


def ingest(ingestor: Ingestor, path: Path, **options: Any) -> JobReport:
    return ingestor.run(ingestor.submit_paths("mail", [str(path)], PathOptions(**options)).job_id)


def texts(store: IndexStore, root: Path) -> dict[str, str]:
    return {
        os.path.relpath(d.source, root): "".join(c.text for c in store.document_chunks("mail", d.doc_id))
        for d in store.documents("mail", limit=1000)
    }


def test_attachments_are_documents_with_the_mail_as_parent(
    ingestor: Ingestor, store: IndexStore, tmp_path: Path
) -> None:
    path = tmp_path / "mail.eml"
    mail = message("Survey", ("report.docx", report_docx()), ("depths.csv", CSV))
    path.write_bytes(mail.as_bytes())
    report = ingest(ingestor, path, metadata={"topic": "harbours"})
    assert (report.state, report.progress.indexed, report.progress.total) == ("done", 3, 3)
    found = texts(store, tmp_path)
    assert sorted(found) == ["mail.eml", "mail.eml/depths.csv", "mail.eml/report.docx"]
    assert found["mail.eml/report.docx"] == "The harbour is 8.5 metres deep."
    assert "Attachments: report.docx, depths.csv" in found["mail.eml"]
    attached = store.find_source("mail", f"{path}/report.docx")
    assert attached is not None
    assert attached.metadata["parent"] == str(path)
    assert (attached.metadata["topic"], attached.metadata["ext"]) == ("harbours", ".docx")
    mail_document = store.find_source("mail", str(path))
    assert mail_document is not None
    assert mail_document.metadata["attachments"] == ["report.docx", "depths.csv"]
    children = store.documents("mail", filter=Eq(field="parent", value=str(path)))
    assert len(children) == 2
    states = {item.source: item.state for item in ingestor.jobs.items(report.job_id)}
    assert states == {str(tmp_path / name): "indexed" for name in found}
    again = ingest(ingestor, path, metadata={"topic": "harbours"})
    assert (again.progress.indexed, again.progress.unchanged) == (0, 1)
    assert store.check()[0].ok


def test_they_change_and_go_with_their_mail(ingestor: Ingestor, store: IndexStore, tmp_path: Path) -> None:
    path = tmp_path / "mail.eml"
    path.write_bytes(message("Survey", ("a.txt", b"first words"), ("b.txt", b"other words")).as_bytes())
    ingest(ingestor, tmp_path)
    path.write_bytes(message("Survey", ("a.txt", b"second words"), ("c.txt", b"new words")).as_bytes())
    ingest(ingestor, tmp_path)
    found = texts(store, tmp_path)
    assert sorted(found) == ["mail.eml", "mail.eml/a.txt", "mail.eml/c.txt"]
    assert found["mail.eml/a.txt"] == "second words"
    unchanged = ingest(ingestor, tmp_path, prune=True)
    assert (unchanged.vanished, len(texts(store, tmp_path))) == ((), 3)
    document = store.find_source("mail", str(path))
    assert document is not None
    store.remove_document("mail", document.doc_id)
    assert texts(store, tmp_path) == {}
    ingest(ingestor, tmp_path)
    path.unlink()
    gone = ingest(ingestor, tmp_path, prune=True)
    assert gone.vanished == (str(path),)
    assert texts(store, tmp_path) == {}
    assert store.check()[0].ok


def test_a_document_that_only_has_such_a_name_stays(
    ingestor: Ingestor, store: IndexStore, tmp_path: Path
) -> None:
    """What a client names like an attachment, or says of one, removes nothing of others."""
    path = tmp_path / "mail.eml"
    path.write_bytes(message("Survey", ("a.txt", b"first words")).as_bytes())
    ingest(ingestor, path)
    (tmp_path / "b.txt").write_text("other words")
    ingest(ingestor, tmp_path / "b.txt", metadata={"attachments": ["../mail.eml", "x"], "parent": "nobody"})
    ingest(ingestor, tmp_path / "b.txt", metadata={"attachments": 3})
    document = store.find_source("mail", str(tmp_path / "b.txt"))
    assert document is not None
    store.remove_document("mail", document.doc_id)
    assert sorted(texts(store, tmp_path)) == ["mail.eml", "mail.eml/a.txt"]


def test_what_is_no_document_is_left_out_and_named(
    ingestor: Ingestor, store: IndexStore, tmp_path: Path
) -> None:
    mail = message(
        "Survey", ("bad.docx", b"PK\x03\x04broken"), ("fine.txt", b"fine words"), ("empty.txt", b"")
    )
    mail.add_attachment(
        b"\x89PNG\r\n\x1a\n\0", maintype="image", subtype="png", cid="<logo@1>", disposition="inline"
    )
    mail.add_attachment(b"\x89PNG\r\n\x1a\n\0", maintype="image", subtype="png", filename="photo.png")
    mail.add_attachment(b"BEGIN:VCALENDAR", maintype="text", subtype="calendar", filename="invite.ics")
    mail.add_attachment(b"signed", maintype="application", subtype="pkcs7-signature", filename="smime.p7s")
    path = tmp_path / "mail.eml"
    path.write_bytes(mail.as_bytes())
    report = ingest(ingestor, path)
    assert (report.progress.indexed, report.progress.failed) == (2, 0)
    assert sorted(texts(store, tmp_path)) == ["mail.eml", "mail.eml/fine.txt"]
    ((source, note),) = report.notes
    assert source == str(path)
    assert "1 inline images" in note
    assert "1 calendar entries" in note
    assert "1 signatures" in note
    assert "1 empty attachments" in note
    assert "bad.docx (corrupt: " in note
    assert "photo.png (binary: a PNG image" in note


def test_mails_within_mails(ingestor: Ingestor, store: IndexStore, tmp_path: Path) -> None:
    """A message that is attached as one is read as the mail's text; one that is a file is a document."""
    inner = message("Inner", ("depths.csv", CSV))
    deep = message("0", ("deep.txt", b"deep words"))
    for level in range(1, 6):
        deep = message(str(level), ("below.eml", deep.as_bytes()))
    mail = message("Outer", ("inner.eml", inner.as_bytes()), ("deep.eml", deep.as_bytes()))
    mail.add_attachment(inner)
    path = tmp_path / "mail.eml"
    path.write_bytes(mail.as_bytes())
    ingest(ingestor, path)
    found = texts(store, tmp_path)
    assert found["mail.eml/inner.eml/depths.csv"] == found["mail.eml/depths.csv"]
    assert "Subject: Inner" in found["mail.eml"]
    levels = [name.count(".eml") for name in found if "deep.eml" in name]
    assert sorted(levels) == [2, 3, 4]
    document = store.find_source("mail", str(path))
    assert document is not None
    store.remove_document("mail", document.doc_id)
    assert texts(store, tmp_path) == {}


def test_attachments_of_a_mailbox_are_named_by_their_message(
    ingestor: Ingestor, store: IndexStore, tmp_path: Path
) -> None:
    box = mailbox.mbox(tmp_path / "box.mbox")
    for subject in ("one", "two"):
        box.add(message(subject, ("../../etc/notes.txt", f"words of {subject}".encode())))
    box.add(message("three"))
    box.close()
    ingest(ingestor, tmp_path / "box.mbox")
    found = texts(store, tmp_path)
    assert sorted(found) == ["box.mbox", "box.mbox/1/notes.txt", "box.mbox/2/notes.txt"]
    assert found["box.mbox/2/notes.txt"] == "words of two"


def test_names_of_attachments_are_safe_and_their_own(
    ingestor: Ingestor, store: IndexStore, tmp_path: Path
) -> None:
    names = ["a.txt", "A.txt", "../a.txt", "C:\\tmp\\a.txt", "x" * 300 + ".txt", "..", "\u202etxt.a"]
    mail = message("Names", *((name, f"words {i}".encode()) for i, name in enumerate(names)))
    (tmp_path / "mail.eml").write_bytes(mail.as_bytes())
    ingest(ingestor, tmp_path / "mail.eml")
    found = sorted(name.removeprefix("mail.eml/") for name in texts(store, tmp_path))
    assert len(found) == len(names) + 1
    assert {"a.txt", "A (2).txt", "a (3).txt", "a (4).txt", "attachment", "txt.a"} <= set(found)
    assert all(len(name) <= 130 and not set(name) & set("/\\\u202e") for name in found)


@pytest.mark.parametrize("limit", ["MOST", "_CHARACTERS"])
def test_attachments_are_bounded(
    ingestor: Ingestor, store: IndexStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(attachments._Budget, "__init__", _small_budget(limit))
    files = [(f"{i}.txt", f"some words {i}".encode()) for i in range(9)]
    (tmp_path / "mail.eml").write_bytes(message("Many", *files).as_bytes())
    report = ingest(ingestor, tmp_path / "mail.eml")
    assert report.progress.indexed == 4
    assert "and 0 more" not in report.notes[0][1]
    assert "more than" in report.notes[0][1]


def _small_budget(limit: str) -> Callable[..., None]:
    def make(self: Any, deadline: float) -> None:
        self.deadline = deadline
        self.files = 3 if limit == "MOST" else 99
        self.characters = 30 if limit == "_CHARACTERS" else 9999

    return make


def test_a_run_that_is_stopped_leaves_the_mail_for_the_next(tmp_path: Path) -> None:
    """Nothing of a mail is taken, and no file of an attachment is left, if one of them is interrupted."""
    path = tmp_path / "mail.eml"
    path.write_bytes(message("Survey", ("a.txt", b"words"), ("b.txt", b"words")).as_bytes())

    class Stopped(ParseProcess):
        def parse(self, request: ParseRequest) -> Any:
            return Failed("stopped", INTERRUPTED) if request.filename == "b.txt" else super().parse(request)

    tokenizer = TokenizerSource.load(load().model)
    options: dict[str, Any] = {"max_bytes": 10**6, "timeout_s": 60, "chunk_tokens": 128}
    with Stopped(tokenizer_json=tokenizer.json, **options) as parser:
        request = ParseRequest(str(path), "mail.eml", ".eml", "salt")
        results = attachments.results_of(parser, PlannedFile(str(path), request))
        assert [(file.source, type(result)) for file, result in results] == [(str(path), Failed)]
        folder = Path(parser._attachments())
        assert list(folder.iterdir()) == []
    assert not folder.exists()


def test_labels_are_the_mails_for_new_ones_and_their_own_for_others(
    ingestor: Ingestor, store: IndexStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ingestion without labels changes none, and what is new goes by those that the mail has then."""
    path = tmp_path / "mail.eml"
    path.write_bytes(message("Survey", ("a.txt", b"first words")).as_bytes())
    ingest(ingestor, path, labels=("staff",))

    def labels() -> dict[str, tuple[str, ...]]:
        return {os.path.relpath(d.source, path): d.labels for d in store.documents("mail", limit=9)}

    def doc_id(source: str) -> str:
        found = store.find_source("mail", source)
        assert found is not None
        return found.doc_id

    store.set_labels("mail", [doc_id(f"{path}/a.txt")], only=("board",))
    path.write_bytes(message("Survey", ("a.txt", b"second words"), ("b.txt", b"other words")).as_bytes())
    ingest(ingestor, path)
    assert labels() == {".": ("staff",), "a.txt": ("board",), "b.txt": ("staff",)}

    parse = ParseProcess.parse

    def labelled_meanwhile(self: ParseProcess, request: ParseRequest) -> Any:
        if request.filename == "mail.eml":
            store.set_labels("mail", [doc_id(str(path))], only=("board",))
        return parse(self, request)

    monkeypatch.setattr(ParseProcess, "parse", labelled_meanwhile)
    inner = message("Inner", ("d.txt", b"deep words"))
    mail = message("Survey", ("a.txt", b"second words"), ("c.txt", b"new words"))
    mail.add_attachment(inner)
    path.write_bytes(mail.as_bytes())
    ingest(ingestor, path)
    found = labels()
    assert len(found) == 4
    assert set(found.values()) == {("board",)}


def test_who_does_not_see_an_attachment_does_not_remove_it(ingestor: Ingestor, store: IndexStore) -> None:
    def send(*files: tuple[str, bytes], **by: Any) -> JobReport:
        upload = Upload("mail.eml", io.BytesIO(message("Survey", *files).as_bytes()))
        return ingestor.run(ingestor.submit_files("mail", [upload], **by).job_id)

    send(("a.txt", b"first words"), ("b.txt", b"other words"))
    mail, attached = (store.find_source("mail", name) for name in ("mail.eml", "mail.eml/a.txt"))
    assert mail is not None
    assert attached is not None
    store.set_labels("mail", [attached.doc_id], only=("board",))
    somebody = Submitter("somebody", Viewer(frozenset()))
    seen = store.seen_by(somebody.viewer)
    with pytest.raises(Forbidden, match="An attachment of this document"):
        seen.remove_document("mail", mail.doc_id)
    with pytest.raises(NotFound):
        seen.remove_document("mail", attached.doc_id)
    assert len(store.documents("mail")) == 3
    send(("c.txt", b"new words"), by=somebody)
    assert sorted(d.source for d in store.documents("mail")) == [
        "mail.eml",
        "mail.eml/a.txt",
        "mail.eml/c.txt",
    ]
    assert store.check()[0].ok


def test_a_document_that_would_have_too_many_labels_fails_alone(
    ingestor: Ingestor, store: IndexStore
) -> None:
    first = SubmittedText("full", "first words", labels=tuple(f"l{n}" for n in range(MAX_LABELS)))
    ingestor.run(ingestor.submit_texts("labels", [first]).job_id)
    by = Submitter("somebody", Viewer(frozenset({"l0", "mine"})))
    texts = [SubmittedText(name, f"words of {name}", labels=("l0", "mine")) for name in ("full", "new")]
    report = ingestor.run(ingestor.submit_texts("labels", texts, by=by).job_id)
    assert (report.state, report.progress.indexed, report.progress.failed) == ("done", 1, 1)
    assert "33 labels" in report.failures[0][1]


def test_one_of_a_hidden_documents_name_is_refused_and_changes_nothing_of_it(
    ingestor: Ingestor, store: IndexStore
) -> None:
    """Its corrections would else be embedded again, with the title of somebody else's file."""
    name = "mail.eml/a.txt"
    ingestor.run(
        ingestor.submit_texts("mail", [SubmittedText(name, "first words", labels=("board",))]).job_id
    )
    hidden = store.find_source("mail", name)
    assert hidden is not None
    version = store.chunk_changes.state("mail", hidden.doc_id, 0).version
    ingestor.editor.change("mail", hidden.doc_id, 0, version, text="corrected words")
    (before,) = store.chunk_changes.rows_of("mail", [name])[name]
    mail = message("Survey", ("a.txt", b"Another title\n\nfirst words"), ("b.txt", b"other words"))
    upload = Upload("mail.eml", io.BytesIO(mail.as_bytes()))
    job = ingestor.submit_files("mail", [upload], by=Submitter("somebody", Viewer(frozenset())))
    report = ingestor.run(job.job_id)
    assert (report.state, report.progress.indexed, report.progress.failed) == ("done", 2, 1)
    assert store.chunk_changes.rows_of("mail", [name])[name] == [before]
    assert store.document("mail", hidden.doc_id) == store.find_source("mail", name)
    assert store.check()[0].ok
