"""Folders in S3-compatible storage, on a real server: incremental, exact about failures, and no deletion
that a complete listing does not show."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ragserve.config import Settings
from ragserve.errors import InvalidRequest, RagserveError
from ragserve.ingest.connectors.base import Limits, write_blocks
from ragserve.ingest.connectors.s3_folder import S3Folder
from ragserve.ingest.connectors.source_addresses import S3Address, is_elsewhere, parse_address
from ragserve.ingest.ingestor import Ingestor, PathOptions
from ragserve.ingest.jobs.job_report import JobReport
from ragserve_index import IndexStore
from tests.unit.ingest.s3_server import S3Server, s3_server
from tests.unit.no_room import no_room

LIMITS = Limits(file_bytes=2**20, all_bytes=2**20, files=100_000)


class OneVector:
    """An embedder that costs nothing: what is found is not what these tests are about."""

    name, dim = "one", 4

    def encode(self, texts: Sequence[str]) -> Any:
        return np.eye(1, 4, dtype=np.float32).repeat(len(texts), axis=0)


@pytest.fixture(scope="module")
def _s3() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture
def s3(_s3: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[S3Server]:
    config = tmp_path / "aws-config"
    config.write_text(
        "[profile office]\naws_access_key_id = OFFICEKEY\naws_secret_access_key = office-secret\n"
        f"region = eu-north-1\nendpoint_url = {_s3.endpoint}\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", _s3.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "KEYOFTHETEST")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-the-test")
    yield _s3
    _s3.reset()


@pytest.fixture
def bucket(s3: S3Server, tmp_path: Path) -> str:
    """A new bucket with three notes in the folder ``docs``, one below it, and one beside it."""
    name = f"b-{abs(hash(tmp_path)):x}"
    s3.make(name)
    for key in ("docs/otters.md", "docs/whales.md", "docs/deep/squids.md", "docs-old/dodos.md"):
        s3.put(name, key, f"# {key}\n\nA few words about it.\n")
    return name


@pytest.fixture
def ingestor(settings: Settings, store: IndexStore) -> Ingestor:
    return Ingestor(settings, store, OneVector())


def ingest(ingestor: Ingestor, *inputs: str, namespace: str = "sea", **options: Any) -> JobReport:
    job = ingestor.submit_paths(namespace, inputs, PathOptions(**options))
    return ingestor.run(job.job_id)


def outcomes(report: JobReport) -> tuple[int, int, int, int]:
    return report.progress.indexed, report.progress.unchanged, report.progress.failed, report.progress.removed


def sources(store: IndexStore, namespace: str = "sea") -> list[str]:
    return sorted(document.source for document in store.documents(namespace, limit=10_000))


def test_a_folder_is_ingested_and_only_what_changed_is_read_again(
    ingestor: Ingestor, store: IndexStore, s3: S3Server, bucket: str
) -> None:
    address = f"s3://{bucket}/docs/"
    report = ingest(ingestor, address, metadata={"topic": "sea"})
    assert (report.state, outcomes(report)) == ("done", (3, 0, 0, 0))
    assert report.skipped == ((f"s3://{bucket}/docs", "a folder: 3 files, 3 new or changed"),)
    assert sources(store) == [
        f"s3://{bucket}/docs/{name}" for name in ("deep/squids.md", "otters.md", "whales.md")
    ]
    document = store.find_source("sea", f"s3://{bucket}/docs/otters.md")
    assert document is not None
    expected = {"path": document.source, "filename": "otters.md", "ext": ".md", "title": "docs/otters.md"}
    assert dict(document.metadata) == expected | {"topic": "sea"}
    assert s3.read() == ["docs/deep/squids.md", "docs/otters.md", "docs/whales.md"]

    report = ingest(ingestor, address, metadata={"topic": "sea"})
    assert (outcomes(report), s3.read()) == ((0, 3, 0, 0), []), "nothing changed, nothing is read"
    assert ingestor.jobs.get(report.job_id).n_items == 1, "what is unchanged takes no room"

    s3.put(bucket, "docs/otters.md", "# Otters\n\nOther words.\n")
    s3.put(bucket, "docs/seals.md", "# Seals\n\nNew words.\n")
    report = ingest(ingestor, address, metadata={"topic": "sea"})
    assert (outcomes(report), s3.read()) == ((2, 2, 0, 0), ["docs/otters.md", "docs/seals.md"])

    report = ingest(ingestor, address, metadata={"topic": "ocean"})
    assert outcomes(report) == (4, 0, 0, 0), "other metadata makes other documents"


def test_folders_that_overlap_count_each_file_once(ingestor: Ingestor, bucket: str) -> None:
    given = [f"s3://{bucket}/docs/", f"S3://{bucket}/docs", f"s3://{bucket}/docs/deep"]
    assert outcomes(ingest(ingestor, *given)) == (3, 0, 0, 0)
    assert outcomes(ingest(ingestor, *given)) == (0, 3, 0, 0)


def test_a_vanished_object_is_removed_if_it_came_from_this_folder(
    ingestor: Ingestor, store: IndexStore, s3: S3Server, bucket: str, tmp_path: Path
) -> None:
    (tmp_path / "notes.md").write_text("# Notes\n\nOf this machine.\n")
    ingest(ingestor, f"s3://{bucket}/docs", str(tmp_path / "notes.md"))
    ingest(ingestor, f"s3://{bucket}/docs-old")
    for key in ("docs/otters.md", "docs-old/dodos.md"):
        s3.remove(bucket, key)
    s3.put(bucket, "docs-old/moas.md", "# Moas\n\nWords.\n")
    gone = f"s3://{bucket}/docs/otters.md"
    report = ingest(ingestor, f"s3://{bucket}/docs")
    assert report.vanished == (gone,)
    assert gone in sources(store), "only --prune removes"
    report = ingest(ingestor, f"s3://{bucket}/docs", prune=True, globs=("*.pdf",))
    assert outcomes(report)[3] == 0, "files that the globs leave out are none of this run's"
    report = ingest(ingestor, f"s3://{bucket}/docs", prune=True)
    assert (outcomes(report)[3], report.vanished) == (1, (gone,))
    assert sources(store) == sorted(
        [
            str(tmp_path / "notes.md"),
            *(
                f"s3://{bucket}/{key}"
                for key in ("docs-old/dodos.md", "docs/deep/squids.md", "docs/whales.md")
            ),
        ]
    )


@pytest.mark.parametrize(
    ("fault", "said"),
    [("403", "AccessDenied: as the test"), ("no-token", "breaks off"), ("empty", "no object")],
)
def test_a_listing_that_fails_or_is_cut_removes_nothing(
    ingestor: Ingestor, store: IndexStore, s3: S3Server, bucket: str, fault: str, said: str
) -> None:
    ingest(ingestor, f"s3://{bucket}/docs")
    before = sources(store)
    if fault == "empty":
        for key in ("docs/otters.md", "docs/whales.md", "docs/deep/squids.md"):
            s3.remove(bucket, key)
    else:
        s3.remove(bucket, "docs/otters.md")
        s3.breaks = lambda _path, query: fault if "list-type" in query else ""
    report = ingest(ingestor, f"s3://{bucket}/docs", prune=True)
    assert (report.state, outcomes(report)) == ("done", (0, 0, 1, 0))
    assert said in report.failures[0][1]
    assert sources(store) == before


def test_a_page_in_the_middle_that_fails_removes_nothing(
    ingestor: Ingestor, store: IndexStore, s3: S3Server, bucket: str
) -> None:
    ingest(ingestor, f"s3://{bucket}/docs")
    before = sources(store)
    s3.page = 1
    s3.remove(bucket, "docs/whales.md")
    s3.breaks = lambda _path, query: "403" if "continuation-token" in query else ""
    report = ingest(ingestor, f"s3://{bucket}/docs", prune=True)
    assert (outcomes(report), sources(store)) == ((0, 0, 1, 0), before)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("403", "AccessDenied"),
        ("404", "removed since the listing"),
        ("cut", "not reachable: "),
    ],
)
def test_an_object_that_cannot_be_read_fails_alone_and_keeps_its_old_edition(
    ingestor: Ingestor, store: IndexStore, s3: S3Server, bucket: str, fault: str, said: str
) -> None:
    ingest(ingestor, f"s3://{bucket}/docs")
    for key in ("docs/otters.md", "docs/whales.md"):
        s3.put(bucket, key, "# Changed\n\nOther words than before.\n")
    s3.breaks = lambda path, _query: fault if path.endswith("otters.md") else ""
    report = ingest(ingestor, f"s3://{bucket}/docs", prune=True)
    assert outcomes(report) == (1, 1, 1, 0)
    ((source, reason),) = report.failures
    assert source.endswith("otters.md")
    assert said in reason
    old = store.find_source("sea", source)
    assert old is not None
    assert old.title == "docs/otters.md"
    s3.reset()
    assert outcomes(ingest(ingestor, f"s3://{bucket}/docs")) == (1, 2, 0, 0), "the next run reads it"


def test_a_busy_storage_is_asked_again_and_a_slow_one_waited_for(
    ingestor: Ingestor, s3: S3Server, bucket: str
) -> None:
    once = ["503", "slow"]
    s3.breaks = lambda path, _query: once.pop(0) if once and path.endswith("otters.md") else ""
    assert outcomes(ingest(ingestor, f"s3://{bucket}/docs")) == (3, 0, 0, 0)
    assert not once


def test_an_object_that_changes_between_listing_and_reading_is_the_edition_that_was_read(
    ingestor: Ingestor, store: IndexStore, s3: S3Server, bucket: str
) -> None:
    changed: list[str] = []

    def change(key: str) -> None:
        if key.endswith("otters.md") and not changed:
            changed.append(key)
            s3.put(bucket, key, "# Later\n\nWritten after the listing.\n")

    s3.before = change
    assert outcomes(ingest(ingestor, f"s3://{bucket}/docs")) == (3, 0, 0, 0)
    document = store.find_source("sea", f"s3://{bucket}/docs/otters.md")
    assert document is not None
    assert document.title == "Later"
    assert outcomes(ingest(ingestor, f"s3://{bucket}/docs")) == (0, 3, 0, 0)


def test_names_are_labels_however_odd(
    ingestor: Ingestor, store: IndexStore, s3: S3Server, bucket: str
) -> None:
    odd = [
        "/lead.md",
        "a b.md",
        "../up.md",
        "x/../y.md",
        "tu\u0308r.md",
        "A.md",
        "a.md",
        "tab\there.md",
        "q?#%41.md",
    ]
    for key in odd:
        s3.put(bucket, f"odd/{key}", f"# One\n\nThe words of {key}.\n")
    s3.put(bucket, "odd/t\u00fcr.md", "the same name in another form of Unicode")
    s3.put(bucket, "odd/.hidden.md", "not for readers")
    s3.put(bucket, "odd/folder/", b"")
    report = ingest(ingestor, f"s3://{bucket}/odd")
    assert sources(store) == sorted(f"s3://{bucket}/odd/{key}" for key in odd)
    ((source, reason),) = report.failures
    assert "Unicode form" in reason
    assert source == f"s3://{bucket}/odd/t\u00fcr.md", "the second in the order of the listing"
    assert report.skipped[0][1].endswith("left out: 1 hidden files")
    report = ingest(ingestor, f"s3://{bucket}/odd", prune=True)
    assert outcomes(report) == (0, len(odd), 1, 0)


def test_what_is_too_large_or_never_text_is_not_downloaded(
    settings: Settings, store: IndexStore, s3: S3Server, bucket: str
) -> None:
    small = settings.model_copy(update={"max_upload_bytes": 1_000_000})
    s3.put(bucket, "mixed/large.txt", b"word " * 300_000)
    s3.put(bucket, "mixed/film.mp4", b"\x00\x00\x00\x18ftypmp42" + bytes(900_000))
    s3.put(bucket, "mixed/note.txt", "a note")
    report = ingest(Ingestor(small, store, OneVector()), f"s3://{bucket}/mixed")
    assert outcomes(report) == (1, 0, 1, 0)
    assert "1,500,000 bytes" in report.failures[0][1]
    assert [source.rpartition("/")[2] for source, _ in report.skipped] == ["mixed", "film.mp4"]
    assert s3.read() == ["mixed/film.mp4", "mixed/note.txt"]


def test_the_address_of_one_object_takes_it_alone(
    ingestor: Ingestor, store: IndexStore, s3: S3Server, bucket: str
) -> None:
    one = f"s3://{bucket}/docs/otters.md"
    assert outcomes(ingest(ingestor, one, prune=True)) == (1, 0, 0, 0)
    assert outcomes(ingest(ingestor, one, prune=True)) == (0, 1, 0, 0)
    assert sources(store) == [one]
    report = ingest(ingestor, f"s3://{bucket}/docs/otter")
    assert "no object" in report.failures[0][1]


def test_a_profile_has_its_own_credentials_which_nothing_shows(
    ingestor: Ingestor, store: IndexStore, s3: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    report = ingest(ingestor, f"s3://office@{bucket}/docs")
    assert outcomes(report) == (3, 0, 0, 0)
    assert sources(store)[0].startswith(f"s3://office@{bucket}/docs/")
    report = ingest(ingestor, f"s3://nobody@{bucket}/docs")
    assert "no profile 'nobody'" in report.failures[0][1]
    files = [path for path in store.data_dir.rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if b"office-secret" in path.read_bytes()]


def test_a_long_listing_is_read_page_by_page(s3: S3Server, bucket: str) -> None:
    s3.page = 100
    for n in range(1000):
        s3.put(bucket, f"many/{n:04}.md", b"")
    folder = S3Folder(S3Address(bucket, "many"), LIMITS, lambda: False)
    assert [file.name for file in folder.files()] == [f"{n:04}.md" for n in range(1000)]
    assert len(s3.asked) == 10
    few = S3Folder(S3Address(bucket, "many"), Limits(1, 1, files=250), lambda: False)
    with pytest.raises(RagserveError, match="more than 250 objects"):
        list(few.files())


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("s3://", "names no bucket"),
        ("s3:///key", "names no bucket"),
        ("s3://KEY:secret@bucket/docs", "Leave user, password and token out"),
        ("s3://bucket/a/../b", "no . and no .."),
        ("s3://b\x00/x", "printable"),
        (f"s3://bucket/{'x' * 3000}", "at most 2,048"),
    ],
)
def test_a_wrong_address_gets_one_error_that_repeats_no_secret(
    ingestor: Ingestor, address: str, said: str
) -> None:
    assert is_elsewhere(address)
    with pytest.raises(InvalidRequest) as wrong:
        ingest(ingestor, address)
    assert said in str(wrong.value)
    assert "secret" not in str(wrong.value)


def test_an_address_has_one_form() -> None:
    for text in ("s3://bucket/docs", "S3://bucket/docs/", "s3://bucket/docs//"):
        assert str(parse_address(text)) == "s3://bucket/docs"
    assert str(parse_address("s3://bucket")) == str(parse_address("s3://bucket/")) == "s3://bucket/"


def test_a_file_without_room_is_named(tmp_path: Path) -> None:
    path = tmp_path / "download"
    with pytest.raises(OSError, match=re.escape(str(path))), no_room():
        write_blocks(iter([b"text"]), path, "a.txt", Limits(100, 100, 1), lambda: None)
