"""Folders of git repositories, real ones: incremental, bounded, and with nothing run that they bring."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ragserve.config import Settings
from ragserve.errors import InvalidRequest, StorageFull
from ragserve.ingest.connectors import git_folder
from ragserve.ingest.connectors.source_addresses import covers, parse_address
from ragserve.ingest.ingestor import Ingestor
from ragserve_index import IndexStore
from tests.unit.ingest.git_server import GitServer, Repository, git_server
from tests.unit.ingest.test_s3 import OneVector, ingest, outcomes, sources


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home folder of the test's own, as git reads it."""
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    repository = Repository(tmp_path / "repositories" / "handbook")
    repository.write_all(
        {
            "README.md": "# Handbook\n\nHow we work.\n",
            "docs/pay.md": "# Pay\n\nOn the last day.\n",
            "docs/deep/leave.md": "# Leave\n\nThirty days.\n",
            ".ci/steps.yml": "hidden: true\n",
        }
    )
    return repository


@pytest.fixture
def server(repository: Repository) -> Iterator[GitServer]:
    with git_server(repository.path.parent) as server:
        yield server


@pytest.fixture
def ingestor(settings: Settings, store: IndexStore) -> Ingestor:
    return Ingestor(settings, store, OneVector())


def test_a_repository_is_ingested_and_only_what_changed_is_brought(
    ingestor: Ingestor, store: IndexStore, repository: Repository, server: GitServer
) -> None:
    address = f"{server.url}/handbook/.git"
    report = ingest(ingestor, address)
    assert (report.failures, outcomes(report)) == ((), (3, 0, 0, 0))
    assert report.skipped == (
        (f"{address}#HEAD:", "a folder: 3 files, 3 new or changed; left out: 1 hidden files"),
    )
    assert sources(store) == [
        f"{address}#HEAD:{name}" for name in ("README.md", "docs/deep/leave.md", "docs/pay.md")
    ]
    server.asked.clear()
    assert outcomes(ingest(ingestor, address)) == (0, 3, 0, 0)
    asked_unchanged = len(server.asked)

    repository.write_all({"docs/pay.md": "# Pay\n\nOn the first day.\n", "noise.bin": os.urandom(300_000)})
    (repository.path / "README.md").unlink()
    (repository.path / "noise.bin").unlink()
    repository.commit()
    server.asked.clear()
    server.sent = 0
    report = ingest(ingestor, address, prune=True)
    assert outcomes(report) == (1, 1, 0, 1)
    assert report.vanished == (f"{address}#HEAD:README.md",)
    assert len(server.asked) == asked_unchanged + 2, "one more exchange, for all that changed"
    assert server.sent < 100_000, "shallow: what earlier commits had is not sent"


def test_a_branch_a_tag_and_a_folder_are_chosen(
    ingestor: Ingestor, store: IndexStore, repository: Repository
) -> None:
    repository.git("tag", "v1", "--annotate", "--message", "m")
    repository.git("checkout", "--quiet", "-b", "next/one")
    repository.write_all({"docs/pay.md": "# Pay\n\nNext year.\n", "docs/new.md": "# New\n\nWords.\n"})
    for place in ("next/one:docs", "v1:docs/", "main:docs/deep"):
        report = ingest(ingestor, f"{repository.address}#{place}")
        assert report.failures == ()
    names = [source.removeprefix(repository.address) for source in sources(store)]
    assert names == [
        "#main:docs/deep/leave.md",
        *(f"#next/one:docs/{name}" for name in ("deep/leave.md", "new.md", "pay.md")),
        *(f"#v1:docs/{name}" for name in ("deep/leave.md", "pay.md")),
    ]


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("#missing", "no branch or tag 'missing'"),
        ("#main:nowhere", "no folder 'nowhere'"),
        ("#main:README.md", "no folder 'README.md'"),
    ],
)
def test_what_is_not_there_fails_with_its_reason_and_removes_nothing(
    ingestor: Ingestor, store: IndexStore, repository: Repository, place: str, said: str
) -> None:
    ingest(ingestor, f"{repository.address}#main")
    before = sources(store)
    report = ingest(ingestor, repository.address + place, prune=True)
    assert said in report.failures[0][1]
    assert (report.state, sources(store)) == ("done", before)


def test_a_repository_that_is_gone_or_forbidden_removes_nothing(
    ingestor: Ingestor, store: IndexStore, repository: Repository, server: GitServer
) -> None:
    address = f"{server.url}/handbook/.git"
    ingest(ingestor, address)
    before = sources(store)
    for status, said in ((403, "403"), (404, "not found"), (500, "500"), (302, "Give the address")):
        server.status, server.location = status, "http://127.0.0.1:9/elsewhere/info/refs"
        report = ingest(ingestor, address, prune=True)
        assert said in report.failures[0][1]
        assert sources(store) == before


def test_credentials_come_from_git_and_are_nowhere_else(
    ingestor: Ingestor,
    store: IndexStore,
    repository: Repository,
    server: GitServer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server.login = "reader:hunter2"
    address = f"{server.url}/handbook/.git"
    report = ingest(ingestor, address)
    assert "could not read Username" in report.failures[0][1], "nobody is asked for a password"
    place = server.url.removeprefix("git+http://")
    config = tmp_path / "home" / ".gitconfig"
    config.write_text('[credential]\n helper = "!f() { echo username=reader; echo password=hunter2; }; f"\n')
    assert outcomes(ingest(ingestor, address)) == (3, 0, 0, 0)
    # a rewritten URL has the secret in it, and git repeats URLs
    config.write_text(f'[url "http://reader:hunter2@{place}/"]\n insteadOf = http://{place}/\n')
    server.status = 403
    report = ingest(ingestor, address)
    assert "403" in report.failures[0][1]
    assert "hunter2" not in caplog.text + str(report)
    assert not [p for p in store.data_dir.rglob("*") if p.is_file() and b"hunter2" in p.read_bytes()]


def test_odd_entries_are_left_out_or_refused_alone(
    ingestor: Ingestor, store: IndexStore, repository: Repository, tmp_path: Path
) -> None:
    other = Repository(tmp_path / "other")
    other.write_all({"secret.md": "# Other\n\nNot asked for.\n"})
    repository.git(
        "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(other.path), "other"
    )
    os.symlink("/etc/hostname", repository.path / "link.md")
    names = ["a b.md", "tür.md", "line\nbreak.md", "Pay.md", "-dash.md", "q#?:%41.md"]
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 5\n"
    repository.write_all(
        {name: f"# One\n\nThe words of {name!r}.\n" for name in names} | {"film.md": pointer}
    )
    (repository.path / os.fsdecode(b"latin-\xe9.md")).write_text("not UTF-8")
    repository.commit()
    report = ingest(ingestor, repository.address)
    assert report.skipped[0][1].endswith("left out: 2 hidden files, 1 symbolic links, 1 submodules")
    reasons = {source.rpartition(":")[2]: reason for source, reason in report.failures}
    assert "Git LFS" in reasons.pop("film.md")
    assert "not UTF-8" in reasons.pop("latin-\\xe9.md")
    assert not reasons
    container = f"{repository.address}#HEAD:"
    found = [source.removeprefix(container) for source in sources(store)]
    assert found == sorted([*names, "README.md", "docs/deep/leave.md", "docs/pay.md"])


def test_nothing_of_a_repository_is_run(
    ingestor: Ingestor, repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = tmp_path / "ran"
    template = tmp_path / "template" / "hooks"
    template.mkdir(parents=True)
    for hook in ("post-checkout", "reference-transaction", "post-merge"):
        (template / hook).write_text(f"#!/bin/sh\ntouch {ran}\n")
        (template / hook).chmod(0o755)
    (tmp_path / "home" / ".gitconfig").write_text(
        f'[init]\n templateDir = {template.parent}\n[core]\n hooksPath = {template}\n[filter "x"]\n'
        f" smudge = touch {ran}\n process = touch {ran}\n"
    )
    repository.write_all({".gitattributes": "*.md filter=x\n"})
    ran.unlink(missing_ok=True)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    assert outcomes(ingest(ingestor, repository.address)) == (3, 0, 0, 0)
    assert not ran.exists()


def test_a_repository_that_has_the_current_directory_does_not_matter(
    ingestor: Ingestor, repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Repository(tmp_path / "here")
    here.git("config", f"url.{tmp_path}/nowhere/.insteadOf", f"file://{repository.path}")
    monkeypatch.chdir(here.path)
    assert outcomes(ingest(ingestor, repository.address)) == (3, 0, 0, 0)


def test_sizes_are_bounded(settings: Settings, store: IndexStore, repository: Repository) -> None:
    repository.write_all({"large.txt": b"word " * 400_000, "random.txt": os.urandom(3_000_000)})
    small = settings.model_copy(update={"max_upload_bytes": 1_000_000})
    report = ingest(Ingestor(small, store, OneVector()), f"{repository.address}#main")
    reasons = {source.rpartition(":")[2]: reason for source, reason in report.failures}
    assert "the limit is 1,000,000" in reasons["large.txt"]
    assert outcomes(report)[:3] == (3, 0, 2)
    few = settings.model_copy(update={"source_files": 3})
    report = ingest(Ingestor(few, store, OneVector()), repository.address, prune=True)
    assert "more than 3 files" in report.failures[0][1]
    assert len(sources(store)) == 3
    little = settings.model_copy(update={"source_bytes": 2**20})
    report = ingest(Ingestor(little, store, OneVector()), repository.address, namespace="other")
    assert {reason for _, reason in report.failures if "RAGSERVE_SOURCE_BYTES" in reason}


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("ext::sh -c touch% /tmp/x", "Folders elsewhere are"),
        ("git+ext://sh -c x", "Folders elsewhere are"),
        ("git://example.com/x", "Folders elsewhere are"),
        ("git@example.com:x/y", "Folders elsewhere are"),
        ("git+https://user:hunter2@example.com/x", "Leave user, password and token out"),
        ("git+https://hunter2@example.com/x", "Leave user, password and token out"),
        ("git+https://example.com/x?token=hunter2", "Leave user, password and token out"),
        ("git+ssh://git:hunter2@example.com/x", "Leave user, password and token out"),
        ("git+ssh://-oProxyCommand=x/y", "names no repository"),
        ("git+https://", "names no repository"),
        ("git+https://example.com", "names no repository"),
        ("git+file://relative/x", "names no repository"),
        ("git+https://[::1/x", "no URL"),
        ("git+https://example.com/x#-oops", "no name of a branch"),
        ("git+https://example.com/x#a..b", "no name of a branch"),
        ("git+https://example.com/x#refs/*", "no name of a branch"),
        ("git+https://example.com/x#main:a/../b", "no . and no .."),
    ],
)
def test_a_wrong_address_gets_one_error_that_repeats_no_secret(
    ingestor: Ingestor, address: str, said: str
) -> None:
    with pytest.raises(InvalidRequest) as wrong:
        ingest(ingestor, address)
    assert said in str(wrong.value)
    assert "hunter2" not in str(wrong.value)


@pytest.mark.parametrize(
    ("allowed", "asked", "yes"),
    [
        ("s3://acme/docs", "s3://acme/docs/pay", True),
        ("s3://acme/docs", "s3://acme/docs", True),
        ("s3://acme", "s3://acme/any", True),
        ("s3://acme/docs", "s3://acme/docs-secret", False),
        ("s3://acme/docs", "s3://acme", False),
        ("s3://acme/docs", "s3://office@acme/docs", False),
        ("s3://acme/docs", "s3://acme2/docs", False),
        ("git+https://h/r#main:docs", "git+https://h/r#main:docs/pay", True),
        ("git+https://h/r#main", "git+https://h/r#main:docs", True),
        ("git+https://h/r#main:docs", "git+https://h/r#next:docs", False),
        ("git+https://h/r", "git+https://h/r2", False),
        ("git+https://h/r", "git+ssh://h/r", False),
        ("git+https://acme/r", "s3://acme/r", False),
    ],
)
def test_an_allowed_folder_covers_what_is_in_it(allowed: str, asked: str, yes: bool) -> None:
    assert covers(parse_address(allowed), parse_address(asked)) is yes


@pytest.mark.parametrize(
    ("said", "ends"),
    [
        ("fatal: write error: No space left on device", True),
        ("fatal: remote error: No space left on device", False),
        ("remote: No space left on device", False),
    ],
    ids=["ours", "the server's", "told by it"],
)
def test_a_disk_without_room_for_a_clone_ends_the_run(
    ingestor: Ingestor,
    repository: Repository,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    said: str,
    ends: bool,
) -> None:
    program = tmp_path / "bin" / "git"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 128\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    if ends:
        with pytest.raises(StorageFull):
            ingest(ingestor, repository.address)
    else:
        assert outcomes(ingest(ingestor, repository.address)) == (0, 0, 1, 0)


def test_what_git_says_shows_no_password_of_a_rewritten_address(tmp_path: Path) -> None:
    said = tmp_path / "errors"
    said.write_text("fatal: unable to access 'https://bot:t0p@s3cret@git.example/a@b/': no route\n")
    with said.open() as errors:
        shown = git_folder._said(errors.fileno())
    assert shown == "fatal: unable to access 'https://***@git.example/a@b/': no route"
