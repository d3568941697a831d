"""Jobs, in the registry's database. The worker that runs a job has a lease on it; an expired lease means that
the worker died.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import astuple, replace
from typing import Any

from ragserve.errors import Conflict, InvalidRequest, NotFound
from ragserve_index import job_cancellation
from ragserve_index.database import Connection
from ragserve_index.store import IndexStore
from ragserve_index.text_forms import storable
from ragserve_index.types import FINISHED, ITEM_STATES, JOB_STATES, Job, JobItem

KEEP_FINISHED = 1_000
"""Finished jobs of a namespace beyond this many are forgotten, oldest first, when a job is created."""

KEEP_FINISHED_IN_ALL = 10_000
"""The same for all namespaces together: those that have the most lose their oldest."""

KEEP_UNCHANGED = 100
"""Of a finished job with more unchanged items than these, their number is kept: else folders that are synced
every few minutes would fill the registry."""

_UNCHANGED = "unchanged"  # in a finished job's spec: number, chunks, tokens and bytes of items not kept
_DIED = "The process that ran this job died; it is run again."
_DIED_TWICE = (
    "The process that ran this job died twice, so it is not run again. Its finished files stay; ingest the "
    "others in smaller parts to find the one that does it."
)

Jobs = list[Job]  # defined here, because `list` is a method inside the class
Items = list[JobItem]

_MAX_REASON = 2_000  # characters
_JOB = "job_id, namespace, state, spec, error, cancel_requested, worker, lease_until, created_at, updated_at"
_ITEM = "source, state, reason, chunks, tokens, size_bytes, doc_id"


class JobStore:
    """Jobs and their items. Thread-safe, and safe among processes: each method is one transaction."""

    def __init__(self, store: IndexStore) -> None:
        self._database = store.database

    def create(self, namespace: str, spec: dict[str, Any], sources: Sequence[str] = ()) -> Job:
        """A queued job with an item per source (each once). ``spec`` is JSON. On disk when this returns."""
        now = time.time()
        job_id = f"job_{secrets.token_hex(12)}"
        encoded = json.dumps(spec, ensure_ascii=False)
        with self._database.update() as connection:
            connection.execute(
                "INSERT INTO jobs (job_id, namespace, state, spec, created_at, updated_at)"
                " VALUES (?, ?, 'queued', ?, ?, ?)",
                (job_id, namespace, encoded, now, now),
            )
            _add_items(connection, job_id, sources)
            connection.execute(
                "DELETE FROM jobs WHERE job_id IN (SELECT job_id FROM (SELECT job_id, place,"
                " row_number() OVER (ORDER BY place, updated_at DESC) AS fair_place FROM"
                " (SELECT job_id, updated_at,"
                " row_number() OVER (PARTITION BY namespace ORDER BY updated_at DESC) AS place"
                f" FROM jobs WHERE state IN {FINISHED}) own) ranked WHERE place > ? OR fair_place > ?)",
                (KEEP_FINISHED, KEEP_FINISHED_IN_ALL),
            )
            return _job(connection, job_id)

    def get(self, job_id: str) -> Job:
        """Raises NotFound (``job_not_found``)."""
        with self._database.read() as connection:
            return _job(connection, job_id)

    def list(
        self,
        namespace: str | None = None,
        state: str | None = None,
        limit: int = 100,
        *,
        within: Sequence[str] | None = None,
    ) -> Jobs:
        """List up to ``limit`` jobs (of a namespace, in a state), newest first.

        ``within``: only of these namespaces, and of those that begin as one that ends with ``*``."""
        if state is not None and state not in JOB_STATES:
            raise InvalidRequest(
                f"No job state {state!r}.", hint=f"States are: {', '.join(JOB_STATES)}.", param="state"
            )
        if limit < 1:
            raise InvalidRequest("limit must be at least 1.", param="limit")
        with self._database.read() as connection:
            conditions, parameters = _chosen(connection, namespace, state, within)
            rows = connection.execute(
                f"SELECT {_JOB} FROM jobs WHERE {conditions} ORDER BY created_at DESC, rowid DESC LIMIT ?",
                (*parameters, limit),
            ).fetchall()
            return [_to_job(connection, row) for row in rows]

    def any_active(self, kinds: Collection[str], *, background: bool = True) -> bool:
        """Return whether a process works on a job, or one of these kinds waits for its first. Not so a job
        that its worker gave back, or died with: nobody may ever take it up.

        ``background``: those count, too, that nobody asked for."""
        with self._database.read() as connection:
            now = time.time()
            rows = connection.execute(
                "SELECT state, spec FROM jobs"
                " WHERE state = 'queued' OR (state = 'running' AND lease_until > ?)",
                (now,),
            ).fetchall()
        found = [(state, json.loads(spec)) for state, spec in rows]
        active = [spec for state, spec in found if state == "running" or spec.get("kind") in kinds]
        return any(background or not spec.get("background") for spec in active)

    def claim(self, worker: str, lease_s: float, job_id: str | None = None) -> Job | None:
        """Claim the oldest job (or the given one) that is queued, or running with an expired lease; None if
        there is none.

        The job is then running, leased to ``worker`` until ``lease_s`` seconds after its last heartbeat. An
        ``error`` of a running job says that a worker of it has died; what a job that was given back waited
        for is gone then."""
        now = time.time()
        with self._database.update() as connection:
            # the error of a running job says that a worker died; a job that was given back has no worker
            row = connection.execute(
                "UPDATE jobs SET state = 'running', worker = ?1, lease_until = ?2, updated_at = ?3,"
                " error = CASE WHEN (state = 'running' AND worker IS NOT NULL) OR error = ?5 THEN ?5 END"
                " WHERE job_id = (SELECT job_id FROM jobs"
                " WHERE (state = 'queued' OR (state = 'running' AND lease_until < ?3))"
                " AND (CAST(?4 AS TEXT) IS NULL OR job_id = ?4) ORDER BY created_at, rowid LIMIT 1"
                f"{connection.dialect.skip_locked}) RETURNING job_id",
                (worker, now + lease_s, now, job_id, _DIED),
            ).fetchone()
            return _job(connection, row[0]) if row else None

    def fail_if_died_twice(self, job_id: str) -> bool:
        """Fail a running job whose second worker has died, too; True if it was one.

        For those who take up jobs unasked: what killed two servers would kill each one."""
        now = time.time()
        with self._database.update() as connection:
            ended = connection.execute(
                "UPDATE jobs SET state = 'failed', error = ?, worker = NULL, lease_until = NULL,"
                " updated_at = ? WHERE job_id = ? AND state = 'running' AND lease_until < ?"
                " AND worker IS NOT NULL AND error IS NOT NULL",
                (_DIED_TWICE, now, job_id, now),
            )
            return ended.rowcount == 1

    def heartbeat(self, job_id: str, worker: str, lease_s: float) -> bool:
        """Extend the lease. False when the worker no longer has it and must stop."""
        now = time.time()
        with self._database.update() as connection:
            cursor = connection.execute(
                "UPDATE jobs SET lease_until = ?, updated_at = ?"
                " WHERE job_id = ? AND worker = ? AND state = 'running'",
                (now + lease_s, now, job_id, worker),
            )
            return cursor.rowcount == 1

    def release(self, job_id: str, worker: str, error: str | None = None) -> None:
        """Give a job back unfinished, to be claimed at once; nothing if the worker no longer has it.

        ``error``: what it waits for."""
        now = time.time()
        with self._database.update() as connection:
            connection.execute(
                "UPDATE jobs SET worker = NULL, lease_until = ?, updated_at = ?, error = COALESCE(?, error)"
                " WHERE job_id = ? AND worker = ? AND state = 'running'",
                (now, now, _told(error), job_id, worker),
            )

    def add_items(self, job_id: str, sources: Iterable[str]) -> None:
        """Add pending items; sources that the job already has are left as they are."""
        with self._database.update() as connection:
            _job(connection, job_id)
            _add_items(connection, job_id, sources)

    def update_items(self, job_id: str, outcomes: Sequence[JobItem], *, add: bool = False) -> None:
        """Set the outcomes of items in one transaction; with ``add``, items that the job lacks are added.
        Raises NotFound (``job_item_not_found``), and then changes none.
        """
        for item in outcomes:
            if item.state not in ITEM_STATES:
                raise InvalidRequest(
                    f"No item state {item.state!r}.",
                    hint=f"States are: {', '.join(ITEM_STATES)}.",
                    param="state",
                )
        with self._database.update() as connection:
            if add:
                _add_items(connection, job_id, [item.source for item in outcomes])
            for item in outcomes:
                cursor = connection.execute(
                    "UPDATE job_items SET state = ?2, reason = ?3, chunks = ?4, tokens = ?5, size_bytes = ?6,"
                    " doc_id = ?7 WHERE source = ?1 AND job_id = ?8",
                    (*astuple(replace(item, reason=_told(item.reason))), job_id),
                )
                if cursor.rowcount == 0:
                    _job(connection, job_id)
                    raise NotFound(f"Job {job_id} has no item {item.source!r}.", code="job_item_not_found")
            connection.execute("UPDATE jobs SET updated_at = ? WHERE job_id = ?", (time.time(), job_id))

    def items(self, job_id: str, state: str | None = None) -> Items:
        """The items (in a state), in the order of addition."""
        with self._database.read() as connection:
            _job(connection, job_id)
            rows = connection.execute(
                f"SELECT {_ITEM} FROM job_items WHERE job_id = ?1"
                " AND (CAST(?2 AS TEXT) IS NULL OR state = ?2)"
                " ORDER BY item",
                (job_id, state),
            )
            return [JobItem(*row) for row in rows]

    def finish(self, job_id: str, state: str, error: str | None = None, *, worker: str | None = None) -> Job:
        """End a job as done, failed or cancelled; of many unchanged items the number is kept. With
        ``worker``, raises Conflict if that worker has lost its lease.
        """
        if state not in FINISHED:
            raise InvalidRequest(
                f"A job cannot end as {state!r}.", hint=f"It ends as: {', '.join(FINISHED)}.", param="state"
            )
        owned, owner = ("", ()) if worker is None else (" AND worker = ? AND state = 'running'", (worker,))
        with self._database.update() as connection:
            ended = connection.execute(
                "UPDATE jobs SET state = ?, error = ?, worker = NULL, lease_until = NULL, updated_at = ?"
                f" WHERE job_id = ?{owned}",
                (state, _told(error), time.time(), job_id, *owner),
            )
            job = _job(connection, job_id)
            if ended.rowcount == 0:
                raise Conflict(
                    f"Job {job_id} is not {worker}'s any more.",
                    hint="Another worker took it over.",
                    code="job_lease_lost",
                )
            return _without_unchanged(connection, job)

    def request_cancel(self, job_id: str) -> Job:
        """Cancel a job that no process runs at once and ask a running one to stop; a finished job stays as it
        is."""
        with self._database.update() as connection:
            job_cancellation.cancel(connection, job_id=job_id)
            return _job(connection, job_id)

    def cancel_requested(self, job_id: str) -> bool:
        """Raises NotFound."""
        with self._database.read() as connection:
            row = connection.execute(
                "SELECT cancel_requested FROM jobs WHERE job_id = ?", (job_id,)
            ).fetchone()
        if row is None:
            raise job_not_found(job_id)
        return bool(row[0])


def job_not_found(job_id: str) -> NotFound:
    """The error for a job that is not there."""
    return NotFound(
        f"There is no job {job_id!r}.",
        hint=f"Only a namespace's last {KEEP_FINISHED:,} finished jobs are kept.",
        code="job_not_found",
    )


def _told(reason: str | None) -> str | None:
    """A reason as it is stored; a library's message may quote what it was given."""
    return None if reason is None else storable(reason)[:_MAX_REASON]


def _chosen(
    connection: Connection, namespace: str | None, state: str | None, within: Sequence[str] | None
) -> tuple[str, list[Any]]:
    """The condition on jobs that are listed, and its parameters."""
    parts, parameters = ["TRUE"], list[Any]()
    for column, value in (("namespace", namespace), ("state", state)):
        if value is not None:
            parts.append(f"{column} = ?")
            parameters.append(value)
    if within is not None:
        texts = connection.dialect.texts
        parts.append(
            f"(namespace IN (SELECT value FROM {texts} named) OR EXISTS (SELECT 1 FROM {texts} begun"
            " WHERE substr(namespace, 1, length(begun.value)) = begun.value))"
        )
        begun = [pattern.removesuffix("*") for pattern in within if pattern.endswith("*")]
        parameters += [json.dumps(list(within)), json.dumps(begun)]
    return " AND ".join(parts), parameters


def _add_items(connection: Connection, job_id: str, sources: Iterable[str]) -> None:
    connection.executemany(
        "INSERT INTO job_items (job_id, source) VALUES (?, ?) ON CONFLICT DO NOTHING",
        ((job_id, source) for source in sources),
    )


def _without_unchanged(connection: Connection, job: Job) -> Job:
    """Replace the unchanged items of a finished job by their sums, if they are many."""
    chosen = "WHERE job_id = ? AND state = 'unchanged'"
    sums = connection.execute(
        "SELECT count(*), CAST(sum(chunks) AS BIGINT), CAST(sum(tokens) AS BIGINT),"
        f" CAST(sum(size_bytes) AS BIGINT) FROM job_items {chosen}",
        (job.job_id,),
    ).fetchone()
    if sums is None or sums[0] <= KEEP_UNCHANGED:
        return job
    spec = json.dumps({**job.spec, _UNCHANGED: list(sums)}, ensure_ascii=False)
    connection.execute(f"DELETE FROM job_items {chosen}", (job.job_id,))
    connection.execute("UPDATE jobs SET spec = ? WHERE job_id = ?", (spec, job.job_id))
    return _job(connection, job.job_id)


def _job(connection: Connection, job_id: str) -> Job:
    row = connection.execute(f"SELECT {_JOB} FROM jobs WHERE job_id = ?", (job_id,)).fetchone()
    if row is None:
        raise job_not_found(job_id)
    return _to_job(connection, row)


def _to_job(connection: Connection, row: tuple[Any, ...]) -> Job:
    job_id, namespace, state, spec, error, cancel_requested, *rest = row
    spec = json.loads(spec)
    counts = dict.fromkeys(ITEM_STATES, 0)
    counts["unchanged"], *totals = spec.get(_UNCHANGED, (0, 0, 0, 0))
    rows = connection.execute(
        "SELECT state, count(*), CAST(sum(chunks) AS BIGINT), CAST(sum(tokens) AS BIGINT),"
        " CAST(sum(size_bytes) AS BIGINT) FROM job_items"
        " WHERE job_id = ? GROUP BY state",
        (job_id,),
    )
    for item_state, n, *sums in rows:
        counts[item_state] += n
        totals = [total + part for total, part in zip(totals, sums, strict=True)]
    chunks, tokens, size_bytes = totals
    n_items = sum(counts.values())
    columns = (counts, n_items, chunks, tokens, size_bytes, error, bool(cancel_requested), *rest)
    return Job(job_id, namespace, state, spec, *columns)
