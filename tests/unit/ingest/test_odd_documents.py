"""One odd document costs no other: text is made storable where it enters, and a batch is tried one by one."""

from __future__ import annotations

import os
import pickle
import tempfile
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from ragserve.client import Client
from ragserve.commands import docs
from ragserve.config import Settings
from ragserve.errors import InvalidRequest
from ragserve.ingest.chunk_embedding import Vectors
from ragserve.ingest.ingestor import Ingestor, PathOptions, SubmittedText
from ragserve.ingest.jobs.job_report import JobReport
from ragserve.ingest.parsing.parse_process import Failed, ParsedFile, ParseProcess, ParseRequest, Unchanged
from ragserve.ingest.planned import PlannedFile
from ragserve.ingest.ray_stages import EmbeddedFile, EmbedStage, rows
from ragserve.ingest.tokenizer import TokenizerSource
from ragserve_index import IndexStore
from tests.unit.api.scripted_server import Live

Parse = Callable[..., ParsedFile | Unchanged | Failed]


def ingest(ingestor: Ingestor, folder: Path) -> JobReport:
    return ingestor.run(ingestor.submit_paths("n", [str(folder)]).job_id)


def reasons(report: JobReport) -> dict[str, str]:
    return {os.path.basename(source): reason for source, reason in report.failures}


def text_of(parsed: ParsedFile | Unchanged | Failed) -> str:
    assert isinstance(parsed, ParsedFile), parsed
    return "".join(chunk.text for chunk in parsed.chunks)


@pytest.mark.parametrize(
    ("name", "content", "title"),
    [
        ("surrogate.md", '---\ntitle: "x \\uD800 y"\n---\nText.', "x y"),
        ("nul.md", '---\ntitle: "x \\0 y"\n---\nText.', "x y"),
        ("lines.md", '---\ntitle: "x\\ny"\n---\nText.', "x y"),
        ("date.md", "---\ndate: 2024-02-30\n---\n# Head\nText.", "Head"),
        ("nested.md", "---\na: " + "[" * 3000 + "\n---\n# Head\nText.", "Head"),
        ("tag.md", "---\na: !!python/object:os.system x\n---\n# Head\nText.", "Head"),
        ("line.jsonl", '{"a": "half \\ud800 of \\u0000 text"}', "line"),
        ("two\nlines.txt", "Text.", "two lines"),
    ],
)
def test_text_is_made_storable_where_it_enters(
    ingestor: Ingestor, store: IndexStore, tmp_path: Path, name: str, content: str, title: str
) -> None:
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / name).write_text(content)
    (folder / "good.txt").write_text("Good.")
    report = ingest(ingestor, folder)
    assert (report.state, reasons(report)) == ("done", {})
    document = store.find_source("n", str(folder / name))
    assert document is not None
    assert document.title == title
    text = "".join(chunk.text for chunk in store.document_chunks("n", document.doc_id))
    assert not set(text) & {"\0", "\ud800"}
    assert text.endswith("ext" if name.endswith(".jsonl") else "Text.")


@pytest.mark.parametrize("charset", ["utf-7", "UTF7", "unicode_escape", "raw-unicode-escape", "idna", "a\0b"])
def test_escapes_are_no_charset(parse: Parse, tmp_path: Path, charset: str) -> None:
    path = tmp_path / "a.txt"
    path.write_text("x +2AA- \\ud800 \\x00 y")
    assert text_of(parse(path, charset=charset)) == "x +2AA- \\ud800 \\x00 y"


class Fragile:
    """An embedder that a word of a document makes raise."""

    name, dim = "fragile", 4

    def __init__(self, error: Exception) -> None:
        self._error = error

    def encode(self, texts: Sequence[str]) -> Vectors:
        if any("mine" in text for text in texts):
            raise self._error
        return np.eye(1, 4, dtype=np.float32).repeat(len(texts), axis=0)


def test_a_batch_that_fails_is_tried_document_by_document(
    settings: Settings, store: IndexStore, tmp_path: Path
) -> None:
    folder = tmp_path / "docs"
    folder.mkdir()
    for number in range(9):
        (folder / f"{number}.txt").write_text("mine" if number == 4 else "Good.")
    report = ingest(Ingestor(settings, store, Fragile(ValueError("odd \udcff"))), folder)
    assert (report.state, report.progress.indexed) == ("done", 8)
    assert reasons(report) == {"4.txt": "could not be indexed: odd \ufffd"}
    assert store.namespace("n").n_documents == 8


def test_a_batch_that_fails_on_a_cluster_is_tried_document_by_document(
    parse: Parse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragserve.retrieval.embedder.Embedder", lambda: Fragile(ValueError("odd")))
    results = []
    for name, text in (("a.txt", "Good."), ("b.txt", "mine"), ("c.txt", "Good.")):
        (tmp_path / name).write_text(text)
        result = parse(tmp_path / name)
        results.append([(PlannedFile(name, Failed("", "")), result)])
    done = [pickle.loads(row)[0] for row in EmbedStage({}, 0)(rows(results))["file"]]
    assert [file.source for file, _ in done] == ["a.txt", "b.txt", "c.txt"]
    assert [type(result) for _, result in done] == [EmbeddedFile, Failed, EmbeddedFile]


def test_an_error_of_the_run_is_no_documents(settings: Settings, store: IndexStore, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("mine")
    ingestor = Ingestor(settings, store, Fragile(RuntimeError("the GPU is gone")))
    job = ingestor.submit_paths("n", [str(tmp_path / "a.txt")])
    with pytest.raises(RuntimeError, match="GPU"):
        ingestor.run(job.job_id)
    assert ingestor.jobs.get(job.job_id).counts["pending"] == 1


@pytest.mark.parametrize(
    "metadata", [{"a": "\ud800"}, {"a": "\0"}, {"\ud800": 1}, {"a": 2**63}, {"a": float("nan")}]
)
def test_metadata_that_cannot_be_stored_is_refused_with_the_job(
    ingestor: Ingestor, tmp_path: Path, metadata: dict[str, Any]
) -> None:
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(InvalidRequest):
        ingestor.submit_paths("n", [str(tmp_path / "a.txt")], PathOptions(metadata=metadata))
    with pytest.raises(InvalidRequest):
        ingestor.submit_texts("n", [SubmittedText("good", "x"), SubmittedText("a", "x", metadata=metadata)])
    assert ingestor.jobs.list() == []


def test_a_title_that_cannot_be_stored_is_made_storable(ingestor: Ingestor, store: IndexStore) -> None:
    job = ingestor.submit_texts("n", [SubmittedText("a", "x", title="x \ud800\0\n y")])
    assert ingestor.run(job.job_id).state == "done"
    assert [document.title for document in store.documents("n")] == ["x y"]


@pytest.mark.parametrize("text", ["---", "![](!)", ". . . .", "\U0001f642", "\u200b\u200c", "§ € ∑"])
def test_a_file_without_a_letter_or_digit_is_left_out(
    ingestor: Ingestor, store: IndexStore, tmp_path: Path, text: str
) -> None:
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "odd.txt").write_text(text)
    for name, short in (("a.txt", "7"), ("b.txt", "é"), ("c.txt", "日")):
        (folder / name).write_text(short)
    report = ingest(ingestor, folder)
    assert reasons(report) == {"odd.txt": "empty: the file holds no letter and no digit"}
    assert store.namespace("n").n_documents == 3


def test_chunks_without_a_letter_or_digit_are_left_out_with_a_note(
    ingestor: Ingestor, store: IndexStore, tmp_path: Path
) -> None:
    dashes = "-- == ** ~~ " * 500
    (tmp_path / "a.txt").write_text(f"The first words.\n\n{dashes}\n\nThe last words.")
    report = ingest(ingestor, tmp_path / "a.txt")
    ((_, note),) = report.notes
    assert note.endswith("chunks without a letter or digit left out")
    chunks = store.document_chunks("n", store.documents("n")[0].doc_id)
    assert all(any(map(str.isalnum, chunk.text)) for chunk in chunks)
    assert (chunks[0].text[:9], chunks[-1].text[-11:]) == ("The first", "last words.")
    assert [chunk.ordinal for chunk in chunks] == list(range(len(chunks)))


def test_a_killed_mail_parser_leaves_no_copy(
    tokenizer: TokenizerSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    (tmp_path / "tmp").mkdir()
    box = tmp_path / "a.mbox"
    box.write_text("From a@b Thu Jan  1 00:00:00 1970\nSubject: x\n\nText.\n\n" * 20_000)
    with ParseProcess(
        tokenizer_json=tokenizer.json, chunk_tokens=256, max_bytes=2**26, timeout_s=0.5
    ) as process:
        result = process.parse(ParseRequest(str(box), "a.mbox", ".mbox", salt="s"))
        assert isinstance(result, Failed)
        assert result.code == "timeout"
    assert list((tmp_path / "tmp").iterdir()) == []


NFC = unicodedata.normalize("NFC", "Übersicht.md")
NFD = unicodedata.normalize("NFD", NFC)


def test_an_upload_replaces_the_one_of_its_name_in_another_form(
    ingestor: Ingestor, store: IndexStore
) -> None:
    for name, text in ((NFC, "ninety barrels"), (NFD, "forty barrels")):
        ingestor.run(ingestor.submit_texts("n", [SubmittedText(name, text)]).job_id)
    (document,) = store.documents("n")
    assert document.source == NFC
    assert store.document_chunks("n", document.doc_id)[0].text == "forty barrels"
    with pytest.raises(InvalidRequest, match="twice"):
        ingestor.submit_texts("n", [SubmittedText(NFC, "x"), SubmittedText(NFD, "y")])


def test_files_are_one_document_in_any_form_and_found_by_the_command(
    ingestor: Ingestor, store: IndexStore, settings: Settings, tmp_path: Path
) -> None:
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / NFC).write_text("ninety barrels")
    ingest(ingestor, folder)
    (folder / NFC).rename(folder / NFD)  # as copied from a Mac
    report = ingestor.run(ingestor.submit_paths("n", [str(folder)], PathOptions(prune=True)).job_id)
    assert (report.progress.indexed, report.progress.removed) == (1, 0)
    (document,) = store.documents("n")
    assert document.source == str(folder / NFD), "it can still be opened"

    (folder / NFC).write_text("both in one folder")
    ((name, reason),) = ingest(ingestor, folder).failures
    assert os.path.basename(name) in (NFC, NFD)
    assert "Unicode form" in reason

    app = typer.Typer()
    docs.register(app)
    command = ["docs", "rm", "-n", "n", str(folder / NFC), "--data-dir", str(settings.data_dir)]
    assert CliRunner().invoke(app, command).exit_code == 0
    assert store.documents("n") == []


def test_names_are_shown_on_one_line_and_unreadable_ones_are_explained(
    ingestor: Ingestor, settings: Settings, tmp_path: Path
) -> None:
    folder = tmp_path / "docs"
    folder.mkdir()
    odd = "a\nb\u202etxt.md"
    (folder / odd).write_text("Text.")
    (folder / "東\u3000京 \U0001f469\u200d\U0001f680.md").write_text("Text.")
    with open(os.fsencode(folder) + b"/caf\xe9.md", "w") as file:
        file.write("Text.")
    named = os.fsdecode(os.fsencode(folder) + b"/caf\xe9.md")
    job = ingestor.submit_paths("n", [str(folder), named])
    report = ingestor.run(job.job_id)
    assert reasons(report) == {"caf\\xe9.md": "its name is not UTF-8 (rename it)"}
    app = typer.Typer()
    docs.register(app)
    listed = CliRunner().invoke(app, ["docs", "ls", "--data-dir", str(settings.data_dir)]).output
    assert f"    {folder}/a\\nb\\u202etxt.md\n" in listed
    assert "東\u3000京 \U0001f469\u200d\U0001f680.md" in listed
    assert "\u202e" not in listed
    assert len(listed.splitlines()) == 5  # two documents of two lines, and their number


def test_the_name_in_a_form_is_the_clients(live: Live, tmp_path: Path) -> None:
    with Client(live.url) as client:
        job = client.ingest_files([('quote"s 100%.txt', b"Text.")], namespace="form")
        assert client.wait(job).state == "done"
        assert [document.source for document in client.documents("form")] == ['quote"s 100%.txt']
        name = os.fsdecode(b"caf\xe9.txt")
        with pytest.raises(InvalidRequest, match="is not UTF-8"):
            client.ingest_files([(name, b"Text.")], namespace="form")
