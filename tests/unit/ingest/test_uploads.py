"""Uploads: durable before the job exists, run by the background thread, removed when the job is over."""

from __future__ import annotations

import errno
import io
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from ragserve.config import Settings, load
from ragserve.errors import Conflict, InvalidRequest, NotFound, StorageFull, TooLarge
from ragserve.ingest.ingestor import Ingestor, SubmittedText, Upload
from ragserve.ingest.jobs.job_report import Interrupted, JobReport, Progress
from ragserve.ingest.jobs.lease import JobRun, run_leased
from ragserve.ingest.jobs.runner import JobRunner
from ragserve.ingest.spool import Spool, unusable_disk_explained
from ragserve.retrieval.embedder import Embedder
from ragserve_index import IndexStore, Job, JobStore
from tests.campaigns.troubles import clock
from tests.unit.ingest.ingest_samples import make_pdf

_LONG_S = 600.0  # on a busy machine


@pytest.fixture
def runner(ingestor: Ingestor) -> Iterator[JobRunner]:
    runner = JobRunner(ingestor)
    yield runner
    runner.stop()


def wait_for_end(ingestor: Ingestor, job: Job) -> Job:
    deadline = time.monotonic() + _LONG_S
    while not (now := ingestor.jobs.get(job.job_id)).finished:
        assert time.monotonic() < deadline, now
        time.sleep(0.02)
    return now


def spools(settings: Settings) -> list[Path]:
    return list((settings.data_dir / "uploads").glob("*"))


def test_files_and_texts_are_indexed_in_the_background(
    ingestor: Ingestor, runner: JobRunner, store: IndexStore, settings: Settings
) -> None:
    runner.start()
    files = [
        Upload("../reports/a.pdf", io.BytesIO(make_pdf(["Whales sing."]))),
        Upload("broken.pdf", io.BytesIO(b"%PDF-1.4 no")),
    ]
    first = ingestor.submit_files("sea", files, {"topic": "whales"})
    second = ingestor.submit_texts(
        "sea", [SubmittedText("note", "Otters hold hands.", title="On otters", metadata={"year": 2020})]
    )
    runner.wake()
    done = wait_for_end(ingestor, first)
    assert (done.state, done.counts["indexed"], done.counts["failed"]) == ("done", 1, 1)
    assert wait_for_end(ingestor, second).state == "done"
    pdf, note = store.find_source("sea", "reports/a.pdf"), store.find_source("sea", "note")
    assert pdf is not None
    assert note is not None
    assert (pdf.metadata["topic"], pdf.metadata["filename"], pdf.mime) == (
        "whales",
        "a.pdf",
        "application/pdf",
    )
    assert (note.title, note.metadata["year"], note.mime) == ("On otters", 2020, "text/plain")
    [item] = ingestor.jobs.items(first.job_id, "failed")
    assert item.source == "broken.pdf"
    assert "corrupt" in (item.reason or "")
    runner.stop()
    assert spools(settings) == []


def test_a_name_given_again_replaces_its_document(ingestor: Ingestor, store: IndexStore) -> None:
    for text in ("First version.", "Second version.", "Second version."):
        ingestor.run(ingestor.submit_texts("sea", [SubmittedText("note", text)]).job_id)
    [document] = store.documents("sea")
    assert [chunk.text for chunk in store.document_chunks("sea", document.doc_id)] == ["Second version."]
    assert store.namespace("sea").version == 2  # the third was unchanged


def test_inline_text_is_text_whatever_it_looks_like(ingestor: Ingestor, store: IndexStore) -> None:
    ingestor.run(
        ingestor.submit_texts(
            "sea", [SubmittedText("a.html", "<html><body>kept as it is</body></html>")]
        ).job_id
    )
    [document] = store.documents("sea")
    assert store.document_chunks("sea", document.doc_id)[0].text == "<html><body>kept as it is</body></html>"


def test_a_text_that_comes_as_a_file_is_read_as_one(ingestor: Ingestor, store: IndexStore) -> None:
    page = "<html><body><p>Kept as it is.</p></body></html>"
    shown = []
    for _ in range(2):
        for job in (
            ingestor.submit_texts("sea", [SubmittedText("a.html", page)]),
            ingestor.submit_files("sea", [Upload("a.html", io.BytesIO(page.encode()))]),
        ):
            ingestor.run(job.job_id)
            [document] = store.documents("sea")
            shown += [chunk.text for chunk in store.document_chunks("sea", document.doc_id)]
    assert shown == [page, "Kept as it is.", page, "Kept as it is."]


def test_blank_texts_fail_as_empty(ingestor: Ingestor) -> None:
    report = ingestor.run(
        ingestor.submit_texts("sea", [SubmittedText("blank", " \n\t"), SubmittedText("none", "")]).job_id
    )
    assert [reason.split(":")[0] for _, reason in report.failures] == ["empty", "empty"]


def test_what_cannot_be_taken_is_refused_and_leaves_nothing(
    settings: Settings, store: IndexStore, embedder: Embedder
) -> None:
    ingestor = Ingestor(load(data_dir=settings.data_dir, max_upload_bytes=1024), store, embedder)
    with pytest.raises(TooLarge, match=r"b\.txt"):
        ingestor.submit_files(
            "sea", [Upload("a.txt", io.BytesIO(b"x")), Upload("b.txt", io.BytesIO(bytes(1025)))]
        )
    with pytest.raises(InvalidRequest, match="twice"):
        ingestor.submit_texts("sea", [SubmittedText("a", "x"), SubmittedText("/a", "y")])
    with pytest.raises(InvalidRequest, match="Unicode"):
        ingestor.submit_texts("sea", [SubmittedText("a", "lone \ud800 surrogate")])
    with pytest.raises(InvalidRequest, match="Nothing"):
        ingestor.submit_files("sea", [])
    assert spools(settings) == []
    assert ingestor.jobs.list() == []


def test_a_job_left_by_a_crashed_server_is_finished_by_the_next(
    ingestor: Ingestor, runner: JobRunner, store: IndexStore
) -> None:
    job = ingestor.submit_texts("sea", [SubmittedText(f"n{i}", f"Note {i}.") for i in range(20)])
    assert ingestor.jobs.claim("crashed", -1.0, job.job_id) is not None
    runner.start()
    assert wait_for_end(ingestor, job).state == "done"
    assert store.namespace("sea").n_documents == 20


def test_a_job_that_was_running_when_two_servers_died_is_not_run_again(
    ingestor: Ingestor, runner: JobRunner, settings: Settings
) -> None:
    job = ingestor.submit_texts("sea", [SubmittedText("a", "b")])
    for server in ("first", "second"):
        assert ingestor.jobs.claim(server, -1.0, job.job_id) is not None
    other = ingestor.submit_texts("sea", [SubmittedText("c", "d")])
    runner.start()
    assert wait_for_end(ingestor, other).state == "done"
    failed = ingestor.jobs.get(job.job_id)
    assert (failed.state, failed.counts["pending"]) == ("failed", 1)
    assert "died twice" in (failed.error or "")
    runner.stop()  # it tidies, too
    ingestor.tidy()
    assert spools(settings) == []


class FakeWorker:
    """Notes the jobs that it is given, and runs those of ``slow`` until it is told to stop."""

    def __init__(self, jobs: JobStore, slow: str = "") -> None:
        self.jobs, self._slow = jobs, slow
        self.ran: list[str] = []

    def run(self, job_id: str, *, stop: threading.Event | None = None) -> JobReport:
        def work(run: JobRun) -> None:
            self.ran.append(run.job.namespace)
            if run.job.namespace == self._slow and len(self.ran) < 5:
                assert stop is not None
                assert stop.wait(_LONG_S)
                raise Interrupted

        return run_leased(self.jobs, job_id, work, stop=stop)

    def tidy(self) -> int:
        return 0


def run_all(worker: FakeWorker) -> list[str]:
    """The namespaces in the order in which their jobs were run."""
    runner = JobRunner(worker)
    runner.start()
    deadline = time.monotonic() + _LONG_S
    while any(not job.finished for job in worker.jobs.list()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    runner.stop(_LONG_S)
    return worker.ran


def test_namespaces_take_turns(store: IndexStore) -> None:
    jobs = JobStore(store)
    for namespace in ("busy", "busy", "busy", "quiet", "late"):
        jobs.create(namespace, {"kind": "upload"}, ["a"])
    assert run_all(FakeWorker(jobs)) == ["busy", "quiet", "late", "busy", "busy"]


@pytest.mark.parametrize("is_cancelled", [False, True])
@pytest.mark.parametrize("error", [StorageFull("No space left."), OSError(errno.EROFS, "Read-only")])
def test_a_job_that_cannot_be_claimed_waits_and_is_told_in_a_line(
    store: IndexStore, caplog: pytest.LogCaptureFixture, error: Exception, is_cancelled: bool
) -> None:
    jobs = JobStore(store)
    first = jobs.create("sea", {"kind": "upload"}, ["a"]).job_id
    assert jobs.claim("a server that stops", 60.0, first) is not None
    if is_cancelled:
        jobs.request_cancel(first)
    jobs.release(first, "a server that stops")
    jobs.create("sea", {"kind": "upload"}, ["a"])

    class Full(FakeWorker):
        def run(self, job_id: str, *, stop: threading.Event | None = None) -> JobReport:
            if job_id == first and len(self.ran) < 3:
                self.ran.append("full")
                raise error
            report = super().run(job_id, stop=stop)
            if job_id != first:
                jobs.finish(first, "done")
            return report

    assert run_all(Full(jobs)) == ["full", "sea"]
    [told] = [record for record in caplog.records if "failed" in record.getMessage()]
    assert str(error.args[-1]) in told.getMessage()
    assert told.exc_info is None


def test_a_long_job_is_interrupted_for_others_alone(
    store: IndexStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragserve.ingest.jobs.runner._TURN_S", 0.05)
    jobs = JobStore(store)
    for namespace in ("slow", "slow", "quick", "quick", "other"):
        jobs.create(namespace, {"kind": "upload"}, ["a"])
    worker = FakeWorker(jobs, "slow")
    ran = run_all(worker)
    assert ran == ["slow", "quick", "other", "slow", "quick", "slow", "slow"]
    assert all(job.error is None for job in jobs.list())


def test_jobs_of_the_command_line_are_not_the_servers(
    ingestor: Ingestor, runner: JobRunner, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("x")
    paths = ingestor.submit_paths("sea", [str(tmp_path / "a.txt")])
    runner.start()
    wait_for_end(ingestor, ingestor.submit_texts("sea", [SubmittedText("a", "b")]))
    assert ingestor.jobs.get(paths.job_id).state == "queued"


class HeldIngestor:
    """An ingestor that waits after its first batch until its runner is stopped."""

    def __init__(self, ingestor: Ingestor) -> None:
        self._ingestor, self.jobs, self.tidy = ingestor, ingestor.jobs, ingestor.tidy
        self.began = threading.Event()

    def run(self, job_id: str, *, stop: threading.Event | None = None) -> JobReport:
        assert stop is not None

        def hold(progress: Progress) -> None:
            if progress.indexed:
                self.began.set()
                stop.wait(_LONG_S)

        return self._ingestor.run(job_id, on_progress=hold, stop=stop)


def test_a_stopped_runner_leaves_its_job_for_the_next(
    ingestor: Ingestor, store: IndexStore, settings: Settings
) -> None:
    job = ingestor.submit_texts("sea", [SubmittedText(f"n{i}", f"Note {i}.") for i in range(300)])
    held = HeldIngestor(ingestor)
    first = JobRunner(held)
    first.start()
    assert held.began.wait(_LONG_S)
    first.stop(_LONG_S)
    left = ingestor.jobs.get(job.job_id)
    assert not left.finished
    assert 0 < left.counts["indexed"] < 300
    second = JobRunner(ingestor)
    second.start()
    assert wait_for_end(ingestor, job).state == "done"
    second.stop()
    assert store.namespace("sea").n_documents == 300
    assert spools(settings) == []


def test_the_input_of_a_command_that_was_killed_is_kept_for_a_day(
    ingestor: Ingestor, settings: Settings
) -> None:
    killed, cancelled, later = (
        ingestor.submit_files("sea", [Upload("note.txt", io.BytesIO(b"Otters hold hands."))], kind="stdin")
        for _ in range(3)
    )
    for job in (killed, cancelled):
        assert ingestor.jobs.claim("a command that was killed", -1.0, job.job_id) is not None
    assert ingestor.jobs.request_cancel(cancelled.job_id).state == "cancelled"
    assert ingestor.tidy() == 1
    with clock(86_000):
        assert ingestor.tidy() == 0
        assert ingestor.run(later.job_id).state == "done"
    with clock(87_000):
        assert ingestor.tidy() == 1
    assert ingestor.jobs.get(killed.job_id).state == "cancelled"
    assert spools(settings) == []


def test_abandoned_spools_are_removed_at_start_and_needed_ones_kept(
    ingestor: Ingestor, runner: JobRunner, settings: Settings
) -> None:
    needed = ingestor.submit_texts("sea", [SubmittedText("a", "b")])
    spool = Spool(settings.data_dir)
    written = threading.Event()
    leave = threading.Event()

    def upload_slowly() -> None:
        with spool.writing():
            written.set()
            leave.wait(_LONG_S)

    orphan = settings.data_dir / "uploads" / "0123456789ab"
    orphan.mkdir()
    (orphan / "lock").touch()
    (orphan / "00000.bin").write_bytes(b"left by a process that was killed while it wrote")
    writer = threading.Thread(target=upload_slowly)
    writer.start()
    assert written.wait(_LONG_S)
    try:
        assert spool.clean(ingestor.spools_in_use) == 1
        assert not orphan.exists()
        assert len(spools(settings)) == 2
    finally:
        leave.set()
        writer.join()
    assert ingestor.run(needed.job_id).progress.indexed == 1


class TakenOver:
    """An embedder, during whose work another worker takes the job over, as one does whose lease ran out."""

    name, dim = "slow", 4

    def __init__(self, error: Exception | None) -> None:
        self.error = error
        self.take_over: Callable[[], object] = lambda: None

    def encode(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        self.take_over()
        if self.error is not None:
            raise self.error
        return np.eye(1, 4, dtype=np.float32).repeat(len(texts), axis=0)


def take_over(jobs: JobStore, job: Job) -> None:
    while jobs.claim("another", 600.0, job.job_id) is None:  # the lease may be renewed in between
        assert jobs.heartbeat(job.job_id, jobs.get(job.job_id).worker or "", -1.0)


@pytest.mark.parametrize("error", [None, OSError(errno.ENODEV, "no such device")], ids=["done", "failed"])
def test_a_worker_without_its_lease_ends_nothing(
    settings: Settings, store: IndexStore, error: Exception | None
) -> None:
    embedder = TakenOver(error)
    ingestor = Ingestor(settings, store, embedder)
    jobs, job = ingestor.jobs, ingestor.submit_texts("sea", [SubmittedText("a", "b")])
    embedder.take_over = lambda: take_over(jobs, job)
    with pytest.raises(Conflict) as refused:
        ingestor.run(job.job_id)
    assert refused.value.code in ("job_lost", "job_lease_lost")
    now = jobs.get(job.job_id)
    assert (now.state, now.worker, now.error is None) == ("running", "another", False), "its worker died"
    assert len(spools(settings)) == 1, "the other worker reads them"
    embedder.take_over, embedder.error = (lambda: None), None
    jobs.release(job.job_id, "another")
    assert ingestor.run(job.job_id).state == "done"
    assert spools(settings) == []


@pytest.mark.parametrize("error", [None, Interrupted(), ValueError("odd")], ids=repr)
def test_jobs_of_every_kind_end_for_their_worker_alone(store: IndexStore, error: Exception | None) -> None:
    jobs = JobStore(store)
    job = jobs.create("n", {"kind": "warm"}, ["a"])

    def work(run: JobRun) -> None:
        take_over(jobs, job)
        if error is not None:
            raise error

    try:
        assert run_leased(jobs, job.job_id, work).state == "interrupted"
        assert isinstance(error, Interrupted)
    except Conflict:  # that of an interrupted one, if it was seen in time
        pass
    assert (jobs.get(job.job_id).state, jobs.get(job.job_id).worker) == ("running", "another")


def test_a_spool_removed_from_outside_fails_the_job_plainly(ingestor: Ingestor, settings: Settings) -> None:
    job = ingestor.submit_texts("sea", [SubmittedText("a", "b")])
    for folder in spools(settings):
        Spool(settings.data_dir).remove(folder.name)
    with pytest.raises(NotFound, match="gone"):
        ingestor.run(job.job_id)
    assert ingestor.jobs.get(job.job_id).state == "failed"


@pytest.mark.parametrize(("named", "said"), [(None, "/data"), ("/tmp/download", "/tmp/download")])
def test_the_disk_that_is_full_is_that_of_the_file(named: str | None, said: str) -> None:
    with pytest.raises(StorageFull, match=f"on the disk of {said}"), unusable_disk_explained(Path("/data")):
        raise OSError(errno.ENOSPC, "No space left on device", named)
