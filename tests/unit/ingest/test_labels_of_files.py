"""Labels that come with a file are about its text: the text before, or another one, never gets them."""

from __future__ import annotations

import io
import threading
from typing import Any

import pytest

from ragserve.ingest.ingestor import Ingestor
from ragserve.ingest.jobs.job_report import JobReport
from ragserve.ingest.parsing.parse_process import ParseProcess, ParseRequest
from ragserve.ingest.submissions import Upload
from ragserve_index import IndexStore
from ragserve_index.viewers import UNLABELLED

NAME = "salaries.txt"
SECRET = b"The head earns 9,000."


def upload(
    ingestor: Ingestor, data: bytes, labels: tuple[str, ...] | None, *, stop: threading.Event | None = None
) -> JobReport:
    files = [Upload(NAME, io.BytesIO(data), labels=labels)]
    return ingestor.run(ingestor.submit_files("lab", files).job_id, stop=stop)


def labels(store: IndexStore) -> tuple[str, ...]:
    document = store.find_source("lab", NAME)
    assert document is not None
    return document.labels


def texts_seen_by_all(store: IndexStore) -> list[str]:
    seen = store.seen_by(UNLABELLED)
    return [c.text for d in seen.documents("lab") for c in seen.document_chunks("lab", d.doc_id)]


@pytest.fixture
def salaries(ingestor: Ingestor) -> Ingestor:
    upload(ingestor, SECRET, ("hr",))
    return ingestor


@pytest.mark.parametrize(
    "data", [b"%PDF-1.7 broken", b"", b"\x00\x01\x02"], ids=["corrupt", "empty", "binary"]
)
def test_a_file_that_fails_shows_nobody_the_text_before(
    salaries: Ingestor, store: IndexStore, data: bytes
) -> None:
    assert upload(salaries, data, ()).progress.failed == 1
    assert labels(store) == ("hr",)
    assert texts_seen_by_all(store) == []
    assert upload(salaries, b"Soup on Monday.", ()).progress.indexed == 1
    assert texts_seen_by_all(store) == ["Soup on Monday."]


def test_a_job_that_is_stopped_or_cancelled_changes_no_labels(salaries: Ingestor, store: IndexStore) -> None:
    stopped = threading.Event()
    stopped.set()
    assert upload(salaries, b"Soup on Monday.", (), stop=stopped).state == "interrupted"
    assert labels(store) == ("hr",)
    files = [Upload(NAME, io.BytesIO(b"Soup on Monday."), labels=())]
    job = salaries.submit_files("lab", files)
    assert salaries.jobs.claim("a server that dies", 60.0, job.job_id) is not None
    salaries.jobs.request_cancel(job.job_id)
    assert salaries.jobs.heartbeat(job.job_id, "a server that dies", -1.0)
    assert salaries.run(job.job_id).state == "cancelled"
    assert labels(store) == ("hr",)


def test_an_unchanged_file_takes_new_labels(salaries: Ingestor, store: IndexStore) -> None:
    for given, expected in ((None, ("hr",)), (("board",), ("board",)), ((), ())):
        assert upload(salaries, SECRET, given).progress.unchanged == 1
        assert labels(store) == expected


def test_labels_are_not_those_of_a_text_that_came_meanwhile(
    salaries: Ingestor, store: IndexStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload(salaries, b"Soup on Monday.", ("hr",))
    parse = ParseProcess.parse
    once = iter([True])

    def replaced_meanwhile(self: ParseProcess, request: ParseRequest) -> Any:
        result = parse(self, request)
        if next(once, False):
            assert upload(salaries, SECRET, None).progress.indexed == 1
        return result

    monkeypatch.setattr(ParseProcess, "parse", replaced_meanwhile)
    report = upload(salaries, b"Soup on Monday.", ())
    assert (report.progress.unchanged, report.progress.failed) == (0, 1)
    assert "meanwhile" in report.failures[0][1]
    assert labels(store) == ("hr",)
    assert texts_seen_by_all(store) == []
