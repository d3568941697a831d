"""Jobs over paths: incremental, exact about failures, and safe to interrupt, cancel, repeat and resume."""

from __future__ import annotations

import http.server
import os
import threading
import time
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ragserve.config import Settings, load
from ragserve.errors import Conflict, InvalidRequest, StorageFull
from ragserve.ingest.ingestor import Ingestor, PathOptions
from ragserve.ingest.jobs.job_report import JobReport
from ragserve.ingest.jobs.lease import LEASE_S
from ragserve.ingest.sentence_plan import sentence_starts
from ragserve.retrieval.embedder import Embedder
from ragserve_index import IndexStore
from ragserve_index.types import Document
from tests.data.formats.make_files import samples
from tests.unit.ingest.ingest_samples import make_docx, make_pdf


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "docs"
    folder.mkdir()
    for name in ("whales", "dolphins", "otters"):
        (folder / f"{name}.md").write_text(f"# {name.title()}\n\nA few words about {name}.\n")
    return folder


def ingest(ingestor: Ingestor, *inputs: Path | str, namespace: str = "sea", **options: object) -> JobReport:
    job = ingestor.submit_paths(namespace, [str(one) for one in inputs], PathOptions(**options))  # type: ignore[arg-type]
    return ingestor.run(job.job_id)


def contents(store: IndexStore, namespace: str = "sea") -> dict[str, str]:
    documents = store.documents(namespace, limit=10_000)
    return {
        os.path.basename(d.source): "".join(
            chunk.text for chunk in store.document_chunks(namespace, d.doc_id)
        )
        for d in documents
    }


def outcomes(report: JobReport) -> tuple[int, int, int, int]:
    return report.progress.indexed, report.progress.unchanged, report.progress.failed, report.progress.removed


def test_documents_are_indexed_with_their_metadata(
    ingestor: Ingestor, store: IndexStore, folder: Path, embedder: Embedder
) -> None:
    report = ingest(ingestor, folder, metadata={"topic": "animals", "year": 2021})
    assert (report.state, outcomes(report)) == ("done", (3, 0, 0, 0))
    document = store.find_source("sea", str(folder / "whales.md"))
    assert document is not None
    assert document.title == "Whales"
    expected = {
        "path": str(folder / "whales.md"),
        "filename": "whales.md",
        "ext": ".md",
        "title": "Whales",
        "topic": "animals",
        "year": 2021,
    }
    assert dict(document.metadata) == expected
    hits = store.search("sea", embedder.encode_queries(["words about otters"]), 1).hits[0]
    assert hits[0].chunk.title == "Otters"


def warm_jobs(ingestor: Ingestor) -> list[tuple[int, bool]]:
    """Documents of each warm-up, newest first, and whether it is one in the background."""
    jobs = [job for job in ingestor.jobs.list() if job.kind == "warm"]
    return [(job.n_items, bool(job.spec.get("background"))) for job in jobs]


def test_what_is_new_is_warmed_in_the_background_where_a_server_does_that(
    settings: Settings, store: IndexStore, folder: Path, embedder: Embedder
) -> None:
    serving = False
    ingestor = Ingestor(settings, store, embedder, warms=lambda: serving)
    ingest(ingestor, folder)
    assert warm_jobs(ingestor) == [], "no server"
    serving = True
    assert ingest(ingestor, folder).warm_job is None
    assert warm_jobs(ingestor) == [], "nothing new"
    (folder / "whales.md").write_text("# Whales\n\nOther words about whales.\n")
    assert ingest(ingestor, folder).warm_job is None, "nobody waits for it"
    assert warm_jobs(ingestor) == [(1, True)]
    report = ingest(ingestor, folder, warm=True)
    assert report.warm_job is not None
    assert warm_jobs(ingestor) == [(3, False), (1, True)], "all of them, for who asks"
    off = settings.model_copy(update={"warm_ingested": False})
    (folder / "whales.md").write_text("# Whales\n\nYet other words about whales.\n")
    ingest(Ingestor(off, store, embedder, warms=lambda: True), folder)
    assert len(warm_jobs(ingestor)) == 2


def test_progress_shows_while_a_slow_embedder_works(
    settings: Settings, store: IndexStore, tmp_path: Path
) -> None:
    class Slow:
        name, dim = "slow", 4

        def encode(self, texts: Sequence[str]) -> Any:
            time.sleep(0.03 * len(texts))  # 33 chunks/s, as a small machine does
            return np.eye(1, 4, dtype=np.float32).repeat(len(texts), axis=0)

    folder = tmp_path / "notes"
    folder.mkdir()
    for i in range(160):
        (folder / f"{i}.txt").write_text(f"note {i}")
    ingestor = Ingestor(settings, store, Slow())
    job = ingestor.submit_paths("slow", [str(folder)])
    seen: list[int] = []
    ingestor.run(job.job_id, on_progress=lambda progress: seen.append(progress.done))
    assert seen[-1] == 160
    # two seconds of work at most, though all files are parsed long before
    assert max(after - before for before, after in pairwise(seen)) <= 70


def test_chunks_are_exact_runs_of_the_text(ingestor: Ingestor, store: IndexStore, folder: Path) -> None:
    text = "".join(f"Sentence number {i} of a text with ünïcödé and 日本語.\r\n" for i in range(200))
    (folder / "long.txt").write_bytes(text.encode())
    ingest(ingestor, folder / "long.txt")
    document = store.find_source("sea", str(folder / "long.txt"))
    assert document is not None
    chunks = store.document_chunks("sea", document.doc_id)
    assert len(chunks) > 5
    assert "".join(chunk.text for chunk in chunks) == text
    assert all(text[chunk.start : chunk.end] == chunk.text for chunk in chunks)
    assert all(0 < chunk.n_tokens <= 256 for chunk in chunks)


def test_unchanged_files_are_left_and_changed_ones_replaced(
    ingestor: Ingestor, store: IndexStore, folder: Path
) -> None:
    ingest(ingestor, folder)
    version = store.namespace("sea").version
    assert outcomes(ingest(ingestor, folder)) == (0, 3, 0, 0)
    assert store.namespace("sea").version == version
    (folder / "whales.md").write_text("# Whales\n\nEverything is different now.\n")
    assert outcomes(ingest(ingestor, folder)) == (1, 2, 0, 0)
    assert contents(store)["whales.md"] == "# Whales\n\nEverything is different now.\n"
    assert store.namespace("sea").n_documents == 3


def test_other_settings_or_metadata_count_as_a_change(
    settings: Settings, store: IndexStore, embedder: Embedder, folder: Path
) -> None:
    ingest(Ingestor(settings, store, embedder), folder)
    smaller = Ingestor(load(data_dir=settings.data_dir, chunk_tokens=64), store, embedder)
    assert outcomes(ingest(smaller, folder)) == (3, 0, 0, 0)
    assert outcomes(ingest(smaller, folder, metadata={"topic": "sea"})) == (3, 0, 0, 0)
    assert outcomes(ingest(smaller, folder, metadata={"topic": "sea"})) == (0, 3, 0, 0)


def test_hidden_text_is_counted_and_the_setting_takes_it_in(
    settings: Settings, store: IndexStore, embedder: Embedder, tmp_path: Path
) -> None:
    path = tmp_path / "hidden.docx"
    path.write_bytes(samples()["hidden.docx"].data)

    report = ingest(Ingestor(settings, store, embedder), path)
    assert [note for _, note in report.notes] == ["left out: 4 hidden pieces of text, 1 hidden rows"]
    assert "0000" not in contents(store)["hidden.docx"]
    report = ingest(Ingestor(load(data_dir=settings.data_dir, ingest_hidden=True), store, embedder), path)
    assert outcomes(report) == (1, 0, 0, 0)
    assert not report.notes
    assert "0000" in contents(store)["hidden.docx"]


def test_bad_files_fail_alone_and_with_their_reasons(
    ingestor: Ingestor, store: IndexStore, folder: Path
) -> None:
    (folder / "corrupt.pdf").write_bytes(b"%PDF-1.7 nothing more")
    (folder / "encrypted.pdf").write_bytes(make_pdf(["x"], password="pw"))
    (folder / "empty.txt").touch()
    (folder / "blank.txt").write_text("\n \n")
    (folder / "binary.txt").write_bytes(bytes(range(256)) * 10)
    with open(folder / "huge.log", "wb") as file:
        file.truncate(200 * 2**20)
    (folder / "really.docx.txt").write_bytes(
        make_docx(lambda document: document.add_paragraph("A docx by another name."))
    )
    (folder / "loop").symlink_to(folder)
    report = ingest(ingestor, folder, folder / "missing.md", recursive=True)
    assert outcomes(report) == (4, 0, 7, 0)
    reasons = {os.path.basename(source): reason.split(":")[0] for source, reason in report.failures}
    assert reasons == {
        "corrupt.pdf": "corrupt",
        "encrypted.pdf": "encrypted",
        "empty.txt": "empty",
        "blank.txt": "empty",
        "binary.txt": "undecodable",
        "huge.log": "too large",
        "missing.md": "no such file or directory",
    }
    assert contents(store)["really.docx.txt"] == "A docx by another name."
    assert store.namespace("sea").n_documents == 4


def test_a_document_that_became_bad_keeps_its_last_good_version(
    ingestor: Ingestor, store: IndexStore, folder: Path
) -> None:
    ingest(ingestor, folder)
    before = contents(store)
    (folder / "otters.md").write_bytes(b"\x00\x01\x02")
    assert outcomes(ingest(ingestor, folder)) == (0, 2, 1, 0)
    assert contents(store) == before


def test_vanished_files_are_reported_and_removed_only_with_prune(
    ingestor: Ingestor, store: IndexStore, folder: Path
) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "seals.md").write_text("Seals.")
    ingest(ingestor, folder, recursive=True)
    (folder / "otters.md").unlink()
    (folder / "sub" / "seals.md").unlink()
    report = ingest(ingestor, folder)  # not recursive: what is below is not its business
    assert (report.vanished, outcomes(report)) == ((str(folder / "otters.md"),), (0, 2, 0, 0))
    assert "otters.md" in contents(store)
    report = ingest(ingestor, folder, recursive=True, prune=True)
    assert sorted(report.vanished) == [str(folder / "otters.md"), str(folder / "sub" / "seals.md")]
    assert outcomes(report) == (0, 2, 0, 2)
    assert sorted(contents(store)) == ["dolphins.md", "whales.md"]


@pytest.mark.parametrize("how", ["stopped", "full disk"])
def test_removals_that_were_interrupted_go_on(
    ingestor: Ingestor, store: IndexStore, folder: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """What is removed is recorded as such, and what is not is no item that fails for want of its file."""
    (folder / "seals.md").write_text("Seals.")
    ingest(ingestor, folder)
    for name in ("dolphins.md", "otters.md", "seals.md"):
        (folder / name).unlink()
    stop, removed = threading.Event(), list[str]()
    remove = IndexStore.remove_document

    def interrupted(self: IndexStore, namespace: str, doc_id: str) -> Document:
        if how == "full disk" and removed:
            raise StorageFull("No space left.")
        removed.append(doc_id)
        stop.set()
        return remove(self, namespace, doc_id)

    job = ingestor.submit_paths("sea", [str(folder)], PathOptions(prune=True))
    with monkeypatch.context() as patch:
        patch.setattr(IndexStore, "remove_document", interrupted)
        if how == "stopped":
            assert ingestor.run(job.job_id, stop=stop).state == "interrupted"
        else:
            with pytest.raises(StorageFull):
                ingestor.run(job.job_id)
    counts = ingestor.jobs.get(job.job_id).counts
    assert (len(removed), counts["removed"], counts["pending"]) == (1, 1, 0)
    if how == "stopped":
        report = ingestor.run(job.job_id)
        assert (report.state, outcomes(report), report.progress.total) == ("done", (0, 1, 0, 3), 1)
        assert sorted(contents(store)) == ["whales.md"]


def test_an_absent_directory_prunes_nothing(ingestor: Ingestor, store: IndexStore, folder: Path) -> None:
    ingest(ingestor, folder)
    folder.rename(folder.with_name("unmounted"))
    report = ingest(ingestor, folder, prune=True)
    assert (report.vanished, outcomes(report)) == ((), (0, 0, 1, 0))
    assert store.namespace("sea").n_documents == 3


def test_a_directory_without_files_prunes_nothing(
    ingestor: Ingestor, store: IndexStore, folder: Path
) -> None:
    ingest(ingestor, folder)
    folder.rename(folder.with_name("unmounted"))
    (folder / "lost+found").mkdir(parents=True)
    (folder / ".hidden").touch()
    report = ingest(ingestor, folder, recursive=True, prune=True)
    assert (report.vanished, outcomes(report)) == ((), (0, 0, 1, 0))
    assert "3 documents stay" in report.failures[0][1]
    assert store.namespace("sea").n_documents == 3
    report = ingest(ingestor, folder, recursive=True)
    assert (len(report.vanished), outcomes(report)) == (3, (0, 0, 0, 0)), "said, and no failure"


@pytest.mark.parametrize("target", ["sub", "nowhere"])
def test_what_is_below_an_unreadable_directory_has_not_vanished(
    ingestor: Ingestor, store: IndexStore, folder: Path, target: str
) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "seals.md").write_text("Seals.")
    ingest(ingestor, folder, recursive=True)
    (folder / "sub").rename(folder.parent / "away")
    (folder / "sub").symlink_to(target)
    (folder / "otters.md").unlink()
    report = ingest(ingestor, folder, recursive=True, prune=True)
    assert (report.vanished, outcomes(report)) == ((str(folder / "otters.md"),), (0, 2, 1, 1))
    assert report.failures[0][0] == str(folder / "sub")
    assert "seals.md" in contents(store)


def test_urls_are_documents_too(ingestor: Ingestor, store: IndexStore, tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "page.html").write_text(
        "<html><head><title>Tides</title></head><body><p>The tide turns at six.</p></body></html>"
    )

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            return

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/page.html"
        report = ingest(ingestor, url, url.replace("page", "missing"))
        again = ingest(ingestor, url)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert outcomes(report) == (1, 0, 1, 0)
    assert "404" in report.failures[0][1]
    assert outcomes(again) == (0, 1, 0, 0)
    document = store.find_source("sea", url)
    assert document is not None
    assert (document.title, document.metadata["url"]) == ("Tides", url)


def test_another_embedder_is_refused_before_anything_is_read(
    settings: Settings, store: IndexStore, ingestor: Ingestor, folder: Path
) -> None:
    ingest(ingestor, folder)
    other = Ingestor(
        load(data_dir=settings.data_dir, embedder="other/model"),
        store,
        lambda: pytest.fail("the embedder was loaded"),
    )
    with pytest.raises(Conflict, match="all-MiniLM-L6-v2"):
        other.submit_paths("sea", [str(folder)])


def test_unchanged_files_do_not_load_the_embedder(
    settings: Settings, store: IndexStore, ingestor: Ingestor, folder: Path
) -> None:
    ingest(ingestor, folder)
    lazy = Ingestor(settings, store, lambda: pytest.fail("the embedder was loaded"))
    assert outcomes(ingest(lazy, folder)) == (0, 3, 0, 0)


@pytest.mark.parametrize("namespace", ["", "a b", "../x", "a" * 65])
def test_malformed_namespaces_are_refused(namespace: str, ingestor: Ingestor, folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="namespace"):
        ingestor.submit_paths(namespace, [str(folder)])


def test_a_stopped_run_is_resumed_without_loss_or_doubling(
    ingestor: Ingestor, store: IndexStore, folder: Path
) -> None:
    for i in range(200):
        (folder / f"n{i:03d}.txt").write_text(f"Note {i}.")
    job = ingestor.submit_paths("sea", [str(folder)])
    stop = threading.Event()
    report = ingestor.run(
        job.job_id, stop=stop, on_progress=lambda progress: stop.set() if progress.indexed else None
    )
    assert report.state == "interrupted"
    done = store.namespace("sea").n_documents
    assert 0 < done < 203
    assert ingestor.jobs.get(job.job_id).state == "running"
    report = ingestor.run(job.job_id)
    assert (report.state, report.progress.indexed, store.namespace("sea").n_documents) == ("done", 203, 203)
    with pytest.raises(Conflict, match="over"):
        ingestor.run(job.job_id)


def test_cancelling_stops_the_run(ingestor: Ingestor, store: IndexStore, folder: Path) -> None:
    for i in range(50):
        (folder / f"n{i:03d}.txt").write_text(f"Note {i}.")
    job = ingestor.submit_paths("sea", [str(folder)])
    assert ingestor.jobs.claim("dies", LEASE_S, job.job_id) is not None
    ingestor.jobs.request_cancel(job.job_id)
    assert ingestor.jobs.heartbeat(job.job_id, "dies", -1.0)  # its lease is over before it stops
    assert ingestor.run(job.job_id).state == "cancelled"
    assert ingestor.jobs.get(job.job_id).state == "cancelled"


def test_a_job_run_elsewhere_is_left_alone(ingestor: Ingestor, folder: Path) -> None:
    job = ingestor.submit_paths("sea", [str(folder)])
    ingestor.jobs.claim("somebody else", LEASE_S, job.job_id)
    with pytest.raises(Conflict, match="somebody else"):
        ingestor.run(job.job_id)


def test_running_the_same_command_again_supersedes_a_dead_run(ingestor: Ingestor, folder: Path) -> None:
    dead = ingestor.submit_paths("sea", [str(folder)])
    ingestor.jobs.claim("died", -1.0, dead.job_id)
    other = ingestor.submit_paths("sea", [str(folder / "whales.md")])
    again = ingestor.submit_paths("sea", [str(folder)])
    states = {job.job_id: job.state for job in ingestor.jobs.list("sea")}
    assert states == {dead.job_id: "cancelled", other.job_id: "queued", again.job_id: "queued"}


@pytest.mark.parametrize("bytes_a_token", [0, 16, 200])
def test_sentences_are_embedded_with_their_chunk(
    store: IndexStore, folder: Path, embedder: Embedder, tmp_path: Path, bytes_a_token: int
) -> None:
    text = "Whales sing in the deep sea. " * 3 + "Otters sleep on their backs in the kelp. " * 3
    (folder / "long.txt").write_text(text)
    settings = load(data_dir=tmp_path / "data", sentence_bytes=bytes_a_token)
    ingest(Ingestor(settings, store, embedder), folder)
    [document] = [d for d in store.documents("sea") if d.source.endswith("long.txt")]
    [chunk] = store.document_chunks("sea", document.doc_id)
    found = store.sentence_vectors("sea", [chunk.chunk_id])
    if bytes_a_token == 0:
        assert found == {}
        return
    stored = found[chunk.chunk_id]
    starts = [*stored.starts.tolist(), len(chunk.text)]
    assert starts == [*sentence_starts(chunk.text, chunk.n_tokens * bytes_a_token // 390), len(chunk.text)]
    sentences = [chunk.text[a:b] for a, b in pairwise(starts)]
    assert len(stored.encode()) <= chunk.n_tokens * bytes_a_token
    vectors = embedder.encode(sentences)
    for i, vector in enumerate(vectors):
        assert stored.scores(vector)[i] == pytest.approx(1.0, abs=0.01)
