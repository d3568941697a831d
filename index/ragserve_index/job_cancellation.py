"""Cancelling unfinished jobs, also in a transaction of the index: jobs end with their namespace."""

from __future__ import annotations

import time

from ragserve.errors import Conflict
from ragserve_index.database import Connection


def cancel(connection: Connection, *, job_id: str | None = None, namespace: str | None = None) -> None:
    """Cancel at once a job that no process runs, also one whose process has died, and ask a running one to
    stop: one by its id, or all of a namespace."""
    column, value = ("job_id", job_id) if namespace is None else ("namespace", namespace)
    now = time.time()
    connection.execute(
        "UPDATE jobs SET cancel_requested = 1, updated_at = ?,"
        " state = CASE WHEN worker IS NULL OR lease_until < ? THEN 'cancelled' ELSE state END,"
        " worker = CASE WHEN lease_until < ? THEN NULL ELSE worker END"
        f" WHERE {column} = ? AND state IN ('queued', 'running')",
        (now, now, now, value),
    )


def check_goes_on(connection: Connection, job_id: str | None) -> None:
    """Raise Conflict (``job_cancelled``) for a job that is cancelled or forgotten. None: for no job."""
    if job_id is None:
        return
    row = connection.execute("SELECT cancel_requested FROM jobs WHERE job_id = ?", (job_id,)).fetchone()
    if row is None or row[0]:
        raise Conflict(f"Job {job_id} is cancelled.", hint="Submit it again.", code="job_cancelled")
