"""What only a registry in Postgres has: several servers with a folder each, a network between, and errors."""

from __future__ import annotations

import logging
import os
import resource
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg
import pytest

from ragserve.errors import Conflict, InvalidRequest, RagserveError, Unavailable
from ragserve_index import (
    EvictionLog,
    IndexStore,
    JobStore,
)
from ragserve_index.errors import RegistryDamaged
from ragserve_index.postgres import postgres_database
from tests.campaigns.troubles import few_descriptors
from tests.unit.index.index_samples import DIM, assert_clean, fill, item, texts, until, vectors_of
from tests.unit.index.postgres_server import PostgresServer

HERE = Path(__file__).parent


# several servers


def test_servers_see_one_order_of_versions(fronts: tuple[IndexStore, IndexStore]) -> None:
    def write(number: int) -> list[int]:
        mine, other = fronts[number % 2], fronts[1 - number % 2]
        seen = []
        for edition in range(5):
            mine.replace_documents("n", [item(f"t{number}", 3, edition=edition)])
            result = other.search("n", vectors_of("q"), 1000)
            editions = {t.chunk.text.split(".")[0] for t in result.hits[0]}
            assert f"t{number}#{edition}" in editions, "committed before, and not yet seen"
            seen.append(result.version)
        return seen

    with ThreadPoolExecutor(4) as threads:
        for seen in threads.map(write, range(4)):
            assert seen == sorted(seen)
    assert [front.namespace("n").version for front in fronts] == [20, 20]
    everything = {f"t{n}#4.{i}" for n in range(4) for i in range(3)}
    for front in fronts:
        assert set(texts(front, vectors_of("q"), 100)) == everything
        assert_clean(front)


def test_a_removal_is_announced_to_other_servers(fronts: tuple[IndexStore, IndexStore]) -> None:
    one, two = fronts
    log = EvictionLog(two.database)
    (document,) = one.replace_documents("n", [item("a", 2)])
    until(lambda: log.mark() is not None)
    mark = log.mark()
    one.remove_document("n", document.doc_id)
    until(lambda: log.mark() not in (None, mark))
    assert [row.text for row in log.after(0, 10)] == ["a#0.0", "a#0.1"]


def test_an_index_file_outlives_saves_of_other_servers(tmp_path: Path, url: str) -> None:
    with IndexStore(tmp_path / "two", registry_url=url) as two:
        two.ensure_namespace("n", embedder="e", dim=DIM)
        fill(two, 5)
        two.save()
    with IndexStore(tmp_path / "one", registry_url=url) as one:
        for edition in range(3):
            one.replace_documents("n", [item("d1", 4, edition=edition + 1)])
            one.save()
    with IndexStore(tmp_path / "two", registry_url=url) as two:
        assert two.check()[0].file == "behind", "not another registry's: it is caught up"
        assert_clean(two)


def test_jobs_wait_neither_for_documents_nor_for_each_other(fronts: tuple[IndexStore, IndexStore]) -> None:
    one, two = fronts
    jobs = JobStore(two)
    first, second = jobs.create("n", {}, ["a"]), jobs.create("n", {}, [])
    with one.database.write() as connection:
        row = connection.execute("SELECT 1 FROM jobs WHERE job_id = ? FOR UPDATE", (first.job_id,))
        assert row.fetchone()
        claimed = jobs.claim("w", 60)
        assert claimed is not None
        assert claimed.job_id == second.job_id, "the first is being claimed by another server"
    claimed = jobs.claim("w", 60)
    assert claimed is not None
    assert claimed.job_id == first.job_id


def test_jobs_are_listed_by_names_and_beginnings(fronts: tuple[IndexStore, IndexStore]) -> None:
    jobs = JobStore(fronts[0])
    for namespace in ("a", "ab", "b", "b*"):
        jobs.create(namespace, {})
    assert {job.namespace for job in jobs.list(within=["a*"])} == {"a", "ab"}
    assert {job.namespace for job in jobs.list(within=["a", "b"])} == {"a", "b"}
    assert {job.namespace for job in jobs.list(within=["*"])} == {"a", "ab", "b", "b*"}
    assert jobs.list(within=[]) == []


def test_a_job_that_was_taken_over_meanwhile_is_not_ended(
    postgres: PostgresServer, fronts: tuple[IndexStore, IndexStore]
) -> None:
    one, two = fronts
    jobs = JobStore(two)
    job = jobs.create("n", {}, [])
    jobs.claim("slow", 0.0)
    with ThreadPoolExecutor(1) as threads:
        with one.database.update() as connection:
            connection.execute("UPDATE jobs SET worker = 'next' WHERE job_id = ?", (job.job_id,))
            ended = threads.submit(jobs.finish, job.job_id, "done", worker="slow")
            until(lambda: bool(postgres.rows("SELECT 1 FROM pg_locks WHERE NOT granted")))
        with pytest.raises(Conflict, match="not slow's any more"):
            ended.result()
    assert (jobs.get(job.job_id).state, jobs.get(job.job_id).worker) == ("running", "next")


_DIES = """
import os, signal, sys
from pathlib import Path
from ragserve_index import IndexStore
from ragserve_index.postgres import postgres_database
from tests.unit.index.index_samples import item

store = IndexStore(Path(sys.argv[1]), registry_url=sys.argv[2])
begun = postgres_database.PostgresDatabase._begun

def dying(self, begin):
    raw = begun(self, begin)
    real = raw.execute

    def execute(query, *rest, **options):
        if "COMMIT" in query:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(query, *rest, **options)

    raw.execute = execute
    return raw

postgres_database.PostgresDatabase._begun = dying
with store.database.write() as connection:
    from ragserve_index import registry, batch
    from ragserve_index.viewers import EVERYTHING
    ns = registry.namespace(connection, "n")
    prepared = batch.prepare("n", ns.dim, [item("b", 3), item("a", 1, edition=1)])
    registry.write_documents(connection, ns, prepared, EVERYTHING)
"""


def test_a_writer_killed_before_its_commit_leaves_nothing_and_blocks_nobody(
    tmp_path: Path, url: str, fronts: tuple[IndexStore, IndexStore]
) -> None:
    one, two = fronts
    one.replace_documents("n", [item("a", 2)])
    done = subprocess.run(
        [sys.executable, "-c", _DIES, str(tmp_path / "three"), url],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=240,
    )
    assert done.returncode == -signal.SIGKILL
    assert set(texts(two, vectors_of("q"), 10)) == {"a#0.0", "a#0.1"}
    assert len(EvictionLog(two.database)) == 0
    two.replace_documents("n", [item("c", 1)])
    assert one.search("n", vectors_of("q"), 10).version == 2
    assert_clean(one)


def test_a_busy_registry_is_waited_for_once_however_many_connections_are_idle(
    postgres: PostgresServer, fronts: tuple[IndexStore, IndexStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = fronts
    with two.database.read(), two.database.read(), two.database.read():
        pass
    connected = "SELECT pid FROM pg_stat_activity WHERE application_name = 'ragserve'"
    before = postgres.rows(connected)
    monkeypatch.setattr(postgres_database, "BUSY_TIMEOUT_S", 0.05)
    with one.database.write(), pytest.raises(Unavailable, match="locked for"):
        two.replace_documents("n", [item("a", 1)])
    until(lambda: len(set(before) & set(postgres.rows(connected))) < len(before))
    assert len(set(before) & set(postgres.rows(connected))) == len(before) - 1, "one waited and was closed"


def test_connections_that_were_cut_are_made_again(
    postgres: PostgresServer, fronts: tuple[IndexStore, IndexStore], caplog: pytest.LogCaptureFixture
) -> None:
    one, two = fronts
    log = EvictionLog(two.database)
    until(lambda: log.mark() is not None)
    postgres.run(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE application_name = 'ragserve' AND pid <> pg_backend_pid()"
    )
    assert one.replace_documents("n", [item("a", 2)])
    assert len(texts(two, vectors_of("q"), 10)) == 2
    until(lambda: log.mark() is not None)
    with (
        pytest.raises(Unavailable, match="connection to the registry") as caught,
        one.database.write() as connection,
    ):
        connection.execute("SELECT pg_terminate_backend(pg_backend_pid())")
    assert caught.value.code == "registry_unreachable"
    assert one.namespace("n").version == 1


def test_a_dead_machine_is_noticed(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By TCP itself, in a minute or what the URL says: by default a connection waits for hours."""
    connect, asked = psycopg.connect, list[dict[str, str]]()

    def noted(*given: Any, **options: Any) -> Any:
        made = connect(*given, **options)
        asked.append(made.info.get_parameters())
        return made

    monkeypatch.setattr(psycopg, "connect", noted)
    for more, idle in (("", "30"), ("&keepalives_idle=7", "7")):
        with IndexStore(tmp_path, registry_url=url + more) as store:
            log = EvictionLog(store.database)
            until(lambda: log.mark() is not None)  # noqa: B023 - at once
        for name, value in (("idle", idle), ("interval", "10"), ("count", "3")):
            assert {each[f"keepalives_{name}"] for each in asked} == {value}
        assert {each["tcp_user_timeout"] for each in asked} == {"60000"}
        assert len(asked) >= 2, "the one that listens, too"
        asked.clear()


# what cannot work says why


def test_without_descriptors_no_connection_is_made(fronts: tuple[IndexStore, IndexStore]) -> None:
    store, _ = fronts
    log = EvictionLog(store.database)
    with store.database.read(), store.database.read():
        with few_descriptors(0), pytest.raises(Unavailable, match=r"Too many open files.*ulimit -n"):
            store.namespaces()
        with few_descriptors(0):
            assert log.mark() is None
    assert len(store.namespaces()) == 1
    until(lambda: log.mark() is not None)


def test_removals_are_announced_past_a_thousand_descriptors(fronts: tuple[IndexStore, IndexStore]) -> None:
    log = EvictionLog(fronts[0].database)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as files:
        files.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
        while files.enter_context(open(os.devnull, "rb")).fileno() < 1024:
            pass
        until(lambda: log.mark() is not None)
        mark = log.mark()
        fronts[1].replace_documents("n", [item("a", 1)])
        until(lambda: log.mark() not in (None, mark))


def test_the_password_is_never_shown(
    tmp_path: Path, postgres: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with pytest.raises(Unavailable, match="user or the password") as caught:
        IndexStore(tmp_path, registry_url=postgres.url("postgres", password="hunter2"))
    assert caught.value.code == "registry_refused"
    messages = [repr(caught.value)]
    for url in ("postgres//u:hunter2@db/r", "postgresql://u:a/hunter2@db/r", "postgresql://u:1/hunter2@db/r"):
        with pytest.raises(InvalidRequest, match="not the URL") as malformed:
            IndexStore(tmp_path, registry_url=url)
        messages.append(repr(malformed.value))
    assert "hunter2" not in f"{messages} {caplog.text}"


def test_an_unreachable_server_or_database(tmp_path: Path, postgres: PostgresServer) -> None:
    for url in (f"postgresql://u:p@/registry?host={tmp_path}", postgres.url("nowhere")):
        with pytest.raises(Unavailable, match="cannot be reached") as caught:
            IndexStore(tmp_path / "data", registry_url=url)
        assert caught.value.code == "registry_unreachable"


def test_the_url_may_name_several_hosts(tmp_path: Path, url: str) -> None:
    several = url.replace("host=", f"host={tmp_path},") + "&port=5432,5432"
    with IndexStore(tmp_path, registry_url=several) as store:
        assert store.namespaces() == []


def test_an_older_server(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_database, "MIN_SERVER", 990_000)
    with pytest.raises(Unavailable, match="needs Postgres 99 or newer") as caught:
        IndexStore(tmp_path, registry_url=url)
    assert caught.value.code == "registry_version"


def test_other_tables_and_other_formats(tmp_path: Path, url: str) -> None:
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE documents (x int)")
    with pytest.raises(RegistryDamaged, match="another program"):
        IndexStore(tmp_path, registry_url=url)
    with psycopg.connect(url) as connection:
        connection.execute("DROP TABLE documents")
    IndexStore(tmp_path, registry_url=url).close()
    with psycopg.connect(url) as connection:
        connection.execute("UPDATE ragserve_registry SET format = 99")
    with pytest.raises(RegistryDamaged, match="format 99"):
        IndexStore(tmp_path, registry_url=url)


def test_without_psycopg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    monkeypatch.delitem(sys.modules, "ragserve_index.postgres.postgres_database")
    with pytest.raises(RagserveError, match="psycopg") as caught:
        IndexStore(tmp_path, registry_url="postgresql://db/registry")
    assert "pip install 'ragserve[postgres]'" in str(caught.value)
