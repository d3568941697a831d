"""`ragserve sync`: the list, runs over it, one at a time, and what a failure of one source leaves alone."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ragserve.commands import sync
from ragserve.engine.ports import hold_port, port_of
from ragserve.errors import EngineError
from ragserve.files import locked
from ragserve.ingest.jobs.lease import worker_name
from ragserve.metrics import exposition
from ragserve_index import IndexStore, JobStore
from ragserve_index.index.namespace_index import NamespaceIndex
from tests.unit.commands.test_ingest import ENVIRONMENT, QUICK, Cli, Done
from tests.unit.ingest.git_server import Repository
from tests.unit.ingest.test_s3 import OneVector, sources


@pytest.fixture
def ragserve(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Cli:
    monkeypatch.setattr("ragserve.retrieval.embedder.Embedder.of", lambda *_args, **_options: OneVector())
    monkeypatch.setattr("ragserve.ingest.ingestor.embedder_name", lambda _settings: OneVector.name)
    return Cli(monkeypatch, capfd, tmp_path)


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    repository = Repository(tmp_path / "handbook")
    repository.write_all(
        {"docs/pay.md": "# Pay\n\nOn the last day.\n", "docs/leave.md": "# Leave\n\nDays.\n"}
    )
    return repository


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "one.md").write_text("# One\n\nA note.\n")
    return folder


def reports(done: Done) -> list[dict[str, object]]:
    return [json.loads(line) for line in done.stdout.splitlines()]


def audited(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "ragserve-data" / "audit" / "audit.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def files(report: dict[str, object]) -> dict[str, int]:
    counts = report["files"]
    assert isinstance(counts, dict)
    return {
        name: n for name, n in counts.items() if n and name in ("indexed", "unchanged", "failed", "removed")
    }


def test_sources_of_a_list_are_kept_up_to_date(
    ragserve: Cli, repository: Repository, folder: Path, tmp_path: Path
) -> None:
    address = f"{repository.address}#main:docs"
    for source, namespace in ((address, "work"), ("notes", "private")):
        assert ragserve("sync", "add", source, "-n", namespace).returncode == 0
    done = ragserve("sync", "run", "--json")
    assert done.returncode == 0
    assert [(each["namespace"], files(each)) for each in reports(done)] == [
        ("private", {"indexed": 1}),
        ("work", {"indexed": 2}),
    ]
    repository.write_all({"docs/pay.md": "# Pay\n\nOn the first day.\n"})
    repository.git("rm", "--quiet", "docs/leave.md")
    repository.commit()
    (folder / "one.md").unlink()
    (folder / "two.md").write_text("# Two\n\nAnother note.\n")
    done = ragserve("sync", "run", "--json")
    assert [files(each) for each in reports(done)] == [
        {"indexed": 1, "removed": 1},
        {"indexed": 1, "removed": 1},
    ]
    listed = ragserve("sync", "ls").stdout
    assert re.search(r"private +/.*/notes\n +done 2.* UTC: 1 indexed, 1 removed\n", listed)
    assert f"work  {address}" in listed
    assert listed.endswith("2 sources\n")
    assert ragserve("sync", "rm", "notes", "-n", "private").returncode == 0
    done = ragserve("sync", "run", "--json", "-n", "work")
    assert [files(each) for each in reports(done)] == [{"unchanged": 1}]
    with IndexStore(tmp_path / "ragserve-data") as store:
        assert sources(store, "private") == [str(folder / "two.md")], "off the list: its documents stay"


def test_one_source_that_fails_leaves_the_others_alone(
    ragserve: Cli, repository: Repository, folder: Path, tmp_path: Path
) -> None:
    ragserve("sync", "add", f"{repository.address}#gone", "-n", "work")
    ragserve("sync", "add", "notes", "-n", "private")
    done = ragserve("sync", "run", "--json")
    assert done.returncode == 3
    assert [files(each) for each in reports(done)] == [{"indexed": 1}, {"failed": 1}]
    assert "no branch or tag 'gone'" in done.stdout
    assert "1 failed" in ragserve("sync", "ls").stdout


def test_a_job_that_is_cancelled_is_no_success(
    ragserve: Cli, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server may cancel it, or somebody drops its namespace meanwhile."""

    class Cancelling(OneVector):
        def encode(self, texts: Sequence[str]) -> Any:
            with IndexStore(tmp_path / "ragserve-data") as store:
                jobs = JobStore(store)
                for job in jobs.list("default", state="running"):
                    jobs.request_cancel(job.job_id)
            return super().encode(texts)

    monkeypatch.setattr("ragserve.retrieval.embedder.Embedder.of", lambda *_args, **_options: Cancelling())
    ragserve("sync", "add", "notes")
    line = re.compile(r'ragserve_syncs_total\{outcome="partly"\} (.+)\n')

    def partly() -> float:
        found = line.search(exposition()[0].decode())
        return 0.0 if found is None else float(found[1])

    before = partly()
    done = ragserve("sync", "run", "--json")
    assert [(each["state"], files(each)) for each in reports(done)] == [("cancelled", {})]
    assert done.returncode == 3
    assert partly() == before + 1
    assert f'source="{folder}"' not in exposition()[0].decode()
    assert ragserve("ingest", "notes").returncode == 3


def test_what_was_ingested_is_audited_though_it_cannot_be_warmed(
    ragserve: Cli, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def show_warm(*_: object, **__: object) -> None:
        raise EngineError("The engine has died.")

    monkeypatch.setattr("ragserve.commands.ingest.check_warm", lambda *_, **__: None)
    monkeypatch.setattr("ragserve.commands.ingest.show_warm", show_warm)
    assert ragserve("ingest", "notes", "--warm").returncode == 1
    (told,) = audited(tmp_path)
    assert (told["documents"], told["result"]) == (1, "done")


def test_what_vanished_is_kept_where_the_source_says_so(ragserve: Cli, folder: Path, tmp_path: Path) -> None:
    (folder / "two.md").write_text("# Two\n\nAnother note.\n")
    ragserve("sync", "add", "notes", "--keep")
    ragserve("sync", "run")
    (folder / "one.md").unlink()
    (report,) = reports(ragserve("sync", "run", "--json"))
    assert (files(report), report["vanished"]) == ({"unchanged": 1}, [str(folder / "one.md")])
    assert audited(tmp_path)[-1]["removed"] == 0
    assert ragserve("sync", "add", "notes").stdout.startswith("changed:")
    (report,) = reports(ragserve("sync", "run", "--json"))
    assert files(report) == {"unchanged": 1, "removed": 1}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("add", "nowhere"), "no file or directory"),
        (("add", "https+git://x"), "no file or directory"),
        (("add", "git+https://user:hunter2@example.com/x"), "Leave user, password and token out"),
        (("add", "notes", "-n", "not a name"), "must be 1 to 64 letters"),
        (("rm", "notes"), "not on the list"),
        (("run",), "No source is on the list"),
        (("run", "--every", "soon"), "is no time"),
        (("run", "--every", "0m"), "is no time"),
        (("run", "--metrics-port", "9"), "needs --every"),
    ],
)
def test_a_wrong_command_gets_one_error(
    ragserve: Cli, folder: Path, words: tuple[str, ...], said: str
) -> None:
    done = ragserve("sync", *words)
    assert done.returncode == 1
    assert said in done.stderr
    assert "hunter2" not in done.stderr
    assert done.stderr.count("error:") == 1


def test_a_damaged_list_is_said_and_left_alone(ragserve: Cli, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "ragserve-data").mkdir()
    path = tmp_path / "ragserve-data" / "sync.json"
    path.write_text('[{"namespace": "x"')
    for words in (("add", "notes"), ("run",), ("ls",)):
        done = ragserve("sync", *words)
        assert done.returncode == 1
        assert "cannot be read" in done.stderr
    assert path.read_text() == '[{"namespace": "x"'


def test_two_runs_at_once_are_one_too_many(ragserve: Cli, folder: Path, tmp_path: Path) -> None:
    ragserve("sync", "add", "notes")
    with locked(tmp_path / "ragserve-data" / "sync-run.lock"):
        done = ragserve("sync", "run")
    assert done.returncode == 1
    assert "Another `ragserve sync run`" in done.stderr
    assert ragserve("sync", "run").returncode == 0


def test_a_source_that_another_machine_syncs_is_left_to_it(
    ragserve: Cli, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Machines that share a registry have no lock in common but the job's lease."""
    monkeypatch.setattr("ragserve.commands.sync._BUSY_S", 0.0)
    ragserve("sync", "add", "notes")
    ragserve("sync", "run")
    with IndexStore(tmp_path / "ragserve-data") as store:
        jobs = JobStore(store)
        (last,) = jobs.list("default")
        job = jobs.create("default", dict(last.spec), [])
        assert jobs.claim(worker_name(), 60, job.job_id) is not None
        done = ragserve("sync", "run")
        assert done.returncode == 1
        assert "does this already" in done.stderr
        jobs.finish(job.job_id, "done", None)
    assert ragserve("sync", "run").returncode == 0


def test_a_schedule_holds_no_index_of_a_namespace_that_was_dropped(
    ragserve: Cli, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []
    chosen = sync._chosen

    def between_rounds(*given: Any, **how: Any) -> Any:
        gc.collect()
        held.append(sum(isinstance(each, NamespaceIndex) for each in gc.get_objects()) - before)
        if len(held) == 3:  # after a round
            with IndexStore(tmp_path / "ragserve-data") as other:
                other.drop_namespace("default")
            return []
        if len(held) == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return chosen(*given, **how)

    monkeypatch.setitem(sync._SECONDS, "s", 0)
    monkeypatch.setattr(sync, "_chosen", between_rounds)
    ragserve("sync", "add", "notes")
    gc.collect()
    before = sum(isinstance(each, NamespaceIndex) for each in gc.get_objects())
    assert ragserve("sync", "run", "--every", "1s").returncode == 130
    assert held == [0, 0, 1, 0]


def test_a_schedule_syncs_again_shows_metrics_and_survives_a_kill(
    repository: Repository, tmp_path: Path
) -> None:
    """One process on a schedule, killed, and its successor: the only start of real processes here."""
    (tmp_path / "ragserve-data").mkdir()
    address = f"{repository.address}#main:docs"
    stored = [{"namespace": "work", "source": address, "prune": True}]
    (tmp_path / "ragserve-data" / "sync.json").write_text(json.dumps(stored))
    with hold_port() as held:
        _syncs_again(repository, tmp_path, address, port_of(held))


def _syncs_again(repository: Repository, tmp_path: Path, address: str, port: int) -> None:
    command = [*QUICK, "sync", "run", "--every", "1s", "--json"]

    def started(*more: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([*command, *more], cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE)

    first = started("--metrics-port", str(port))
    assert first.stdout is not None
    assert files(json.loads(first.stdout.readline())) == {"indexed": 2}
    repository.write_all({"docs/new.md": "# New\n\nWords.\n"})
    found: dict[str, int] = {}
    while "indexed" not in found:
        found = files(json.loads(first.stdout.readline()))
    assert found == {"indexed": 1, "unchanged": 2}
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=240).read().decode()
    stamp = re.search(r'ragserve_synced_timestamp_seconds{namespace="work",source="(.*)"} (.*)\n', text)
    assert stamp is not None
    assert stamp[1] == address
    assert abs(float(stamp[2]) - time.time()) < 600
    assert 'ragserve_syncs_total{outcome="done"}' in text
    first.kill()
    first.wait()
    first.stdout.close()
    second = started()
    assert second.stdout is not None
    assert files(json.loads(second.stdout.readline())) == {"unchanged": 3}
    second.send_signal(signal.SIGTERM)
    assert second.wait(240) == 143
    second.stdout.close()
