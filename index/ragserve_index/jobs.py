"""Ingestion jobs, in the registry's database. A lease says who runs a job; whoever lets it expire is taken to
be dead.
"""

from __future__ import annotations

import json
import secrets
import sqlite3
import time
from collections.abc import Iterable, Sequence
from typing import Any

from ragserve_index.errors import Conflict, InvalidRequest, NotFound
from ragserve_index.store import IndexStore
from ragserve_index.types import ITEM_STATES, JOB_STATES, Job, JobItem

KEEP_FINISHED = 1_000
"""Finished jobs beyond this many are forgotten, oldest first, when a job is created."""

Jobs = list[Job]  # named here: inside the class, `list` is a method
Items = list[JobItem]

_JOB = "job_id, namespace, state, spec, error, cancel_requested, worker, lease_until, created_at, updated_at"
_ITEM = "source, state, reason, chunks, tokens, size_bytes, doc_id"
_FINISHED = ("done", "failed", "cancelled")


class JobStore:
    """Jobs and their items. Thread-safe, and safe among processes: each method is one transaction."""

    def __init__(self, store: IndexStore) -> None:
        self._database = store.database

    def create(self, namespace: str, spec: dict[str, Any], sources: Sequence[str] = ()) -> Job:
        """A queued job with an item per source (each once). ``spec`` is JSON. On disk when this returns."""
        now = time.time()
        job_id = f"job_{secrets.token_hex(12)}"
        encoded = json.dumps(spec, ensure_ascii=False)
        with self._database.write() as connection:
            connection.execute(
                "INSERT INTO jobs (job_id, namespace, state, spec, created_at, updated_at) VALUES (?, ?, 'queued', ?, ?, ?)",
                (job_id, namespace, encoded, now, now),
            )
            _add_items(connection, job_id, sources)
            connection.execute(
                "DELETE FROM jobs WHERE job_id IN (SELECT job_id FROM jobs WHERE state IN ('done', 'failed', 'cancelled')"
                " ORDER BY updated_at DESC LIMIT -1 OFFSET ?)",
                (KEEP_FINISHED,),
            )
            return _job(connection, job_id)

    def get(self, job_id: str) -> Job:
        """Raises NotFound (``job_not_found``)."""
        with self._database.read() as connection:
            return _job(connection, job_id)

    def list(self, namespace: str | None = None, state: str | None = None, limit: int = 100) -> Jobs:
        """The newest first."""
        if state is not None and state not in JOB_STATES:
            raise InvalidRequest(
                f"No job state {state!r}.", hint=f"States are: {', '.join(JOB_STATES)}.", param="state"
            )
        if limit < 1:
            raise InvalidRequest("limit must be at least 1.", param="limit")
        with self._database.read() as connection:
            rows = connection.execute(
                f"SELECT {_JOB} FROM jobs WHERE (?1 IS NULL OR namespace = ?1) AND (?2 IS NULL OR state = ?2)"
                " ORDER BY created_at DESC, rowid DESC LIMIT ?3",
                (namespace, state, limit),
            ).fetchall()
            return [_to_job(connection, row) for row in rows]

    def claim(self, worker: str, lease_s: float, job_id: str | None = None) -> Job | None:
        """Take the oldest job (or the given one) that is queued, or running with an expired lease; None when
        there is none.

        The job is then running and ``worker``'s until ``lease_s`` seconds from now, or from its last
        heartbeat."""
        now = time.time()
        with self._database.write() as connection:
            row = connection.execute(
                "UPDATE jobs SET state = 'running', worker = ?1, lease_until = ?2, updated_at = ?3 WHERE job_id ="
                " (SELECT job_id FROM jobs WHERE (state = 'queued' OR (state = 'running' AND lease_until < ?3))"
                "  AND (?4 IS NULL OR job_id = ?4) ORDER BY created_at, rowid LIMIT 1) RETURNING job_id",
                (worker, now + lease_s, now, job_id),
            ).fetchone()
            return _job(connection, row[0]) if row else None

    def heartbeat(self, job_id: str, worker: str, lease_s: float) -> bool:
        """Extend the lease. False when the job is not this worker's any more: it must stop."""
        now = time.time()
        with self._database.write() as connection:
            cursor = connection.execute(
                "UPDATE jobs SET lease_until = ?, updated_at = ? WHERE job_id = ? AND worker = ? AND state = 'running'",
                (now + lease_s, now, job_id, worker),
            )
            return cursor.rowcount == 1

    def add_items(self, job_id: str, sources: Iterable[str]) -> None:
        """Add pending items; a source the job has already is left as it is."""
        with self._database.write() as connection:
            _job(connection, job_id)
            _add_items(connection, job_id, sources)

    def update_item(
        self,
        job_id: str,
        source: str,
        state: str,
        *,
        reason: str | None = None,
        chunks: int = 0,
        tokens: int = 0,
        size: int = 0,
        doc_id: str | None = None,
    ) -> None:
        """Set what became of an item; ``size`` in bytes. Raises NotFound (``job_item_not_found``)."""
        self.update_items(job_id, [JobItem(source, state, reason, chunks, tokens, size, doc_id)])

    def update_items(self, job_id: str, outcomes: Sequence[JobItem]) -> None:
        """Set what became of several items in one transaction: all of them or, on an error, none. Raises
        NotFound as `update_item` does.
        """
        for item in outcomes:
            if item.state not in ITEM_STATES:
                raise InvalidRequest(
                    f"No item state {item.state!r}.",
                    hint=f"States are: {', '.join(ITEM_STATES)}.",
                    param="state",
                )
        with self._database.write() as connection:
            for item in outcomes:
                cursor = connection.execute(
                    "UPDATE job_items SET state = ?, reason = ?, chunks = ?, tokens = ?, size_bytes = ?, doc_id = ?"
                    " WHERE job_id = ? AND source = ?",
                    (
                        item.state,
                        item.reason,
                        item.chunks,
                        item.tokens,
                        item.size_bytes,
                        item.doc_id,
                        job_id,
                        item.source,
                    ),
                )
                if cursor.rowcount == 0:
                    _job(connection, job_id)
                    raise NotFound(f"Job {job_id} has no item {item.source!r}.", code="job_item_not_found")
            connection.execute("UPDATE jobs SET updated_at = ? WHERE job_id = ?", (time.time(), job_id))

    def items(self, job_id: str, state: str | None = None) -> Items:
        """The items in the order they were added, or those in ``state``."""
        with self._database.read() as connection:
            _job(connection, job_id)
            rows = connection.execute(
                f"SELECT {_ITEM} FROM job_items WHERE job_id = ?1 AND (?2 IS NULL OR state = ?2) ORDER BY item",
                (job_id, state),
            )
            return [JobItem(*row) for row in rows]

    def finish(self, job_id: str, state: str, error: str | None = None, *, worker: str | None = None) -> Job:
        """End it as done, failed or cancelled. With ``worker``, raises Conflict if the job is not that
        worker's any more.
        """
        if state not in _FINISHED:
            raise InvalidRequest(
                f"A job cannot end as {state!r}.", hint=f"It ends as: {', '.join(_FINISHED)}.", param="state"
            )
        with self._database.write() as connection:
            job = _job(connection, job_id)
            if worker is not None and (job.worker != worker or job.state != "running"):
                raise Conflict(
                    f"Job {job_id} is not {worker}'s any more.",
                    hint="Another worker took it over.",
                    code="job_lease_lost",
                )
            connection.execute(
                "UPDATE jobs SET state = ?, error = ?, worker = NULL, lease_until = NULL, updated_at = ? WHERE job_id = ?",
                (state, error, time.time(), job_id),
            )
            return _job(connection, job_id)

    def request_cancel(self, job_id: str) -> Job:
        """A queued job is cancelled at once, a running one is asked to stop, a finished one stays as it is."""
        with self._database.write() as connection:
            connection.execute(
                "UPDATE jobs SET cancel_requested = 1, state = CASE state WHEN 'queued' THEN 'cancelled' ELSE state END, updated_at = ?"
                " WHERE job_id = ? AND state IN ('queued', 'running')",
                (time.time(), job_id),
            )
            return _job(connection, job_id)

    def cancel_requested(self, job_id: str) -> bool:
        """Raises NotFound."""
        with self._database.read() as connection:
            row = connection.execute(
                "SELECT cancel_requested FROM jobs WHERE job_id = ?", (job_id,)
            ).fetchone()
        if row is None:
            raise _not_found(job_id)
        return bool(row[0])


def _not_found(job_id: str) -> NotFound:
    return NotFound(
        f"There is no job {job_id!r}.",
        hint=f"Only the last {KEEP_FINISHED:,} finished jobs are kept.",
        code="job_not_found",
    )


def _add_items(connection: sqlite3.Connection, job_id: str, sources: Iterable[str]) -> None:
    connection.executemany(
        "INSERT OR IGNORE INTO job_items (job_id, source) VALUES (?, ?)",
        ((job_id, source) for source in sources),
    )


def _job(connection: sqlite3.Connection, job_id: str) -> Job:
    row = connection.execute(f"SELECT {_JOB} FROM jobs WHERE job_id = ?", (job_id,)).fetchone()
    if row is None:
        raise _not_found(job_id)
    return _to_job(connection, row)


def _to_job(connection: sqlite3.Connection, row: tuple[Any, ...]) -> Job:
    job_id, namespace, state, spec, error, cancel_requested, worker, lease_until, created_at, updated_at = row
    counts = dict.fromkeys(ITEM_STATES, 0)
    totals = [0, 0, 0]
    rows = connection.execute(
        "SELECT state, count(*), sum(chunks), sum(tokens), sum(size_bytes) FROM job_items WHERE job_id = ? GROUP BY state",
        (job_id,),
    )
    for item_state, n, *sums in rows:
        counts[item_state] = n
        totals = [total + part for total, part in zip(totals, sums, strict=True)]
    return Job(
        job_id=job_id,
        namespace=namespace,
        state=state,
        spec=json.loads(spec),
        counts=counts,
        n_items=sum(counts.values()),
        chunks=totals[0],
        tokens=totals[1],
        size_bytes=totals[2],
        error=error,
        cancel_requested=bool(cancel_requested),
        worker=worker,
        lease_until=lease_until,
        created_at=created_at,
        updated_at=updated_at,
    )
