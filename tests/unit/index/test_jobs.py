"""Jobs: claimed by one worker at a time, taken over when its lease runs out, counted per item."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ragserve.errors import Conflict, InvalidRequest, NotFound
from ragserve_index import IndexStore, JobStore, jobs
from ragserve_index.types import JobItem
from tests.unit.index.index_samples import on_both_registries, on_registries, open_store

HERE = Path(__file__).parent
pytestmark = on_registries


@pytest.fixture
def job_store(store: IndexStore) -> JobStore:
    return JobStore(store)


def outcome(
    source: str,
    state: str = "indexed",
    reason: str | None = None,
    *,
    chunks: int = 0,
    tokens: int = 0,
    size: int = 0,
    doc_id: str | None = None,
) -> JobItem:
    return JobItem(source, state, reason, chunks, tokens, size, doc_id)


@on_both_registries
def test_jobs_end_with_their_namespace(store: IndexStore, job_store: JobStore) -> None:
    store.ensure_namespace("m", embedder="e", dim=2)
    done, running, queued = (job_store.create("m", {"kind": "texts"}, ["a"]) for _ in range(3))
    other = job_store.create("other", {"kind": "texts"}, ["a"])
    for job in (done, running):
        assert job_store.claim("w1", 60, job.job_id) is not None
    job_store.finish(done.job_id, "done", worker="w1")
    store.drop_namespace("m")
    states = [job_store.get(job.job_id).state for job in (done, running, queued, other)]
    assert states == ["done", "running", "cancelled", "queued"]
    assert [job_store.cancel_requested(job.job_id) for job in (running, other)] == [True, False]
    for job in (running, queued):
        with pytest.raises(Conflict) as refused:
            store.ensure_namespace("m", embedder="e", dim=2, job_id=job.job_id)
        assert refused.value.code == "job_cancelled"
    assert "m" not in [info.name for info in store.namespaces()]
    assert job_store.finish(running.job_id, "cancelled", worker="w1").state == "cancelled"
    assert store.ensure_namespace("m", embedder="e", dim=2, job_id=other.job_id).name == "m"


@on_both_registries
def test_a_job_from_start_to_end(job_store: JobStore) -> None:
    job = job_store.create("n", {"kind": "texts", "ü": [1, {"a": None}]}, ["a", "b", "c", "a"])
    assert (job.state, job.n_items, job.counts["pending"], job.spec) == (
        "queued",
        3,
        3,
        {"kind": "texts", "ü": [1, {"a": None}]},
    )
    claimed = job_store.claim("w1", 60)
    assert claimed is not None
    assert (claimed.job_id, claimed.state, claimed.worker) == (job.job_id, "running", "w1")
    job_store.update_items(
        job.job_id,
        [outcome("a", chunks=3, tokens=30, size=300, doc_id="doc_a"), outcome("b", "failed", "encrypted")],
    )
    job_store.add_items(job.job_id, ["d", "a"])
    assert [item.source for item in job_store.items(job.job_id)] == ["a", "b", "c", "d"]
    assert [item.source for item in job_store.items(job.job_id, "pending")] == ["c", "d"]
    (failed,) = job_store.items(job.job_id, "failed")
    assert (failed.reason, failed.chunks) == ("encrypted", 0)
    done = job_store.finish(job.job_id, "done", worker="w1")
    assert (done.state, done.finished, done.worker, done.chunks, done.tokens, done.size_bytes) == (
        "done",
        True,
        None,
        3,
        30,
        300,
    )
    assert done.counts == {
        "pending": 2,
        "indexed": 1,
        "warmed": 0,
        "unchanged": 0,
        "removed": 0,
        "failed": 1,
        "skipped": 0,
    }
    assert job_store.get(job.job_id) == done
    assert job_store.claim("w2", 60) is None


@on_both_registries
def test_the_oldest_is_claimed_first_and_one_may_be_chosen(job_store: JobStore) -> None:
    first, second, third = (job_store.create("n", {}, []) for _ in range(3))
    chosen = job_store.claim("w", 60, second.job_id)
    assert chosen is not None
    assert chosen.job_id == second.job_id
    order = [claimed.job_id for _ in range(3) if (claimed := job_store.claim("w", 60)) is not None]
    assert order == [first.job_id, third.job_id]
    assert job_store.claim("w2", 60, second.job_id) is None


@on_both_registries
def test_an_expired_lease_is_taken_over(job_store: JobStore) -> None:
    job = job_store.create("n", {}, ["a"])
    assert job_store.claim("dead", 60) is not None
    assert job_store.claim("alive", 60) is None
    assert job_store.heartbeat(job.job_id, "dead", -1)  # expired
    taken = job_store.claim("alive", 60)
    assert taken is not None
    assert taken.worker == "alive"
    assert not job_store.heartbeat(job.job_id, "dead", 60)
    with pytest.raises(Conflict, match="took it over"):
        job_store.finish(job.job_id, "done", worker="dead")
    assert job_store.get(job.job_id).state == "running"
    assert job_store.heartbeat(job.job_id, "alive", 60)


@on_both_registries
def test_a_job_whose_worker_died_twice_may_be_failed(job_store: JobStore) -> None:
    job, other = job_store.create("n", {}, ["a", "b"]), job_store.create("n", {}, ["c"])
    for worker in ("first", "second"):
        assert not job_store.fail_if_died_twice(job.job_id)
        taken = job_store.claim(worker, -1, job.job_id)  # its lease is over at once
        assert taken is not None
        assert (taken.state, taken.worker) == ("running", worker)
        # a worker that gives the job back has not died
        restarted = job_store.claim(worker, 60, other.job_id)
        assert restarted is not None
        assert restarted.error is None
        job_store.release(other.job_id, worker)
    assert taken.error == "The process that ran this job died; it is run again."
    job_store.update_items(job.job_id, [outcome("a")])
    assert job_store.fail_if_died_twice(job.job_id)
    failed = job_store.get(job.job_id)
    assert (failed.state, failed.worker, failed.counts["indexed"]) == ("failed", None, 1)
    assert "died twice" in (failed.error or "")
    assert not job_store.fail_if_died_twice(other.job_id)
    assert job_store.claim("third", 60) == job_store.get(other.job_id)
    assert not job_store.fail_if_died_twice(other.job_id)


@on_both_registries
def test_a_job_that_ends_after_one_death_has_no_error(job_store: JobStore) -> None:
    job = job_store.create("n", {}, ["a"])
    for lease_s in (-1, 60):
        assert job_store.claim("w", lease_s) is not None
    assert job_store.finish(job.job_id, "done").error is None


@on_both_registries
def test_a_job_is_active_while_a_process_works_on_it_or_a_server_is_to_begin_it(job_store: JobStore) -> None:
    def active() -> bool:
        return job_store.any_active(["upload", "warm"])

    assert not active()
    job = job_store.create("ns", {"kind": "paths"})
    assert not active(), "its command line may have gone"
    assert job_store.claim("command", 60) is not None
    assert active()
    job_store.release(job.job_id, "command")
    assert not active(), "it was interrupted"
    assert job_store.claim("killed", -1) is not None
    assert not active()
    upload = job_store.create("ns", {"kind": "upload"})
    assert active()
    job_store.finish(upload.job_id, "done")
    assert not active()


@on_both_registries
def test_jobs_that_nobody_asked_for_can_be_left_out_of_those_that_are_active(job_store: JobStore) -> None:
    def active() -> tuple[bool, bool]:
        kinds = ["upload", "warm"]
        return job_store.any_active(kinds), job_store.any_active(kinds, background=False)

    warm_up = job_store.create("ns", {"kind": "warm", "background": True})
    assert active() == (True, False)
    assert job_store.claim("server", 60) is not None
    assert active() == (True, False)
    command = job_store.create("ns", {"kind": "paths"})
    assert job_store.claim("command", 60, command.job_id) is not None
    assert active() == (True, True)
    job_store.finish(command.job_id, "done")
    asked = job_store.create("ns", {"kind": "warm"})
    assert active() == (True, True)
    for job in (asked, warm_up):
        job_store.finish(job.job_id, "done")
    assert active() == (False, False)


def test_reasons_are_stored_whatever_they_quote(job_store: JobStore) -> None:
    job = job_store.create("n", {}, ["a"])
    job_store.update_items(job.job_id, [outcome("a", "failed", "not \udcff nor \0" + "x" * 10_000)])
    (item,) = job_store.items(job.job_id)
    assert (item.reason or "").startswith("not \ufffd nor \ufffdxx")
    assert len(item.reason or "") == 2_000
    assert job_store.finish(job.job_id, "failed", "bytes \udcff").error == "bytes \ufffd"


@on_both_registries
def test_cancelling(job_store: JobStore) -> None:
    queued, running, finished = (job_store.create("n", {}, ["a"]) for _ in range(3))
    for job in (running, finished):
        assert job_store.claim("w", 60, job.job_id) is not None
    job_store.finish(finished.job_id, "done")
    assert job_store.request_cancel(queued.job_id).state == "cancelled"
    assert job_store.claim("w", 60) is None
    assert job_store.request_cancel(running.job_id).state == "running"
    assert job_store.cancel_requested(running.job_id)
    assert not job_store.request_cancel(finished.job_id).cancel_requested


@on_both_registries
@pytest.mark.parametrize(
    ("n", "kept"), [(jobs.KEEP_UNCHANGED, jobs.KEEP_UNCHANGED), (jobs.KEEP_UNCHANGED + 1, 0)]
)
def test_of_many_unchanged_items_a_finished_job_keeps_the_number(
    job_store: JobStore, n: int, kept: int
) -> None:
    sources = [f"f{i}" for i in range(n)]
    job = job_store.create("n", {"kind": "paths"}, [*sources, "new", "bad"])
    job_store.update_items(job.job_id, [outcome(source, "unchanged", size=3) for source in sources])
    job_store.update_items(
        job.job_id, [outcome("new", "indexed", chunks=2, size=5), outcome("bad", "failed", "no")]
    )
    before = job_store.get(job.job_id)
    for state in ("done", "failed"):
        after = job_store.finish(job.job_id, state)
        assert after == job_store.get(job.job_id)
        assert after.counts == before.counts
        assert (after.n_items, after.chunks, after.size_bytes) == (n + 2, 2, 3 * n + 5)
        assert (after.kind, after.spec["kind"]) == ("paths", "paths")
    assert len(job_store.items(job.job_id, "unchanged")) == kept
    assert [one.source for one in job_store.items(job.job_id) if one.state != "unchanged"] == ["new", "bad"]


@on_both_registries
def test_a_job_without_a_live_process_is_cancelled_at_once(store: IndexStore, job_store: JobStore) -> None:
    died, given_back, dropped = (job_store.create("n", {}, ["a"]).job_id for _ in range(3))
    for job, lease_s in ((died, -1.0), (given_back, 60.0), (dropped, -1.0)):
        assert job_store.claim("w", lease_s, job) is not None
    job_store.release(given_back, "w")
    for job in (died, given_back):
        ended = job_store.request_cancel(job)
        assert (ended.state, ended.worker) == ("cancelled", None)
    assert not job_store.heartbeat(died, "w", 60.0), "it was asleep, and must stop"
    store.drop_namespace("n")
    assert job_store.get(dropped).state == "cancelled"


@on_both_registries
def test_listing(job_store: JobStore) -> None:
    made = [job_store.create(namespace, {}, []) for namespace in ("n", "m", "n")]
    job_store.finish(made[0].job_id, "failed", "why")
    assert [job.job_id for job in job_store.list()] == [job.job_id for job in reversed(made)]
    assert [job.job_id for job in job_store.list("n", limit=1)] == [made[2].job_id]
    (failed,) = job_store.list(state="failed")
    assert failed.error == "why"


@on_both_registries
def test_unknown_jobs_and_states(job_store: JobStore) -> None:
    for call in (
        lambda: job_store.get("job_x"),
        lambda: job_store.items("job_x"),
        lambda: job_store.add_items("job_x", ["a"]),
        lambda: job_store.update_items("job_x", [outcome("a")]),
        lambda: job_store.finish("job_x", "done"),
        lambda: job_store.request_cancel("job_x"),
        lambda: job_store.cancel_requested("job_x"),
    ):
        with pytest.raises(NotFound) as caught:
            call()
        assert caught.value.code == "job_not_found"
    job = job_store.create("n", {}, ["a"])
    with pytest.raises(NotFound, match="no item 'b'"):
        job_store.update_items(job.job_id, [outcome("b")])
    for bad in (
        lambda: job_store.update_items(job.job_id, [outcome("a", "eaten")]),
        lambda: job_store.finish(job.job_id, "running"),
        lambda: job_store.list(state="eaten"),
        lambda: job_store.list(limit=0),
    ):
        with pytest.raises(InvalidRequest):
            bad()
    assert not job_store.heartbeat("job_x", "w", 1)
    assert job_store.claim("w", 1, "job_x") is None


@on_both_registries
def test_finished_jobs_are_forgotten_in_the_end(job_store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "KEEP_FINISHED", 3)
    old = [job_store.create("n", {}, ["a"]) for _ in range(6)]
    for job in old:
        job_store.finish(job.job_id, "done")
    new = job_store.create("n", {}, ["a"])
    assert {job.job_id for job in job_store.list()} == {new.job_id, *(job.job_id for job in old[3:])}


@on_both_registries
def test_one_namespaces_jobs_push_no_others_out(job_store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "KEEP_FINISHED", 3)
    monkeypatch.setattr(jobs, "KEEP_FINISHED_IN_ALL", 6)
    quiet = [job_store.create("quiet", {}, []).job_id for _ in range(2)]
    busy = [job_store.create("busy", {}, []).job_id for _ in range(9)]
    for job_id in (*quiet, *busy):
        job_store.finish(job_id, "done")
    job_store.create("busy", {}, [])
    assert {job.job_id for job in job_store.list(state="done")} == {*quiet, *busy[-3:]}
    for number in range(4):  # many namespaces push out nobody's newest
        job_store.finish(job_store.create(f"many-{number}", {}, []).job_id, "done")
    job_store.create("busy", {}, [])
    left = [job.namespace for job in job_store.list(state="done")]
    assert sorted(left) == ["busy", "many-0", "many-1", "many-2", "many-3", "quiet"]


@on_both_registries
def test_no_job_runs_twice_among_threads_and_stores(tmp_path: Path) -> None:
    with open_store(tmp_path) as one, open_store(tmp_path) as two:
        stores = [JobStore(one), JobStore(two)]
        made = {stores[0].create("n", {}, []).job_id for _ in range(40)}

        def work(number: int) -> list[str]:
            claimed = []
            while (job := stores[number % 2].claim(f"w{number}", 60)) is not None:
                claimed.append(job.job_id)
            return claimed

        with ThreadPoolExecutor(6) as threads:
            counts = Counter(job_id for claimed in threads.map(work, range(6)) for job_id in claimed)
        assert counts == dict.fromkeys(made, 1)


_WORKER = """
import sys, time
from pathlib import Path
from tests.unit.index.index_samples import open_store
from ragserve_index import JobStore
from ragserve_index.types import JobItem
store = JobStore(open_store(Path(sys.argv[1])))
job = store.claim("worker", 2)
store.update_items(job.job_id, [JobItem("a", "indexed", None, 1, 0, 0, None)])
print(job.job_id, flush=True)
while store.heartbeat(job.job_id, "worker", 2):
    print("alive", flush=True)
    time.sleep(0.05)
"""


@on_both_registries
def test_a_killed_workers_job_goes_on_elsewhere(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        job_store = JobStore(store)
        job = job_store.create("n", {}, ["a", "b"])
        process = subprocess.Popen(
            [sys.executable, "-c", _WORKER, str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        with process:
            assert process.stdout is not None
            assert process.stdout.readline().strip() == job.job_id
            end = time.monotonic() + 2.2  # longer than the lease: only heartbeats keep it
            while time.monotonic() < end:
                assert process.stdout.readline() == "alive\n"
            assert job_store.claim("other", 60) is None
            process.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + 240
        while (taken := job_store.claim("other", 60)) is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert [item.source for item in job_store.items(taken.job_id, "pending")] == ["b"]
        assert taken.chunks == 1


@on_both_registries
def test_jobs_survive_a_restart(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        job = JobStore(store).create("n", {"x": 1}, ["a"])
    with open_store(tmp_path) as store:
        assert JobStore(store).get(job.job_id) == job
